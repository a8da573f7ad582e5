"""In plain words: is anything wrong, where, since when; deviation and timing, never a cause."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from stabilitykit.records import Record
from stabilitykit.report.limits import COUNTS, RATIOS, RING, Reading, readings, worst_reading
from stabilitykit.report.panels import name_of
from stabilitykit.report.reading import LOSS_NOUNS, Layers, counted, events, is_about, layers, number, show
from stabilitykit.report.weights import comparisons, run_nonfinite, sentence
from stabilitykit.runlog import Records

State = Literal["good", "bad", "unknown"]
# Events of LossMonitor beside those of the loss itself; a gradient norm that jumps is no trouble by itself.
GRADIENT_KINDS: dict[str, State] = {
    "gradient_spike": "unknown",
    "gradient_transient": "unknown",
    "gradient_shift": "unknown",
    "gradient_divergence": "unknown",
    "gradient_nonfinite": "bad",
    "dead_gradient": "bad",
    "loss_scale": "bad",
    "initial_loss": "bad",
}
RING_MONITORS = ("ring", "ring transport")  # of RingMonitor's events


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one `subject`; `since` is the first bad step, `over`: it has ended."""

    subject: str
    state: State
    text: str
    since: int | None = None
    over: bool = False


_ALONE, _LOOKS = 3.0, 5  # limits over, measured steps: from here on a single reading is a finding


def findings(records: Records) -> list[Finding]:
    """What was found on every subject, watched or not; the loss first."""
    return [
        *_loss(records),
        *_gradients(records),
        *_deviations(records),
        *_attention(records.of("attention")),
        *_ring(records),
        *_weights(records.of("weights")),
        *_others(records),
    ]


def headline(found: list[Finding]) -> tuple[State, str]:
    """The state of the whole run and one sentence.

    >>> headline([Finding("the loss", "good", ""), Finding("attention", "unknown", "")])
    ('good', 'Nothing wrong was seen in the loss.')
    """
    bad = [finding for finding in found if finding.state == "bad"]
    if bad:
        now = [finding for finding in bad if not finding.over]
        where = _listed(finding.subject for finding in now or bad)
        first = min(finding.since for finding in now or bad if finding.since is not None)
        if now:
            return "bad", f"Something is off in {where}, since step {first}."
        return "bad", f"Something was off in {where}, first at step {first}; it is over."
    good = _listed((f.subject for f in found if f.state == "good"), "or")
    return ("good", f"Nothing wrong was seen in {good}.") if good else ("unknown", "Nothing was judged.")


def _loss(records: Records) -> Iterator[Finding]:
    rows = [row for row in records.of("loss") if "loss/value" in row.values]
    if not rows:
        yield Finding("the loss", "unknown", "The loss was not watched in this run.")
        return
    last = records.rows[-1].step
    flagged = [event for event in events(records) if is_about(event, "loss")]
    for kind, noun in LOSS_NOUNS.items():
        if same := [event for event in flagged if event["kind"] == kind]:
            yield Finding("the loss", "bad", _event_sentence(noun, same, last), same[0]["start"], _over(same))
    lost = [row.step for row in rows if not math.isfinite(row.values["loss/value"])]
    if lost and not any(event["kind"] == "nonfinite" for event in flagged):
        where = f"{counted(len(lost), 'step')}, first at step {lost[0]}"
        text = f"The loss is not a finite number on {where}."
        yield Finding("the loss", "bad", text, lost[0], lost[-1] < rows[-1].step)
    if not flagged and not lost:
        text = f"Loss: nothing wrong: no event in {counted(len(rows), 'step')}."
        yield Finding("the loss", "good", text)


def _gradients(records: Records) -> Iterator[Finding]:
    """The gradient norm, the loss scale and the first loss: one sentence per kind of event."""
    flagged = [event for event in events(records) if event.get("kind") in GRADIENT_KINDS]
    for kind, state in GRADIENT_KINDS.items():
        if same := [event for event in flagged if event["kind"] == kind]:
            told = str(same[0].get("message", kind)).partition(". Resume: ")[0]
            more = f"; and {len(same) - 1} more, the last at step {same[-1]['start']}"
            text = f"{told[0].upper()}{told[1:]}{more if len(same) > 1 else ''}."
            yield Finding("the gradients", state, text, same[0]["start"], _over(same))


