import math
from typing import Any

import pytest

from stabilitykit.records import Record
from stabilitykit.report.verdict import Finding, findings, headline
from stabilitykit.runlog import Records

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


def test_nan_in_the_kernels_output() -> None:
    rows = [attention(99, nonfinite=12.0, roundoff_ratio="inf"), attention(119, nonfinite=0.0)]
    assert texts(*rows)[1:] == [
        "Attention is off: 12 NaN or inf in the output of model.blocks.2.attn head 1, at step 99, "
        "in 1 of 1 layer.",
        "Attention is off: output roundoff ratio inf (limit 3 for bfloat16) in "
        "model.blocks.2.attn head 1, at step 99, in 1 of 1 layer.",
    ]


def test_a_ratio_that_is_no_number_is_not_called_healthy() -> None:
    assert texts(attention(99, roundoff_ratio="nan"))[1:] == [
        "Attention could not be judged 1 time: roundoff ratio is not a number, first in "
        "model.blocks.2.attn at step 99."
    ]


def test_what_was_not_watched_is_said() -> None:
    assert texts(Record(0, 1, "overhead", {})) == [
        "The loss was not watched in this run.",
        "Attention was not watched in this run, or no step was due.",
    ]
    assert first(Record(0, 1, "overhead", {})) == "Nothing was judged."


def test_a_model_without_attention_calls_is_said() -> None:
    rows = [*loss(200), attention(99), attention(199)]
    assert texts(*rows)[1] == "AttentionMonitor saw no attention call on 2 measured steps."
    assert first(*rows) == "Nothing wrong was seen in the loss."


def test_calls_that_could_not_be_measured_are_said_with_the_reason() -> None:
    skipped = {"h.0": "dropout 0.1 in the kernel", "h.1": "dropout 0.1 in the kernel"}
    row = Record(99, 1, "attention", {}, {"layers": {}, "skipped": skipped})
    assert texts(row)[1:] == ["Attention was not measured in 2 layers (h.0): dropout 0.1 in the kernel."]


def test_a_format_without_a_limit_is_not_judged() -> None:
    assert texts(attention(9, "float64", roundoff_ratio=1.0))[1] == (
        "Attention was seen, but nothing of it was judged."
    )


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
