"""Long curves made short without losing an extreme, a flagged step or a gap."""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise


def thin(values: Sequence[float], limit: int = 2000, *, keep: Collection[int] = ()) -> list[int]:
    """Sorted positions to draw: about `limit` of them, or all when there are no more than that.

    Of each of `limit / 2` equal stretches the lowest and the highest finite value stay (min-max
    decimation), as do both ends and every position in `keep`.

    >>> thin([0, 0, 0, 9, 0, 0, -5, 0], 2)
    [0, 3, 6, 7]
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    kept = {0, count - 1, *keep}
    stretches = max(1, limit // 2)
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        finite = [at for at in stretch if math.isfinite(values[at])]
        if finite:
            kept.add(min(finite, key=values.__getitem__))
            kept.add(max(finite, key=values.__getitem__))
    return sorted(kept)


def with_gaps(
    steps: Sequence[float], values: Sequence[float], limit: int = 2000, *, keep: Collection[int] = ()
) -> tuple[list[float], list[float | None]]:
    """The thinned curve (x, y); y is None where a value, drawn or thinned away, is not finite.

    >>> with_gaps([0, 1, 2], [1.0, float("nan"), 2.0])
    ([0, 1, 2], [1.0, None, 2.0])
    """
    bad = [at for at, value in enumerate(values) if not math.isfinite(value)]
    thinned = thin(values, limit, keep=keep)
    drawn = sorted({*thinned, *_one_per_gap(thinned, bad)})
    shown = [values[at] for at in drawn]
    return [steps[at] for at in drawn], [v if math.isfinite(v) else None for v in shown]


def _one_per_gap(drawn: list[int], bad: list[int]) -> list[int]:
    """Between every two drawn positions the first bad one: enough to break the line there."""
    found, ahead = [], iter(bad)
    at = next(ahead, None)
    for left, right in pairwise(drawn):
        while at is not None and at <= left:
            at = next(ahead, None)
        if at is not None and at < right:
            found.append(at)
    return found


class Sketch:
    """A curve of any length in bounded memory: the lowest, the highest, a bad point of each stretch.

    >>> sketch = Sketch(stretches=2)
    >>> len(list(sketch.through(enumerate([5.0, 1.0, 9.0, 2.0, 3.0, 4.0, 3.5, 3.0]))))
    8
    >>> sketch.points()
    [(1, 1.0), (2, 9.0), (4, 3.0), (5, 4.0)]
    """

    def __init__(self, stretches: int = 5000):
        self.rows = 0
        self._most = stretches
        self._size = 1  # rows of a stretch
        self._stretches: list[_Extremes] = []

    def through(self, rows: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
        """The rows as they are, each taken in as it passes."""
        for step, value in rows:
            if self.rows == self._most * self._size:
                pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
                self._stretches = [_merged([*a, *b]) for a, b in pairs]
                self._size *= 2
            point = (self.rows, step, value)
            if self.rows % self._size == 0:
                self._stretches.append([point])
            else:
                self._stretches[-1] = _merged([*self._stretches[-1], point])
            self.rows += 1
            yield step, value

    def points(self) -> list[tuple[float, float]]:
        """The points that stayed, in the order of their rows."""
        return [(step, value) for stretch in self._stretches for _, step, value in stretch]


_Extremes = list[tuple[int, float, float]]  # row, step, value


def _merged(points: _Extremes) -> _Extremes:
    finite = [point for point in points if math.isfinite(point[2])]
    kept = {id(point): point for point in points if not math.isfinite(point[2])}
    kept = dict(list(kept.items())[:1])
    if finite:
        for pick in (min, max):
            point = pick(finite, key=lambda point: point[2])
            kept[id(point)] = point
    return sorted(kept.values())
