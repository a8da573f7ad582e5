"""A streaming detector of trouble in a training loss: spikes, drifts, new levels, NaN."""

import math
from collections import deque
from dataclasses import replace
from typing import Any

from stabilitykit.numerics.baseline import PACE, Baseline
from stabilitykit.numerics.event import Event, spell
from stabilitykit.numerics.trouble import SETTLE_FROM, Trouble

__all__ = ["Event", "SpikeDetector"]

BAND = 3.0  # robust sigmas: a row within is back to normal
SLOW_BAND = 2.0  # the same after a slow rise
HUMP, HUMP_FLOOR = 3.5, 0.05  # deviations, and of the level, by which a start-up has to rise for a hump
DRIFT_FLOOR = 0.02  # of the level: a slow wander below this is data order, not trouble


class SpikeDetector:
    """Raises an `Event` when a training loss leaves its recent course, and again when it comes back.

    One row is judged by its robust score: robust standard deviations above the local median, the
    noise measured on the last `window` rows that were never flagged. Slow trouble is judged by a
    one-sided cumulative sum (Page, Biometrika 1954) of what rows are above the lowest that a slow mean
    has been, less an allowance; a creep by the rise of a mean sixteen times slower. Losses may be
    negative or below 1 and irregularly logged; a step that does not increase starts a new attempt.
    `score` is that of the last row: 0 while nothing is known, nan for a loss that is not finite.

    >>> detector = SpikeDetector()
    >>> raised = [detector.update(step, loss) for step, loss in enumerate([2.0, 2.1] * 50 + [5.0])]
    >>> raised[-1].kind, raised[-1].start, any(raised[:-1])
    ('spike', 100, False)

    Args:
        threshold: robust sigmas above the local level from which one row is raised; twice that in
            start-up and on an attempt's second row.
        slack: robust sigmas above the lowest slow mean that are taken for wander.
        drift: robust sigmas to which what exceeds the slack must add up; inf: slow trouble is not watched.
        window: rows from which the noise is measured.
        recover: rows in a row, back in the band, that close an event.
        startup: rows of a run from step 0 in which an event that passes is a `transient`.
        settle: rows over which a raised loss must stay flat to be a `shift`, a new level.
        floor: the noise is never taken as smaller, in units of the loss.

    Raises:
        ValueError: an option that is not positive.
    """

    def __init__(
        self,
        *,
        threshold: float = 6.5,
        slack: float = 2.75,
        drift: float = 8.0,
        window: int = 128,
        recover: int = 10,
        startup: int = 50,
        settle: int = 400,
        floor: float = 1e-3,
    ):
        for value in (threshold, slack, drift, window, recover, startup, settle, floor):
            if not value > 0:
                raise ValueError(f"expected options of SpikeDetector above 0, got {value}")
        self.threshold, self.slack, self.drift = threshold, slack, drift
        self.recover, self.startup, self.settle = recover, startup, settle
        self.score = 0.0
        self._course = Baseline(window, floor)
        # One event is returned per row and a second one waits; steps that never increase raise more.
        self._due: deque[Event] = deque(maxlen=16)
        self._next_id = 1
        self._trouble: Trouble | None = None
        self._creep: Trouble | None = None  # so slow that sudden trouble is watched for meanwhile
        self._recent: deque[float] = deque(maxlen=SETTLE_FROM)  # rows of the open trouble
        self._broken: Event | None = None  # the open nonfinite event
        self._healthy = 0  # finite rows since the last non-finite one
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self._rows = 0  # of this attempt
        self._first = self._last = 0.0  # steps
        self._from_zero = False  # whether it began near step 0
        self._first_loss: float | None = None
        self._elevated: float | None = None  # first step of the present run of rows above the band
        self._risen: float | None = None  # first step of the present slow rise
        self._excess = 0.0  # the cumulative sum of that rise
        self._crept: float | None = None  # first step of the present creep

    @property
    def pending(self) -> list[Event]:
        """What `update` would still say if the run ended here: open events, in their present state."""
        return [replace(event) for event in [*self._due, *self._unfinished()]]

    def _unfinished(self) -> list[Event]:
        broken = [] if self._broken is None else [self._broken]
        return [*(trouble.event for trouble in (self._creep, self._trouble) if trouble), *broken]

    def update(self, step: float, loss: float) -> Event | None:
        """The Event that opens at this row, or that closes (same id, `end` set, kind final), else None."""
        if self._rows and step <= self._last:
            self._close_attempt()
        self._rows += 1
        if self._rows == 1:
            self._first = step
        elif self._rows == 2:
            self._locate(step)
        self._last = step
        if math.isfinite(loss):
            self._take(step, loss)
        else:
            self._take_nonfinite(step, loss)
        return self._due.popleft() if self._due else None

    def _locate(self, second: float) -> None:
        # Counted in log intervals: the step column may be tokens, or every 200th step.
        self._from_zero = self._first <= self.startup * (second - self._first)
        if self._from_zero:
            first = [] if self._first_loss is None else [self._first_loss]
            self._course.restart(first, forget_noise=True)

    def _take(self, step: float, loss: float) -> None:
        if self._first_loss is None:
            self._first_loss = loss
        if self._broken is not None:
            self._healthy += 1
            if self._healthy >= self.recover:
                self._close(self._broken, step)
                self._broken = None
        if self._creep is not None:
            self._follow_creep(self._creep, step, loss)
        if self._trouble is not None:
            self._follow(self._trouble, step, loss)
        else:
            self._watch(step, loss)

    def _watch(self, step: float, loss: float) -> None:
        course = self._course
        expected, sigma = course.expect(loss)
        self.score = (loss - expected) / sigma
        self._elevated = _since(self._elevated, step, self.score > BAND)
        early = self._from_zero and self._rows <= self.startup
        # Humps are common in start-up, and one row says little about the noise of the next.
        cautious = early or self._rows <= 2
        passing = "transient" if early else "spike"
        if self.score > self.threshold * (2 if cautious else 1):
            event = self._open(passing, step, self._elevated, loss, expected, self.score)
            self._trouble = self._trouble_of(event, passing, sigma)
            return
        if course.repeats(loss):
            return
        course.learn(loss)
        if early:
            self._watch_hump(step, loss)
        if self._creep is None and self._trouble is None and math.isfinite(self.drift):
            self._watch_slow(step, loss, sigma, early=early)

    def _watch_hump(self, step: float, loss: float) -> None:
        bottom = self._course.bottom
        rise, noise = self._course.hump
        if rise > max(HUMP * noise, HUMP_FLOOR * abs(bottom)):
            event = self._open("transient", step, self._elevated, loss, bottom, (loss - bottom) / noise)
            self._trouble = self._trouble_of(event, "transient", noise, back=self.slack * noise / 2)

    def _watch_slow(self, step: float, loss: float, sigma: float, *, early: bool) -> None:
        course = self._course
        crept, lowest = course.slower.rise, course.slower.lowest
        creeps = crept > max(sigma / 2, DRIFT_FLOOR * abs(lowest))
        self._crept = _since(self._crept, step, crept > sigma / 4)
        rises = self._rises(step, loss, sigma, caution=2 if early else 1)
        passing = "transient" if early else "spike"
        if creeps or (rises and crept > course.slow.rise / 2):
            event = self._open("divergence", step, self._crept, loss, lowest, crept / sigma)
            self._creep = self._trouble_of(event, passing, sigma, back=crept / 2, pace=PACE)
        elif rises:
            baseline = course.slow.lowest
            event = self._open("divergence", step, self._risen, loss, baseline, (loss - baseline) / sigma)
            self._trouble = self._trouble_of(event, passing, sigma, back=self.slack * sigma / 2)

    def _rises(self, step: float, loss: float, sigma: float, caution: int) -> bool:
        """Adds the row to the cumulative sum, and says whether that is enough."""
        lowest = self._course.slow.lowest
        above = (loss - lowest) / sigma - max(self.slack, DRIFT_FLOOR * abs(lowest) / sigma)
        # A row that was not raised proves little, on a quiet curve as on a noisy one.
        self._excess = max(0.0, self._excess + min(above, self.threshold - self.slack))
        self._risen = _since(self._risen, step, self._excess > 0)
        enough = self.drift * caution
        return self._excess > enough and self._excess > enough * self._course.persistence

    def _trouble_of(
        self, event: Event, passing: str, sigma: float, back: float | None = None, pace: int = 1
    ) -> Trouble:
        first = self._first_loss if self._from_zero else None
        learnt = first is not None and first - event.baseline > abs(event.baseline) / 10
        untrained = first if learnt else None  # a run begun from a checkpoint has no such loss
        mean = event.peak - event.baseline if pace == 1 else self._course.slower.rise
        band = BAND if back is None else SLOW_BAND
        self._recent.clear()
        return Trouble(event, passing, sigma, band, back, untrained, mean, pace)

    def _follow(self, trouble: Trouble, step: float, loss: float) -> None:
        self.score = trouble.score(loss)
        self._recent.append(loss)
        state = trouble.take(step, loss, self._course.fall, recover=self.recover, settle=self.settle)
        if state == "back":
            self._end_trouble(trouble.event, step)
            for value in list(self._recent)[-self.recover :]:
                self._course.learn(value)
        elif state == "settled":
            self._end_trouble(trouble.event, step)
            self._course.restart(self._recent)

    def _follow_creep(self, creep: Trouble, step: float, loss: float) -> None:
        state = creep.take(step, loss, self._course.fall, recover=self.recover, settle=self.settle)
        if state == "open":
            return
        self._close(creep.event, step)
        self._creep = None
        self._forget_rise()
        if state == "settled":
            self._course.settle()

    def _end_trouble(self, event: Event, step: float) -> None:
        self._close(event, step)
        self._trouble = self._elevated = None
        self._forget_rise()

    def _forget_rise(self) -> None:
        self._risen = self._crept = None
        self._excess = 0.0

    def _take_nonfinite(self, step: float, loss: float) -> None:
        self.score = math.nan
        self._healthy = 0
        if self._broken is None:
            level = self._course.level
            baseline = math.nan if level is None else level
            self._broken = self._open("nonfinite", step, step, loss, baseline, math.inf)

    def _close_attempt(self) -> None:
        for event in self._unfinished():
            self._close(event, self._last)
        self._trouble = self._creep = self._broken = None
        self._course.restart()
        self._begin_attempt()

    def _open(
        self, kind: str, step: float, onset: float | None, loss: float, baseline: float, score: float
    ) -> Event:
        first = step if onset is None else onset
        event = Event(self._next_id, kind, step, first, None, loss, step, baseline, score)
        self._next_id += 1
        self._due.append(replace(event))
        return event

    def _close(self, event: Event, step: float) -> None:
        event.end = step
        self._due.append(replace(event))

    _PLAIN = ("_next_id", "_healthy", "_rows", "_first", "_last", "_from_zero", "_first_loss", "_excess")

    def state_dict(self) -> dict[str, Any]:
        """Everything that was learnt, JSON-able; the options are the constructor's and stay out."""
        open_ones = {"trouble": self._trouble, "creep": self._creep, "broken": self._broken}
        return {
            **{name.strip("_"): getattr(self, name) for name in self._PLAIN},
            "score": spell(self.score),
            "elevated": self._elevated,
            "risen": self._risen,
            "crept": self._crept,
            "recent": list(self._recent),
            "course": self._course.state_dict(),
            "due": [event.to_dict() for event in self._due],
            **{name: found and found.to_dict() for name, found in open_ones.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`: what follows equals an uninterrupted run."""
        for name in self._PLAIN:
            setattr(self, name, state[name.strip("_")])
        self.score = float(state["score"])
        self._elevated, self._risen, self._crept = state["elevated"], state["risen"], state["crept"]
        self._recent = deque(state["recent"], maxlen=SETTLE_FROM)
        self._course.load_state_dict(state["course"])
        self._due.clear()
        self._due.extend(Event.from_dict(row) for row in state["due"])
        self._broken = Event.from_dict(state["broken"]) if state["broken"] else None
        self._trouble = Trouble.from_dict(state["trouble"]) if state["trouble"] else None
        self._creep = Trouble.from_dict(state["creep"]) if state["creep"] else None


def _since(first: float | None, step: float, holds: bool) -> float | None:
    """The first step of the present run of steps for which something holds."""
    if not holds:
        return None
    return step if first is None else first
