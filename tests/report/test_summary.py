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
        ("Weights", "not measured"),
        ("Events", "1 spike"),
        ("Cost", "4.11 % of the run without monitors (attention 3.9)"),
        ("Not readable", "1 line of the log"),
    ]


def test_what_is_missing_is_said() -> None:
    rows = [Record(0, 1, "loss", {"loss/value": math.nan})]
    assert table(Records(rows)) == [
        ("Steps", "1 with records, 0 to 0"),
        ("Loss", "nan at step 0"),
        ("Attention", "not measured"),
        ("Weights", "not measured"),
        ("Events", "none"),
        ("Cost", "not recorded"),
    ]


def test_named_heads_are_counted() -> None:
    detail = {"layers": {"a": {"dtype": "float64"}}, "sampled": {"heads": [0, 5, 7], "rows": 1}}
    rows = dict(table(Records([Record(9, 1, "attention", {}, detail)])))
    assert rows["Attention"] == "1 layer on 1 step, each time 3 heads, 1 row"
    assert rows["Loss"] == "not watched"


def weights(step: int, window: int | None, floors: dict[str, float], seeds: int = 3) -> Record:
    raw = {"weights/float32/rel_l2": 2e-5, "weights/float32/w1": 3e-7, "weights/jitter_1e_6/rel_l2": 1e-5}
    values = {**raw, **{f"weights/float32/{name}_over_floor": value for name, value in floors.items()}}
    verdict = {"float32": "", "jitter=1e-6": ""}
    detail = {"verdict": verdict, "window": window, "forked_at": 0, "floor": {"rel_l2": [1e-5] * seeds}}
    return Record(step, 1, "weights", values, detail)


def test_weights_in_windows() -> None:
    floors = {"rel_l2": 5.2, "w1": 1.04}
    rows = dict(table(Records([weights(108, 10, floors), weights(208, 10, floors)])))
    assert rows["Weights"] == "2 arms (float32, jitter=1e-6) in 2 windows of 10 steps, 3 jitter seeds"
    assert rows["Last distance"] == (
        "float32 5.2 floors in relative L2, 1.04 in W1; jitter=1e-6 1e-05 in relative L2, nan in W1; "
        "at step 208"
    )


def test_weights_in_lockstep_without_a_floor() -> None:
    rows = dict(table(Records([weights(99, None, {}, seeds=0)])))
    assert rows["Weights"] == "2 arms (float32, jitter=1e-6) measured on 1 step, no noise floor"
    assert rows["Last distance"].startswith("float32 2e-05 in relative L2, 3e-07 in W1; ")


def test_an_arm_that_a_resume_left_out_has_no_last_distance() -> None:
    later = Record(208, 2, "weights", {"weights/bfloat16/rel_l2": 3e-4}, {"window": 10})
    rows = dict(table(Records([weights(108, 10, {}), later])))
    assert rows["Weights"].startswith("3 arms (float32, jitter=1e-6, bfloat16) in 2 windows")
    assert rows["Last distance"] == "bfloat16 0.0003 in relative L2, nan in W1; at step 208"