def _over(flagged: list[dict[str, Any]]) -> bool:
    return all(event.get("end") is not None for event in flagged)


def _event_sentence(noun: str, flagged: list[dict[str, Any]], last: int) -> str:
    """Up to three events in full, the others counted."""
    told = "; ".join(_tell(event, last) for event in flagged[:3])
    more = f"; and {len(flagged) - 3} more, the last at step {flagged[-1]['start']}"
    return f"{counted(len(flagged), noun)}, {told}{more if len(flagged) > 3 else ''}."


def _tell(event: dict[str, Any], last: int) -> str:
    peak, baseline = number(event.get("peak")), number(event.get("baseline"))
    sizes = f" ({show(peak)} against a baseline of {show(baseline)})"
    end = event.get("end")
    until = f"still open at step {last}" if end is None else f"over at step {end}"
    return f"at step {event['start']}{sizes if math.isfinite(baseline) else ''}, {until}"


def _deviations(records: Records) -> Iterator[Finding]:
    """What several looks at a head have shown, in the monitor's words."""
    for event in events(records):
        if is_about(event, "attention"):
            peak = f", farthest at step {event['peak_step']}" if event.get("peak_step") else ""
            text = f"From step {event['start']}, {event.get('message', 'attention deviates')}{peak}."
            yield Finding("attention", "bad", text, event["start"], event.get("end") is not None)


def _attention(rows: list[Record]) -> Iterator[Finding]:
    found = layers(rows)
    skipped = {name: why for row in rows for name, why in row.detail.get("skipped", {}).items()}
    if not rows:
        yield Finding("attention", "unknown", "Attention was not watched in this run, or no step was due.")
    elif not found and not skipped:
        text = f"AttentionMonitor saw no attention call on {counted(len(rows), 'measured step')}."
        yield Finding("attention", "unknown", text)
    if found:
        yield from _judged(found)
    for why in dict.fromkeys(skipped.values()):
        names = [name for name, reason in skipped.items() if reason == why]
        text = f"Attention was not measured in {counted(len(names), 'layer')} ({names[0]}): {why}."
        yield Finding("attention", "unknown", text)


def _judged(found: Layers) -> Iterator[Finding]:
    wrong = False
    ratios = [reading for key in RATIOS for reading in readings(found, key)]
    for key in (*COUNTS, *RATIOS):
        over = [reading for reading in readings(found, key) if reading.share >= 1]
        if over:
            wrong = True
            yield _off(over, found)
    blind = [r for r in ratios if math.isnan(r.value)]
    if blind:
        text = (
            f"Attention could not be judged {counted(len(blind), 'time')}: {name_of(blind[0].key)} "
            f"is not a number, first in {blind[0].layer} at step {blind[0].step}."
        )
        yield Finding("attention", "unknown", text)
    worst = worst_reading(found)
    if worst and not wrong:
        text = f"Attention: nothing wrong: worst {worst} at step {worst.step}."
        yield Finding("attention", "good", text)
    elif not worst and not wrong and not blind:
        yield Finding("attention", "unknown", "Attention was seen, but nothing of it was judged.")


def _off(over: list[Reading], found: Layers) -> Finding:
    over = sorted(over, key=lambda reading: reading.step)
    worst, first, last = max(over, key=lambda reading: reading.share), over[0].step, over[-1].step
    measured = max(step for points in found.values() for step, _ in points)
    affected = {reading.layer for reading in over}
    where = f"in {len(affected)} of {counted(len(found), 'layer')}"
    if worst.key in COUNTS:
        part = "gradients" if "grad_" in worst.key else "output"
        what = f"{worst.value:.0f} NaN or inf in the {part} of {worst.place}"
    else:
        what = str(worst)
    if last == first:
        when = f"at step {first}"
    else:
        when = f"since step {first}, worst at step {worst.step}, last seen at step {last}"
    text = f"Attention is off: {what}, {when}, {where}."
    steps = {step for points in found.values() for step, _ in points}
    if worst.key in RATIOS and worst.share < _ALONE and first == last and len(steps) >= _LOOKS:
        # As AttentionMonitor's events: one look a little over its limit, among many, is no finding yet.
        text = f"Attention read {what} once, {when}; no look before or after was over."
        return Finding("attention", "unknown", text, first, last < measured)
    return Finding("attention", "bad", text, first, last < measured)


