"""The events of a whole loss log, and the period at which they recur."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

from stabilitykit.numerics.spikes import Event, SpikeDetector

MOST = 1000  # events searched for a period, the last ones: their pairs grow with the square
CHANCE = 0.02  # that events strewn at random show any such period


def find_events(rows: Iterable[tuple[float, float]], detector: SpikeDetector | None = None) -> list[Event]:
    """Every event in rows of (step, loss), in the order they were raised, each in its final state.

    Takes one row at a time and keeps none; `detector` may bring options of its own.

    >>> rows = [(step, 9.0 if step in (150, 350, 550) else 2 + step % 3 / 10) for step in range(600)]
    >>> [(event.kind, event.start, event.end, event.recurs_every) for event in find_events(rows)][:2]
    [('spike', 150, 160, 200), ('spike', 350, 360, 200)]
    """
    detector, events = detector or SpikeDetector(), dict[int, Event]()
    lowest, highest, count = math.inf, -math.inf, 0
    for step, loss in rows:
        event = detector.update(step, loss)
        if event is not None:
            events[event.id] = event
        lowest, highest, count = min(lowest, step), max(highest, step), count + 1
    events |= {event.id: event for event in detector.pending}
    if count > 1:
        _mark_recurring(list(events.values()), interval=(highest - lowest) / (count - 1))
    return [events[key] for key in sorted(events)]


def _mark_recurring(events: list[Event], interval: float) -> None:
    passing = [event for event in events if event.kind in ("spike", "transient")]
    steps = sorted({event.peak_step for event in passing})
    every = period(steps, interval)
    for event in passing:
        if every and {event.peak_step - every, event.peak_step + every} & set(steps):
            event.recurs_every = every


def period(steps: Sequence[float], interval: float) -> float | None:
    """The period at which increasing `steps` recur, in steps, or None when their gaps may be chance.

    It is the gap that the most pairs of them share. Were they strewn at random over rows that are
    `interval` steps apart, the pairs with a given gap would follow a Poisson distribution.

    >>> period([200, 700, 1200], interval=1)
    500
    >>> period([200, 700, 1250], interval=1) is None
    True
    """
    steps = steps[-MOST:]
    if len(steps) < 3:
        return None
    gaps = Counter(later - earlier for earlier, later in combinations(steps, 2))
    best, count = min(gaps.items(), key=lambda item: (-item[1], item[0]))
    possible = max((steps[-1] - steps[0]) / interval, 1.0)
    return best if possible * _tail(count, gaps.total() / possible) < CHANCE else None


def _tail(count: int, mean: float) -> float:
    """An upper bound of the chance that a Poisson variable of this mean is `count` or more."""
    if count <= mean:
        return 1.0
    first = math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
    return first / (1 - mean / (count + 1))
