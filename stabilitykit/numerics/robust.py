"""Order statistics of the last values of a stream, in O(log window) per value."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


class RollingWindow:
    """The last `size` values, in order of arrival and sorted; quantiles are not pulled by outliers.

    >>> window = RollingWindow(3, [9.0, 1.0, 2.0, 3.0])
    >>> window.median(), window.quantile(1.0)
    (2.0, 3.0)
    """

    def __init__(self, size: int, values: Iterable[float] = ()):
        self.size = size
        self.values: deque[float] = deque()
        self._sorted: list[float] = []
        for value in values:
            self.push(value)

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float) -> None:
        """Takes a finite value in and, when full, the oldest out."""
        if len(self.values) == self.size:
            del self._sorted[bisect_left(self._sorted, self.values.popleft())]
        self.values.append(value)
        insort(self._sorted, value)

    def median(self) -> float:
        """The median; the mean of the middle two of an even count. Needs at least one value."""
        return self.quantile(0.5)

    def quantile(self, share: float) -> float:
        """The value below which `share` of the values lie, interpolated as numpy's default does."""
        ordered = self._sorted
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    def tails(self, share: float) -> tuple[float, float, float]:
        """The quantiles `share`, 0.5 and 1 - `share`, in one go: the detector asks for them every row."""
        ordered = self._sorted
        last = len(ordered) - 1
        place = share * last
        at = int(place)
        part = place - at
        low, high = ordered[at], ordered[last - at]
        if part:
            low += part * (ordered[at + 1] - low)
            high += part * (ordered[last - at - 1] - high)
        half = last // 2
        middle = ordered[half]
        return low, middle if last % 2 == 0 else middle + 0.5 * (ordered[half + 1] - middle), high
