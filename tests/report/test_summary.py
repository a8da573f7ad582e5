import math

from stabilitykit.records import Record
from stabilitykit.report.summary import table
from stabilitykit.runlog import Records


def test_the_table_of_a_small_run() -> None:
    heads = [{"head": 1, "roundoff_ratio": 1.25}]
    layers = {"m.0": {"dtype": "bfloat16", "roundoff_ratio": 1.25, "heads": heads}}
    sampled = {"heads": 2, "rows": 64, "sequences": 1}
    cost = {"overhead/attention_percent": 3.9, "overhead/total_percent": 4.11}
    rows = [
        Record(0, 1, "loss", {"loss/value": 3.0}),
        Record(1, 1, "loss", {"loss/value": 2.0}),
        Record(2, 2, "loss", {"loss/value": 2.5}),
        Record(2, 2, "attention", {}, {"layers": layers, "sampled": sampled}),
        Record(2, 2, "event", {}, {"id": 0, "kind": "spike", "start": 2, "end": None}),
        Record(2, 2, "overhead", cost),
    ]
    assert table(Records(rows, ["records.jsonl:7: a torn last line was skipped"])) == [
        ("Steps", "3 with records, 0 to 2, the last in attempt 2"),
        ("Loss", "2.5 at step 2, lowest 2 at step 1"),
        ("Attention", "1 layer on 1 step, each time 2 heads, 64 rows, 1 sequence"),
        ("Worst layer", "m.0 head 1: output roundoff ratio 1.25 at step 2"),
        ("Events", "1 spike"),
        ("Cost", "4.11 % of the run without monitors (attention 3.9)"),
        ("Not readable", "1 line of the log"),
    ]


def test_what_is_missing_is_said() -> None:
    rows = [Record(0, 1, "loss", {"loss/value": math.nan})]
    assert table(Records(rows)) == [
        ("Steps", "1 with records, 0 to 0"),
        ("Loss", "nan at step 0"),
        ("Attention", "not watched"),
        ("Events", "none"),
        ("Cost", "not recorded"),
    ]


def test_named_heads_are_counted() -> None:
    detail = {"layers": {"a": {"dtype": "float64"}}, "sampled": {"heads": [0, 5, 7], "rows": 1}}
    rows = dict(table(Records([Record(9, 1, "attention", {}, detail)])))
    assert rows["Attention"] == "1 layer on 1 step, each time 3 heads, 1 row"
    assert rows["Loss"] == "not watched"
