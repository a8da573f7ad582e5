"""The bench of the detector: counts by hand, peers as published, and what planted curves give."""

import json
from pathlib import Path

import pytest

from stabilitykit.bench import detector as bench
from stabilitykit.bench.curves import Curve, labelled, planted
from stabilitykit.bench.detector import Score, detector, judge, left_out, score_ours
from stabilitykit.bench.peers import PEERS

DATA = Path(__file__).parents[1] / "data"
PUBLISHED = ["megatron_mixtral8x7b_a100_head", "pgolf_hnet_byte_4h", "speedrun_2"]


def curve(**truth):
    return Curve("x", "x", list(range(1000)), [2.0] * 1000, **truth)


def test_a_judgement_by_hand():
    truth = curve(spikes=[(400, 400), (600, 620)], ambiguous=[(800, 800)])
    # Found by an alarm; at 500 and 520 one false alarm; at 803 ambiguous; at 100 the opening descent.
    assert judge(truth, [400, 500, 520, 803, 100]) == Score(1, 2, 1, 700, 0, 0)
    assert judge(truth, [631]) == Score(0, 2, 0, 700, 0, 0)  # after its grace, yet no false alarm
    assert judge(truth, [630], [(380, 405)]) == Score(2, 2, 0, 700, 0, 0)


def test_figures_by_hand():
    figures = Score(found=3, troubles=4, false=1, rows=20_000).figures
    assert figures == {"recall": 0.75, "precision": 0.75, "f1": 0.75, "false_per_10k": 0.5}
    assert Score().figures == {"recall": 1.0, "precision": 1.0, "f1": 1.0, "false_per_10k": 0.0}


@pytest.mark.parametrize("seed", [pytest.param(0, id="seed0"), pytest.param(7, marks=pytest.mark.slow)])
def test_planted_troubles_are_found_named_and_not_cried_wolf(seed):
    total = sum((score_ours(one) for one in planted(seed)), Score())
    assert total.troubles == 47
    assert total.found >= 46
    assert total.false <= 2  # of 257,000 rows
    assert total.named >= 34


def test_published_curves_are_found_without_a_false_alarm():
    curves = labelled(DATA)
    assert [one.name for one in sorted(curves, key=lambda one: one.name)] == PUBLISHED
    total = sum((score_ours(one) for one in curves), Score())
    assert (total.found, total.troubles, total.false) == (14, 14, 0)


def test_each_peer_fires_on_what_it_was_made_for():
    calm = [2.0 + (t * 7919 % 13 - 6) / 200 for t in range(400)]
    spike = [loss + 4.5 * (t == 300) for t, loss in enumerate(calm)]
    twice = [loss + 3.0 * (t >= 300) for t, loss in enumerate(calm)]
    for name, rule in PEERS.items():
        assert not [row for row in rule(calm) if row > 30], name
        assert next(row for row in rule(twice if name == "llm_foundry" else spike) if row > 30) in (
            300,
            304,
        ), name


def test_peers_on_nan_as_their_formulas_say():
    losses = [2.0 + (t * 7919 % 13 - 6) / 200 + (float("nan") if t == 200 else 0) for t in range(400)]
    assert list(PEERS["lightning"](losses)) == [200]
    assert list(PEERS["mad"](losses)) == [200]
    assert list(PEERS["olmo_core"](losses)) == list(range(200, 329))  # NaN stays in its window


def test_without_labels_it_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="expected labels.json in"):
        labelled(tmp_path)
    label = {"spikes": [], "ambiguous": [], "judged_from_row": 0, "kind": "real"}
    (tmp_path / "labels.json").write_text(json.dumps({"gone": label}))
    with pytest.raises(ValueError, match=r"gone\.csv"):
        labelled(tmp_path)


def test_the_left_out_source_does_not_tune_itself(monkeypatch):
    monkeypatch.setattr(bench, "GRID", [(5.5, 2.75), (6.5, 2.75)])
    # Of "a" any options find all; of "b" only the first do. Tuned on "a" both tie, and the second is taken.
    lucky = {("b", 6.5): Score(0, 1, 0, 100)}
    found = {"a": Score(1, 1, 0, 100), "b": Score(1, 1, 0, 100)}
    monkeypatch.setattr(
        bench,
        "score_ours",
        lambda one, threshold, slack: lucky.get((one.source, threshold), found[one.source]),
    )
    rows = {row["name"]: row["value"] for row in left_out([Curve(s, s, [], []) for s in ("a", "b")])}
    assert (rows["left_out/recall"], rows["left_out/f1"]) == (0.0, 0.0)


@pytest.mark.slow
def test_rows_of_the_bench(monkeypatch):
    monkeypatch.setattr(bench, "MANY_ROWS", 20_000)
    monkeypatch.setattr(bench, "TIMED_ROWS", 2000)
    rows = detector(rounds=2, data=DATA)
    assert all(list(row) == ["name", "value", "unit", "limit", "ratio", "interval"] for row in rows)
    values = {row["name"]: row["value"] for row in rows}
    assert values["stabilitykit/f1"] == 1.0
    assert values["lightning/recall"] == 0.0
    assert values["left_out/f1"] > 0.9
    assert values["million_rows_memory"] < 1.1
    json.dumps(rows, allow_nan=False)
