import math
from collections.abc import Mapping
from typing import Any

import pytest

from stabilitykit.records import Record
from stabilitykit.report.verdict import Finding, findings, headline
from stabilitykit.runlog import Records

UNWATCHED = "Weights were not compared with a twin's in this run, or no comparison was due."
ATTN = "model.blocks.2.attn"


def loss(steps: int, value: float = 2.6) -> list[Record]:
    return [Record(step, 1, "loss", {"loss/value": value}) for step in range(steps)]


def event(start: int, end: int | None, kind: str = "spike", **more: Any) -> Record:
    detail = {"id": start, "kind": kind, "start": start, "end": end, "peak": 6.1, "baseline": 2.6}
    return Record(start, 1, "event", {}, {**detail, "monitor": "LossMonitor", **more})


def attention(step: int, dtype: str = "bfloat16", layer: str = ATTN, **numbers: Any) -> Record:
    heads = [{"head": 0, **dict.fromkeys(numbers, 0.5)}, {"head": 1, **numbers}]
    layers = {layer: {"dtype": dtype, **numbers, "heads": heads}} if numbers else {}
    return Record(step, 1, "attention", {}, {"layers": layers})


def texts(*rows: Record) -> list[str]:
    return [finding.text for finding in findings(Records(sorted(rows, key=lambda r: r.step)))]


def first(*rows: Record) -> str:
    return headline(findings(Records(list(rows))))[1]


def test_a_healthy_run() -> None:
    rows = [*loss(300), attention(160, roundoff_ratio=1.1), attention(180, roundoff_ratio=0.9)]
    assert texts(*rows) == [
        "Loss: nothing wrong: no event in 300 steps.",
        "Attention: nothing wrong: worst output roundoff ratio 1.1 (limit 3 for bfloat16) in "
        "model.blocks.2.attn head 1 at step 160.",
        UNWATCHED,
    ]
    assert first(*rows) == "Nothing wrong was seen in the loss or in attention."


def test_one_spike_that_is_over() -> None:
    rows = [*loss(300), event(200, 203)]
    assert texts(*rows)[0] == ("1 loss spike, at step 200 (6.1 against a baseline of 2.6), over at step 203.")
    assert first(*rows) == "Something was off in the loss, first at step 200; it is over."


def test_a_divergence_that_is_not_over() -> None:
    rows = [*loss(300), event(210, None, "divergence")]
    assert texts(*rows)[0] == (
        "1 loss divergence, at step 210 (6.1 against a baseline of 2.6), still open at step 299."
    )
    assert first(*rows) == "Something is off in the loss, since step 210."


def test_many_events_are_told_up_to_three_and_counted() -> None:
    sentence = texts(*loss(300), *(event(at, at + 1) for at in (10, 20, 30, 40, 50)))[0]
    assert sentence.startswith("5 loss spikes, at step 10 (6.1 against")
    assert sentence.endswith("over at step 31; and 2 more, the last at step 50.")


def test_each_kind_of_event_has_its_sentence() -> None:
    found = texts(*loss(9), event(2, 3, "nonfinite", peak="nan", baseline="nan"), event(4, 5, "shift"))
    assert found[0] == "1 non-finite loss, at step 2, over at step 3."
    assert found[1].startswith("1 loss shift, at step 4")


def test_a_loss_that_is_never_finite_is_said_without_any_event() -> None:
    rows = loss(50, math.nan)
    assert texts(*rows)[0] == "The loss is not a finite number on 50 steps, first at step 0."
    assert first(*rows) == "Something is off in the loss, since step 0."


@pytest.mark.parametrize(
    ("dtype", "value", "off"),
    [("bfloat16", 2.99, False), ("bfloat16", 3.0, True), ("float32", 150.0, False)],
)
def test_attention_is_judged_by_the_format_of_its_layer(dtype: str, value: float, off: bool) -> None:
    found = findings(Records([attention(9, dtype, roundoff_ratio=value)]))
    assert [f.state for f in found if f.subject == "attention"] == ["bad" if off else "good"]


def test_attention_that_is_off_says_where_and_since_when() -> None:
    rows = [
        attention(99, roundoff_ratio=1.0),
        attention(119, roundoff_ratio=41.0),
        attention(139, roundoff_ratio=95.0),
        attention(159, roundoff_ratio=12.0),
    ]
    assert texts(*rows)[1] == (
        "Attention is off: output roundoff ratio 95 (limit 3 for bfloat16) in model.blocks.2.attn "
        "head 1, since step 119, worst at step 139, last seen at step 159, in 1 of 1 layer."
    )
    assert first(*rows) == "Something is off in attention, since step 119."


def test_attention_that_was_off_once_is_over() -> None:
    rows = [attention(99, grad_roundoff_ratio=41.0), attention(119, grad_roundoff_ratio=1.0)]
    assert texts(*rows)[1] == (
        "Attention is off: gradient roundoff ratio 41 (limit 3 for bfloat16) in "
        "model.blocks.2.attn head 1, at step 99, in 1 of 1 layer."
    )
    assert first(*rows) == "Something was off in attention, first at step 99; it is over."


