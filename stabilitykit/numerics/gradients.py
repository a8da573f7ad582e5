"""Trouble in the course of a gradient norm and of a loss scale."""

import math
from collections import deque
from dataclasses import replace
from typing import Any

from stabilitykit.numerics.event import Event
from stabilitykit.numerics.spikes import SpikeDetector

DEAD_ROWS = 10  # norms of exactly 0 in a row that are a dead gradient
HALVINGS, WITHIN = 4, 20  # so many falls of the loss scale in so many steps are a stall
FLOOR = 1.0  # a loss scale that has fallen to here no longer scales


class GradientWatch:
    """Events of a gradient norm: it leaves its course, is not finite, or is exactly 0 for ten rows.

    The norm is judged on a logarithmic scale, where its noise is even; a slow rise is not judged.
    Norms of 0 before any other are taken as not available. Kinds: "gradient_spike" and the other kinds
    of `SpikeDetector` likewise, "dead_gradient".

    >>> watch = GradientWatch()
    >>> raised = [watch.update(step, norm) for step, norm in enumerate([1.0] * 5 + [0.0] * 10)]
    >>> raised[-1].kind, raised[-1].onset, any(raised[:-1])
    ('dead_gradient', 5, False)
    """

    def __init__(self) -> None:
        # Norms have long tails: less than a factor of two above the level is never raised.
        self._detector = SpikeDetector(drift=math.inf, floor=0.11)
        self._zeros = 0
        self._first_zero = 0.0
        self._level: float | None = None  # the last norm that was not 0
        self._dead: Event | None = None
        self._deaths = 0

    @property
    def available(self) -> bool:
        """False once the first ten norms were all exactly 0."""
        return self._level is not None or self._zeros < DEAD_ROWS

    @property
    def pending(self) -> list[Event]:
        """Open events, in their present state."""
        dead = [replace(self._dead)] if self._dead else []
        return [_in_norms(event) for event in self._detector.pending] + dead

    def update(self, step: float, norm: float) -> Event | None:
        """The Event that opens at this row, or that closes, else None."""
        if norm == 0:
            return self._take_zero(step)
        self._zeros, self._level = 0, norm
        if self._dead:
            closed, self._dead = replace(self._dead, end=step), None
            return closed
        event = self._detector.update(step, math.log(norm) if math.isfinite(norm) else norm)
        return event and _in_norms(event)

    def _take_zero(self, step: float) -> Event | None:
        if self._zeros == 0:
            self._first_zero = step
        self._zeros += 1
        if self._level is None or self._zeros != DEAD_ROWS:
            return None
        self._deaths += 1
        # Ids are shared with the detector, which counts up from 1.
        self._dead = Event(
            -self._deaths, "dead_gradient", step, self._first_zero, None, 0.0, step, self._level, math.nan
        )
        return replace(self._dead)

    _PLAIN = ("_zeros", "_first_zero", "_level", "_deaths")

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        plain = {name.strip("_"): getattr(self, name) for name in self._PLAIN}
        dead = self._dead.to_dict() if self._dead else None
        return {**plain, "dead": dead, "detector": self._detector.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for name in self._PLAIN:
            setattr(self, name, state[name.strip("_")])
        self._dead = Event.from_dict(state["dead"]) if state["dead"] else None
        self._detector.load_state_dict(state["detector"])


def _in_norms(event: Event) -> Event:
    peak = math.exp(event.peak) if math.isfinite(event.peak) else event.peak
    return replace(event, kind=f"gradient_{event.kind}", peak=peak, baseline=math.exp(event.baseline))


class ScaleWatch:
    """Events of a loss scale: it falls again and again, or lies at its floor of 1.

    The falls before the first step that kept its scale are the scaler finding its place. `peak` of an
    event is the lowest scale, `baseline` the highest before it.

    >>> watch = ScaleWatch()
    >>> scales = [65536.0] * 3 + [65536.0 / 2**fall for fall in range(1, 7)]
    >>> raised = [watch.update(step, scale) for step, scale in enumerate(scales)]
    >>> [(event.kind, event.start, event.onset) for event in raised if event]
    [('loss_scale', 6, 3)]
    """

    def __init__(self) -> None:
        self._last: float | None = None
        self._highest = 0.0
        self._settled = False
        self._falls: deque[float] = deque(maxlen=HALVINGS)
        self._open: Event | None = None
        self._count = 0

    @property
    def pending(self) -> list[Event]:
        """The open event, in its present state."""
        return [replace(self._open)] if self._open else []

    def update(self, step: float, scale: float) -> Event | None:
        """The Event that opens with the scale after this step, or that closes, else None."""
        if self._last is not None:
            fell = scale < self._last
            self._settled = self._settled or not fell
            if fell and self._settled:
                self._falls.append(step)
        self._last, self._highest = scale, max(self._highest, scale)
        pinned = scale <= FLOOR < self._highest
        if self._open:
            return self._follow(self._open, step, scale, pinned)
        often = len(self._falls) == HALVINGS and step - self._falls[0] < WITHIN
        if not (pinned or often):
            return None
        self._count += 1
        onset = self._falls[0] if often else step
        self._open = Event(self._count, "loss_scale", step, onset, None, scale, step, self._highest, math.nan)
        return replace(self._open)

    def _follow(self, event: Event, step: float, scale: float, pinned: bool) -> Event | None:
        if scale < event.peak:
            event.peak, event.peak_step = scale, step
        if pinned or step - event.peak_step < WITHIN:
            return None
        self._open = None
        self._falls.clear()
        self._highest = scale
        return replace(event, end=step)

    _PLAIN = ("_last", "_highest", "_settled", "_count")

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        plain = {name.strip("_"): getattr(self, name) for name in self._PLAIN}
        return {**plain, "falls": list(self._falls), "open": self._open.to_dict() if self._open else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for name in self._PLAIN:
            setattr(self, name, state[name.strip("_")])
        self._falls.clear()
        self._falls.extend(state["falls"])
        self._open = Event.from_dict(state["open"]) if state["open"] else None