def _ring(records: Records) -> Iterator[Finding]:
    """Attention across ranks: events, else the number nearest to its limit; silent where none was watched."""
    flagged = [event for event in events(records) if event.get("monitor") in RING_MONITORS]
    for event in flagged:
        text = f"From step {event['start']}, {event.get('message')}."
        yield Finding("attention across ranks", "bad", text, event["start"], event.get("end") is not None)
    rows = records.of("ring")
    found = layers(rows)
    worst = worst_reading(found, RING)
    if worst is None:
        if rows:
            text = f"RingMonitor saw no ring attention call on {counted(len(rows), 'measured step')}."
            yield Finding("attention across ranks", "unknown", text)
    elif worst.share < 1 and not flagged:
        text = f"Attention across ranks: nothing wrong: worst {worst} at step {worst.step}.{_balance(rows)}"
        yield Finding("attention across ranks", "good", text)
    elif not flagged:
        text = f"Attention across ranks read {worst} at step {worst.step}, not often enough for an event."
        yield Finding("attention across ranks", "unknown", text, worst.step)


def _balance(rows: list[Record]) -> str:
    """The last look's balance as a sentence of its own, with a blank before it; nothing for one rank."""
    last = rows[-1].values
    if "ring/imbalance" not in last or all(len(ring["ranks"]) == 1 for ring in rows[-1].detail["balance"]):
        return ""
    over, waited = last["ring/imbalance"], last["ring/wait_percent"]
    return f" The busiest rank computes {show(over)} times the mean; one waits {show(waited)} % of its time."


def _weights(rows: list[Record]) -> Iterator[Finding]:
    """A distance is context, above the floor or not; only what is not finite is wrong."""
    if not rows:
        text = "Weights were not compared with a twin's in this run, or no comparison was due."
        yield Finding("the weights", "unknown", text)
        return
    found = comparisons(rows)
    lost = [(row.step, run_nonfinite(row)) for row in rows if run_nonfinite(row)]
    if lost:
        yield _not_finite("the weights", "of the run are not finite", lost, rows[-1].step)
    for arm, looks in found.items():
        # Where the run itself is not finite, its twins say no more.
        lost = [(x.row.step, x.nonfinite) for x in looks if x.nonfinite and not run_nonfinite(x.row)]
        if lost:
            what = f"of the {arm} twin are not finite, while the run's are"
            yield _not_finite(f"the weights of the {arm} twin", what, lost, rows[-1].step)
    finite = {arm: [look for look in looks if look.finite] for arm, looks in found.items()}
    if not any(found.values()):
        text = f"Weights: nothing was compared in {counted(len(rows), 'record')}."
        yield Finding("the weights", "unknown", text)
    elif any(finite.values()):
        judged = any(look.judged for looks in finite.values() for look in looks)
        yield Finding("the weights", "good" if judged else "unknown", sentence(finite))


def _not_finite(subject: str, what: str, lost: list[tuple[int, int]], measured: int) -> Finding:
    (first, _), (last, count) = lost[0], lost[-1]
    when = f"at step {first}" if first == last else f"since step {first}, last seen at step {last}"
    return Finding(subject, "bad", f"{count:,} weights {what}, {when}.", first, last < measured)


def _others(records: Records) -> Iterator[Finding]:
    """Events of monitors without sentences of their own, in the monitor's words."""
    for event in events(records):
        kind, start = event.get("kind", "event"), event["start"]
        if event.get("monitor") in RING_MONITORS:
            continue
        if kind not in GRADIENT_KINDS and not is_about(event, "loss") and not is_about(event, "attention"):
            message = event.get("message")
            text = f"{kind} at step {start}" + (f": {message}" if message else "") + "."
            subject = str(event.get("monitor", "another monitor"))
            yield Finding(subject, "bad", text, start, event.get("end") is not None)


def _listed(subjects: Iterable[str], word: str = "and") -> str:
    *first, last = dict.fromkeys(subjects) or [""]
    return f"{', in '.join(first)} {word} in {last}" if first else last