def test_one_look_a_little_over_among_many_is_told_and_not_called_off() -> None:
    steps = (9, 19, 29, 39, 49)
    rows = [attention(step, roundoff_ratio=3.5 if step == 29 else 1.0) for step in steps]
    assert texts(*rows)[1] == (
        "Attention read output roundoff ratio 3.5 (limit 3 for bfloat16) in model.blocks.2.attn head 1 "
        "once, at step 29; no look before or after was over."
    )
    for many in (rows[:3], [*rows, attention(59, roundoff_ratio=3.5)]):
        assert texts(*many)[1].startswith("Attention is off")


def test_nan_in_the_kernels_output() -> None:
    rows = [attention(99, nonfinite=12.0, roundoff_ratio="inf"), attention(119, nonfinite=0.0)]
    assert texts(*rows)[1:] == [
        "Attention is off: 12 NaN or inf in the output of model.blocks.2.attn head 1, at step 99, "
        "in 1 of 1 layer.",
        "Attention is off: output roundoff ratio inf (limit 3 for bfloat16) in "
        "model.blocks.2.attn head 1, at step 99, in 1 of 1 layer.",
        UNWATCHED,
    ]


def test_a_ratio_that_is_no_number_is_not_called_healthy() -> None:
    assert texts(attention(99, roundoff_ratio="nan"))[1:] == [
        "Attention could not be judged 1 time: roundoff ratio is not a number, first in "
        "model.blocks.2.attn at step 99.",
        UNWATCHED,
    ]


def test_what_was_not_watched_is_said() -> None:
    assert texts(Record(0, 1, "overhead", {})) == [
        "The loss was not watched in this run.",
        "Attention was not watched in this run, or no step was due.",
        UNWATCHED,
    ]
    assert first(Record(0, 1, "overhead", {})) == "Nothing was judged."


def test_a_model_without_attention_calls_is_said() -> None:
    rows = [*loss(200), attention(99), attention(199)]
    assert texts(*rows)[1] == "AttentionMonitor saw no attention call on 2 measured steps."
    assert first(*rows) == "Nothing wrong was seen in the loss."


def test_calls_that_could_not_be_measured_are_said_with_the_reason() -> None:
    skipped = {"h.0": "dropout 0.1 in the kernel", "h.1": "dropout 0.1 in the kernel"}
    row = Record(99, 1, "attention", {}, {"layers": {}, "skipped": skipped})
    assert texts(row)[1] == "Attention was not measured in 2 layers (h.0): dropout 0.1 in the kernel."


def test_a_format_without_a_limit_is_not_judged() -> None:
    assert texts(attention(9, "float64", roundoff_ratio=1.0))[1] == (
        "Attention was seen, but nothing of it was judged."
    )


def test_a_deviation_is_told_in_its_own_words_once_and_is_over_when_it_closed() -> None:
    detail = {"id": 1, "kind": "deviation", "start": 30, "end": None, "peak_step": 30, "monitor": "attention"}
    opened = Record(30, 1, "event", {}, {**detail, "message": "a head 2, output roundoff ratio 12"})
    found = [finding for finding in findings(Records([*loss(40), opened], [])) if finding.state == "bad"]
    assert [(finding.subject, finding.since, finding.over) for finding in found] == [("attention", 30, False)]
    assert found[0].text.startswith("From step 30, a head 2, output roundoff ratio 12")
    closed = Record(38, 1, "event", {}, {**opened.detail, "end": 38})
    found = [f for f in findings(Records([*loss(40), opened, closed], [])) if f.state == "bad"]
    assert [finding.over for finding in found] == [True]


def test_other_monitors_events_are_told_in_their_own_words() -> None:
    row = event(7, None, "parity", monitor="RingMonitor", message="ranks 0 and 1 differ")
    assert texts(*loss(9), row)[-1] == "parity at step 7: ranks 0 and 1 differ."


def test_the_headline_speaks_of_what_is_still_open() -> None:
    found = [Finding("the loss", "bad", "", 5, True), Finding("attention", "bad", "", 9)]
    assert headline(found) == ("bad", "Something is off in attention, since step 9.")
    over = [found[0], Finding("attention", "bad", "", 2, True)]
    assert headline(over)[1] == (
        "Something was off in the loss and in attention, first at step 2; it is over."
    )


def test_three_pillars_are_listed_as_a_person_does() -> None:
    found = [Finding(what, "good", "") for what in ("the loss", "attention", "the weights")]
    assert headline(found)[1] == "Nothing wrong was seen in the loss, in attention or in the weights."


def weights(step: int, words: str, detail: Mapping[str, Any] = {}, **numbers: float) -> Record:
    values = {f"weights/float32/{name}": number for name, number in numbers.items()}
    own = {"verdict": {"float32": words}, "floor": {"rel_l2": [1e-5, 2e-5, 3e-5]}, "window": 10}
    return Record(step, 1, "weights", values, {**own, "forked_at": step - 9, **detail})


NOISE = "not distinguishable from the floor"
ABOVE = "above all 3 jitter seeds (p = 1/4)"


