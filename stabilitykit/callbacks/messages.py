"""Events of LossMonitor in words, with what else is known around them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stabilitykit.numerics.event import Event

AFTER_RESUME = 100  # steps in which an event may be the resume's
AFTER_MARKER = 200  # steps in which an event may be a declared change's


@dataclass(frozen=True, slots=True)
class Around:
    """What is known beside the numbers of an event."""

    losses: list[float | None] = field(default_factory=list)  # of each rank
    hosts: list[str] = field(default_factory=list)
    markers: Mapping[int, str] = field(default_factory=dict)
    resumed_at: int | None = None
    finite: list[float] | None = None  # step and value of the last finite loss before
    skipped: str | None = None
    listed: int = 0  # batches of it in the skip list
    advice: str = ""


def detail_of(event: Event, around: Around) -> dict[str, Any]:
    """The event's record: its fields, who and what is near, a message, and a command to paste."""
    markers = [
        {"step": step, "reason": reason}
        for step, reason in sorted(around.markers.items())
        if 0 <= event.start - step <= AFTER_MARKER
    ]
    resumed = around.resumed_at is not None and 0 <= event.start - around.resumed_at < AFTER_RESUME
    detail: dict[str, Any] = {**event.to_dict(), "monitor": "LossMonitor", "message": ""}
    detail |= _rank(event, around)
    if markers:
        detail["markers"] = markers
    if resumed and around.resumed_at is not None:
        detail["after_resume"] = int(event.start) - around.resumed_at
    if around.skipped:
        detail["skipped"] = around.skipped
    notes = "".join(f"; {note}" for note in _notes(event, around, detail))
    detail["message"] = f"{message(event)}{notes}. Resume: {around.advice}"
    return {**detail, "resume": around.advice}


def message(event: Event) -> str:
    """The event in words.

    >>> message(Event(1, "spike", 150, 150, 163, 7.0, 150, 2.4, 50.0))
    'loss spike at step 150: 7 against a baseline of 2.4, over at step 163'
    """
    text = _words(event)
    return text if event.end is None or event.end == event.start else f"{text}, over at step {event.end}"


def _words(event: Event) -> str:
    at, sizes = f"at step {event.start}", f"{event.peak:.4g} against a baseline of {event.baseline:.4g}"
    if event.kind == "dead_gradient":
        return f"gradient exactly 0 from step {event.onset} to {at[3:]}, before that {event.baseline:.4g}"
    if event.kind == "loss_scale":
        return f"loss scale falling {at}: from {event.baseline:g} to {event.peak:g} since step {event.onset}"
    if event.kind == "initial_loss":
        return (
            f"initial loss {event.peak:.4g} is above ln(vocabulary) = {event.baseline:.4g}, what an "
            "untrained model should have"
        )
    subject, kind = "loss", event.kind
    if event.kind.startswith("gradient_"):
        subject, kind = "gradient norm", event.kind.removeprefix("gradient_")
    return f"{subject} {kind} {at}" + ("" if kind == "nonfinite" else f": {sizes}")


def _rank(event: Event, around: Around) -> dict[str, Any]:
    """The ranks that are not finite, else the one with the highest loss; nothing for a single rank."""
    if len(around.losses) < 2 or event.end is not None:
        return {}
    bad = [rank for rank, loss in enumerate(around.losses) if loss is not None and not math.isfinite(loss)]
    known = [rank for rank, loss in enumerate(around.losses) if loss is not None]
    if not known:
        return {}
    worst = bad[0] if bad else max(known, key=lambda rank: around.losses[rank] or 0.0)
    found = {"rank": worst, "host": around.hosts[worst]}
    if bad:
        found["nonfinite_ranks"] = [{"rank": rank, "host": around.hosts[rank]} for rank in bad]
    return found


def _notes(event: Event, around: Around, detail: dict[str, Any]) -> Iterator[str]:
    count = len(around.losses)
    for row in detail.get("nonfinite_ranks", []):
        yield f"not finite on rank {row['rank']} of {count} ({row['host']})"
    if event.kind == "nonfinite" and event.end is None and around.finite:
        yield f"the last finite loss was {around.finite[1]:.4g} at step {around.finite[0]:.0f}"
    if "after_resume" in detail:
        yield f"{detail['after_resume']} steps after a resume"
    for row in detail.get("markers", []):
        yield f"{event.start - row['step']:.0f} steps after {row['reason']!r} of step {row['step']}"
    if around.skipped:
        yield "its update was skipped"
    if around.listed:
        yield f"{around.listed} batch{'es' * (around.listed > 1)} put in the skip list"
