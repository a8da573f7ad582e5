import json

import pytest

from stabilitykit.records import Record
from stabilitykit.runlog import (
    RunLog,
    claim_folder,
    find_folder,
    read_meta,
    read_records,
    start_attempt,
)


def loss(step, value, attempt=1):
    return Record(step, attempt, "loss", {"loss/value": value})


def event(step, number, end=None, attempt=1):
    return Record(step, attempt, "event", {}, {"id": number, "end": end})


def test_a_fresh_run_takes_a_folder_of_its_own(tmp_path):
    names = [claim_folder(tmp_path).name for _ in range(3)]
    assert names == ["stability", "stability-1", "stability-2"]


def test_the_newest_of_several_folders_is_found(tmp_path):
    for value in (1.0, 2.0):
        RunLog(claim_folder(tmp_path)).write(loss(0, value))
    (tmp_path / "stability" / "records.jsonl").touch()
    import os

    os.utime(tmp_path / "stability-1" / "records.jsonl", (2e9, 2e9))
    assert find_folder(tmp_path).name == "stability-1"
    assert find_folder(tmp_path / "stability").name == "stability"


def test_a_folder_without_records_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"expected a folder with records.jsonl.*got {tmp_path}"):
        find_folder(tmp_path)


def test_a_torn_last_line_is_skipped_reported_and_does_not_swallow_the_next(tmp_path):
    RunLog(tmp_path).write(loss(0, 1.0))
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"step": 1, "att')
    read = read_records(tmp_path)
    assert [row.step for row in read.rows] == [0]
    assert read.problems == ["records.jsonl:2: a torn last line was skipped (16 characters)"]
    RunLog(tmp_path).write(loss(1, 2.0, attempt=2))
    read = read_records(tmp_path)
    assert [row.values["loss/value"] for row in read.rows] == [1.0, 2.0]
    assert len(read.problems) == 1


def test_the_last_attempt_of_a_step_counts(tmp_path):
    log = RunLog(tmp_path)
    for record in [loss(0, 1.0), loss(1, 2.0), loss(2, 3.0), loss(1, 2.5, 2)]:
        log.write(record)
    values = [(row.step, row.values["loss/value"]) for row in read_records(tmp_path).rows]
    assert values == [(0, 1.0), (1, 2.5), (2, 3.0)]


def test_an_event_taken_back_by_a_resume_is_gone(tmp_path):
    log = RunLog(tmp_path)
    for record in [
        event(1, 1),
        event(1, 1, end=3),
        loss(5, 1.0),
        event(5, 2),
        loss(4, 1.0, 2),
        loss(6, 1.0, 2),
    ]:
        log.write(record)
    assert [(r.detail["id"], r.detail["end"]) for r in read_records(tmp_path).of("event")] == [
        (1, None),
        (1, 3),
    ]


def test_other_ranks_have_a_file_of_their_own(tmp_path):
    RunLog(tmp_path).write(loss(0, 1.0))
    RunLog(tmp_path, rank=1).write(event(0, 1))
    assert {row.kind for row in read_records(tmp_path).rows} == {"loss", "event"}
    assert (tmp_path / "records.rank1.jsonl").is_file()


def test_attempts_are_counted_in_the_folder(tmp_path):
    assert start_attempt(tmp_path, {"host": "a"}, None) == 1
    assert start_attempt(tmp_path, {"host": "b"}, 40) == 2
    assert start_attempt(tmp_path, {"host": "b"}, 40) == 3
    meta = read_meta(tmp_path)
    assert meta["host"] == "b"
    assert [row["resumed_at"] for row in meta["attempts"]] == [None, 40, 40]


def test_a_torn_meta_file_is_no_obstacle(tmp_path):
    (tmp_path / "meta.json").write_text('{"attem')
    assert read_meta(tmp_path) == {}
    assert start_attempt(tmp_path, {}, None) == 1


def test_every_line_is_one_json_document(tmp_path):
    RunLog(tmp_path).write(loss(0, float("nan")))
    row = json.loads((tmp_path / "records.jsonl").read_text())
    assert row == {
        "step": 0,
        "attempt": 1,
        "kind": "loss",
        "values": {"loss/value": "nan"},
        "detail": {},
    }
