"""What the report makes of RingMonitor's records: the verdict, the table, the bars of the ranks."""

from typing import Any

from stabilitykit.records import Record
from stabilitykit.report.figures import figure
from stabilitykit.report.marks import BLUE, MUTED
from stabilitykit.report.panels import PANELS
from stabilitykit.report.summary import table
from stabilitykit.report.verdict import findings, headline
from stabilitykit.runlog import Records

BARS = next(panel for panel in PANELS if panel.form == "rank bars")


def ring(step: int, *, layers: bool = True, ranks: int = 2, **numbers: float) -> Record:
    found = {"roundoff_ratio": 1.5, "row_mass": 0.0, "key_sum": 1e-4, "transport": 0.0, **numbers}
    heads = [{"head": 3, "roundoff_ratio": found["roundoff_ratio"], "rank": 1}]
    rows: dict[str, Any] = (
        {"h.0": {"dtype": "bfloat16", "rank": 1, **found, "heads": heads}} if layers else {}
    )
    load = {"tiles": [30, 10], "work_s": [3.0, 1.0], "wait_s": [0.5, 2.5]}
    load = {"ranks": list(range(ranks)), **{key: row[:ranks] for key, row in load.items()}}
    values = {"ring/imbalance": 1.5, "ring/wait_percent": 71.4} if layers else {}
    return Record(step, 1, "ring", values, {"layers": rows, "rows": 8, "balance": [load] if layers else []})


def told(*rows: Record) -> list[str]:
    return [f.text for f in findings(Records(list(rows))) if f.subject == "attention across ranks"]


def event(step: int, monitor: str, message: str, end: int | None = None) -> Record:
    detail = {"id": 1, "kind": "ring", "start": step, "end": end, "monitor": monitor, "message": message}
    return Record(step, 1, "event", {}, detail)


def test_a_run_without_ring_attention_says_nothing_of_it() -> None:
    assert told(Record(0, 1, "loss", {"loss/value": 2.0})) == []
    assert not any("ranks" in label for label, _ in table(Records([Record(0, 1, "loss", {})])))


def test_a_healthy_run_names_the_number_nearest_to_its_limit_and_the_balance() -> None:
    assert told(ring(9), ring(19)) == [
        "Attention across ranks: nothing wrong: worst output roundoff ratio 1.5 (limit 3 for bfloat16) in "
        "h.0 head 3 on rank 1 at step 9. The busiest rank computes 1.5 times the mean; one waits 71.4 % of "
        "its time."
    ]
    assert told(ring(9, ranks=1))[0].endswith("on rank 1 at step 9.")
    assert dict(table(Records([ring(9)])))["Across ranks"] == "1 layer on 1 step, 2 ranks, 8 rows of each"


def test_an_identity_is_of_all_ranks_and_heads_and_one_look_is_no_finding() -> None:
    (text,) = told(ring(9, key_sum=0.02))
    assert text == (
        "Attention across ranks read key sum 0.02 (limit 0.01 for bfloat16) in h.0 at step 9, not often "
        "enough for an event."
    )
    assert headline(findings(Records([ring(9, key_sum=0.02)])))[0] == "unknown"


def test_events_are_told_once_in_the_monitors_words() -> None:
    rows = [ring(9), event(9, "ring", "attention across ranks is off: h.0")]
    rows.append(event(9, "ring transport", "a block of keys was damaged", end=19))
    found = findings(Records(rows))
    mine = [f for f in found if f.state == "bad"]
    assert [(f.subject, f.since, f.over) for f in mine] == [
        ("attention across ranks", 9, False),
        ("attention across ranks", 9, True),
    ]
    assert mine[0].text == "From step 9, attention across ranks is off: h.0."
    assert not any(f.state == "good" for f in found if f.subject == "attention across ranks")


def test_a_monitor_that_saw_no_call_is_said() -> None:
    rows = [ring(9, layers=False), ring(19, layers=False)]
    assert told(*rows) == ["RingMonitor saw no ring attention call on 2 measured steps."]
    assert dict(table(Records(rows)))["Across ranks"] == "no call seen"
    assert figure(BARS, Records(rows)) is None


def test_each_rank_is_a_bar_of_work_and_waiting_with_its_tiles() -> None:
    drawn = figure(BARS, Records([ring(9), ring(19)]))
    assert drawn is not None
    work, waiting = drawn["data"]
    assert (work["y"], work["x"], waiting["x"]) == (["rank 0", "rank 1"], [3.0, 1.0], [0.5, 2.5])
    assert work["text"] == ["30 tiles", "10 tiles"]
    assert (work["marker"]["color"], waiting["marker"]["color"]) == (BLUE, MUTED)
    assert drawn["layout"]["barmode"] == "stack"


def test_every_ring_panel_draws_what_the_record_has() -> None:
    numbers = {"grad_roundoff_ratio": 1.0, "value_sum": 1e-4, "query_key": 1e-6, "out_value": 1e-6}
    row = ring(9, **numbers)
    row.values["ring/transport"] = 0.0
    drawn = [figure(panel, Records([row])) for panel in PANELS if panel.kind == "ring"]
    assert all(drawn)