@pytest.mark.parametrize(
    ("words", "numbers", "detail", "sentence"),
    [
        (
            NOISE,
            {"rel_l2": 2.6e-5, "rel_l2_over_floor": 1.3},
            {},
            "Weights: after 10 steps from step 99, float32 is not distinguishable from the run's own "
            "rounding noise (1.3 floors, 3 jitter seeds).",
        ),
        (
            ABOVE,
            {"rel_l2": 1e-4, "rel_l2_over_floor": 5.2},
            {"window": None, "forked_at": 0},
            "Weights: after 109 steps in lockstep, float32 is above all 3 jitter seeds (p = 1/4): "
            "5.2 floors.",
        ),
        (
            ABOVE,
            {"rel_l2": 1e-4, "rel_l2_over_floor": math.inf},
            {"floor": {"rel_l2": [0.0, 0.0, 0.0]}},
            "Weights: after 10 steps from step 99, float32 is above all 3 jitter seeds (p = 1/4): "
            "relative L2 0.0001.",
        ),
        (
            "this arm had no effect",
            {"rel_l2": 0.0, "rel_l2_over_floor": 0.0},
            {"floor": {"rel_l2": [1e-5]}},
            "Weights: after 10 steps from step 99, float32 had no effect (distance 0, 1 jitter seed).",
        ),
        (
            "no floor was measured",
            {"rel_l2": 1e-4},
            {"floor": {"rel_l2": []}},
            "Weights: after 10 steps from step 99, float32 was measured without a noise floor "
            "(relative L2 0.0001).",
        ),
        (
            "the floor is not finite",
            {"rel_l2": 1e-4, "rel_l2_over_floor": math.nan},
            {"floor": {"rel_l2": [1e-5, "nan"]}},
            "Weights: after 10 steps from step 99, float32 has no finite noise floor to stand against "
            "(relative L2 0.0001, 2 jitter seeds).",
        ),
    ],
)
def test_one_comparison_of_weights(
    words: str, numbers: dict[str, float], detail: dict[str, Any], sentence: str
) -> None:
    found = findings(Records([weights(108, words, detail, **numbers)]))
    assert found[-1] == Finding("the weights", "good" if words in (NOISE, ABOVE) else "unknown", sentence)


def test_many_windows_are_counted() -> None:
    rows = [
        weights(108 + 100 * at, NOISE if at == 2 else ABOVE, rel_l2=1e-4, rel_l2_over_floor=1.0 + at)
        for at in range(5)
    ]
    assert texts(*rows)[2] == (
        "Weights: in 5 windows of 10 steps, the last from step 499, float32 is above all 3 jitter seeds "
        "(p = 1/4) in 4 of 5 and is not distinguishable from the run's own rounding noise in 1 "
        "(last: 5 floors)."
    )
    assert first(*rows) == "Nothing wrong was seen in the weights."


def test_lockstep_measurements_are_counted_and_arms_told_one_by_one() -> None:
    def row(step: int) -> Record:
        values = {"weights/float32/rel_l2": 1e-4, "weights/jitter_1e_6/rel_l2": 2e-5}
        verdict = {"float32": ABOVE, "jitter=1e-6": NOISE}
        return Record(step, 1, "weights", values, {"verdict": verdict, "window": None, "forked_at": 0})

    assert texts(row(99), row(199))[2] == (
        "Weights: at 2 measured steps, the last after 200 steps in lockstep, float32 is above all 3 jitter "
        "seeds (p = 1/4) in both (last: relative L2 0.0001); jitter=1e-6 is not distinguishable from the "
        "run's own rounding noise in both (last: relative L2 2e-05)."
    )


def test_weights_that_are_not_finite_are_what_is_wrong() -> None:
    lost = {"nonfinite": {"main": 3, "float32": 5}}
    words = "not finite: 3 weights of the run, 5 of the twin"
    rows = [
        weights(108, NOISE, rel_l2=2e-5, rel_l2_over_floor=1.0),
        weights(208, words, lost, rel_l2=math.nan),
        weights(308, words, lost, rel_l2=math.nan),
    ]
    assert texts(*rows)[2:] == [
        "3 weights of the run are not finite, since step 208, last seen at step 308.",
        "Weights: after 10 steps from step 99, float32 is not distinguishable from the run's own rounding "
        "noise (1 floor, 3 jitter seeds).",
    ]
    assert first(*rows) == "Something is off in the weights, since step 208."


def test_a_twin_that_is_not_finite_is_not_called_the_run() -> None:
    words = "not finite: 0 weights of the run, 5 of the twin"
    row = weights(108, words, {"nonfinite": {"main": 0, "float32": 5}}, rel_l2=math.nan)
    assert texts(row)[2:] == [
        "5 weights of the float32 twin are not finite, while the run's are, at step 108."
    ]
    assert first(row) == "Something is off in the weights of the float32 twin, since step 108."


def test_a_weights_record_without_numbers_or_words() -> None:
    assert texts(Record(9, 1, "weights"))[2:] == ["Weights: nothing was compared in 1 record."]
    row = Record(9, 1, "weights", {"weights/float32/rel_l2": 1e-4})
    assert texts(row)[2:] == ["Weights: at step 9, float32 has no verdict (relative L2 0.0001)."]
