"""OLMo 2's spike score of a series: the share of its values that lie far off their rolling mean."""

import math
from collections import deque
from typing import Any

SIGMAS = 7.0
LEAST = 100  # values before which a deviation is not judged


class SpikeScore:
    """Percent of the last 1000 values at least 7 standard deviations off the mean of the 1000 before them.

    A value that is not finite counts, and stays out of the mean. Source: OLMo 2, arXiv 2501.00656.

    >>> score = SpikeScore()
    >>> [score.update(2.0 + row % 2) for row in range(199)][-1], score.update(50.0)
    (0.0, 0.5)
    """

    def __init__(self, window: int = 1000):
        self._values: deque[float] = deque(maxlen=window)
        self._far: deque[bool] = deque(maxlen=window)
        self._count = 0  # of those that are far
        # Sums of values less the first one: plain squares would lose the deviation of a flat series.
        self._origin = self._sum = self._squares = 0.0

    def update(self, value: float) -> float:
        """The score, in percent, with `value` as the last."""
        far = not math.isfinite(value) or self._is_far(value)
        if len(self._far) == self._far.maxlen:
            self._count -= self._far[0]
        self._far.append(far)
        self._count += far
        if math.isfinite(value):
            self._learn(value)
        return 100 * self._count / len(self._far)

    def _is_far(self, value: float) -> bool:
        count = len(self._values)
        if count < LEAST:
            return False
        mean = self._sum / count
        variance = max(self._squares / count - mean**2, 0.0)
        off = abs(value - self._origin - mean)
        return off > 0 and off >= SIGMAS * math.sqrt(variance)

    def _learn(self, value: float) -> None:
        if not self._values:
            self._origin = value
        if len(self._values) == self._values.maxlen:
            oldest = self._values[0] - self._origin
            self._sum -= oldest
            self._squares -= oldest**2
        self._values.append(value)
        self._sum += value - self._origin
        self._squares += (value - self._origin) ** 2

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; floats survive exactly."""
        return {
            "values": list(self._values),
            "far": list(self._far),
            "sums": [self._origin, self._sum, self._squares],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._values.clear()
        self._values.extend(state["values"])
        self._far.clear()
        self._far.extend(state["far"])
        self._count = sum(self._far)
        self._origin, self._sum, self._squares = state["sums"]
