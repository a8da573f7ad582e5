"""Which tiles of one round's scores are computed: a band per pair of runs, cut into squares."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from stabilitykit.parallel.layout import Run

Window = tuple[int, int]
Tiles = Counter[str]  # keys: KINDS
# Fully visible and partly visible ones are computed; the others are not, for where their tokens
# stand (causal, window) or for what these are (document, padding).
KINDS = ("full", "partial", "skipped_by_position", "skipped_by_mask")


class Band(NamedTuple):
    """Row a sees key b iff a + low <= b <= a + high."""

    low: int
    high: int

    def sees(self, rows: slice, keys: slice) -> str:
        """How much of a tile is visible: "all", "some" or "none"."""
        least, most = keys.start - rows.stop + 1, keys.stop - 1 - rows.start
        if max(self.low, least) > min(self.high, most):
            return "none"
        return "all" if self.low <= least and self.high >= most else "some"


class Part(NamedTuple):
    """What one kernel call computes: rows and keys of the blocks, causal from their top left, a mask."""

    rows: slice
    keys: slice
    causal: bool = False
    mask: Tensor | None = None  # bool, True = keep, [b, 1, rows, keys] or [rows, keys]


def band(q: Run, k: Run, *, causal: bool, window: Window | None) -> Band:
    """Which keys of run `k` the rows of run `q` see; both have one step.

    With equal steps s, q + a s >= k + b s is b <= a + floor((q - k) / s): a diagonal that is
    included on the same or an earlier rank and excluded on a later one (arXiv 2311.09431, Alg. 2).

    >>> band(Run(0, 4, 3), Run(1, 4, 3), causal=True, window=None)
    Band(low=-3, high=-1)
    """
    left, right = window or (-1, -1)
    ahead = q.start - k.start
    low, high = -q.length, k.length
    if left >= 0:
        low = max(low, -((left - ahead) // q.step))
    for reach in [right] * (right >= 0) + [0] * causal:
        high = min(high, (ahead + reach) // q.step)
    return Band(low, high)


def parts(
    q_runs: list[Run],
    k_runs: list[Run],
    *,
    causal: bool,
    window: Window | None,
    tile: int,
    counted: Tiles,
    kept: Callable[[slice, slice], Tensor] | None = None,
    granule: int | None = None,
) -> Iterator[Part]:
    """The kernel calls of one round; adds to `counted` how many tiles of which kind there were.

    `kept(rows, keys)` is the bool mask [b, 1, rows, keys] of documents and padding. `granule` is the
    kernel's: if it divides the tile, one causal call leaves out the hidden tiles of a triangle itself.
    """
    for q, rows_from in zip(q_runs, _starts(q_runs), strict=True):
        for k, keys_from in zip(k_runs, _starts(k_runs), strict=True):
            seen = band(q, k, causal=causal, window=window)
            pair = list(_pair(seen, q.length, k.length, tile, counted))
            square = slice(0, q.length), slice(0, k.length)
            skips = granule is not None and tile % granule == 0 and kept is None
            if pair and skips and q.length == k.length and _causal(seen, *square):
                # The whole triangle in one call, which merges each row once.
                pair = [_edge(seen, *square)]
            for part in pair:
                moved = Part(_moved(part.rows, rows_from), _moved(part.keys, keys_from), *part[2:])
                if kept is None:
                    yield moved
                else:
                    yield from _masked(moved, kept, tile, counted)


def _pair(seen: Band, n_rows: int, n_keys: int, tile: int, counted: Tiles) -> Iterator[Part]:
    if seen.sees(slice(0, n_rows), slice(0, n_keys)) == "none":
        counted["skipped_by_position"] += -(-n_rows // tile) * -(-n_keys // tile)
        return
    for top in range(0, n_rows, tile):
        rows = slice(top, min(top + tile, n_rows))
        full = slice(0, 0)
        for left in range(0, n_keys, tile):
            keys = slice(left, min(left + tile, n_keys))
            much = seen.sees(rows, keys)
            counted[{"all": "full", "some": "partial", "none": "skipped_by_position"}[much]] += 1
            if much == "all":  # such tiles are neighbours: one call for all of a row
                full = slice(full.start if full.stop else left, keys.stop)
            elif much == "some":
                yield _edge(seen, rows, keys)
        if full.stop:
            yield Part(rows, full)


def _edge(seen: Band, rows: slice, keys: slice) -> Part:
    """A tile that the band's edge crosses; where it can be, a causal call instead of a mask."""
    if _causal(seen, rows, keys):
        shift = seen.high + rows.start - keys.start
        # Kernels give a row without keys lse 0: the first row of an excluded diagonal is left out.
        rows = slice(rows.start - shift, rows.stop)
        return Part(rows, slice(keys.start, min(keys.stop, keys.start + rows.stop - rows.start)), True)
    a, b = torch.arange(rows.start, rows.stop)[:, None], torch.arange(keys.start, keys.stop)
    return Part(rows, keys, mask=(b >= a + seen.low) & (b <= a + seen.high))


def _causal(seen: Band, rows: slice, keys: slice) -> bool:
    """Whether the rows see the keys up to the diagonal from their top left, or to the one below it."""
    return seen.low <= keys.start - rows.stop + 1 and seen.high + rows.start - keys.start in (0, -1)


def _masked(part: Part, kept: Callable[[slice, slice], Tensor], tile: int, counted: Tiles) -> Iterator[Part]:
    """What `kept` leaves of `part`, tile by tile; counts again the tiles that it hides or thins."""
    edge = part.causal or part.mask is not None
    for top in range(part.rows.start, part.rows.stop, tile):
        for left in range(part.keys.start, part.keys.stop, tile):
            rows = slice(top, min(top + tile, part.rows.stop))
            keys = slice(left, min(left + tile, part.keys.stop))
            inside = kept(rows, keys)
            if part.causal:
                inside = inside & torch.ones_like(inside[0, 0]).tril()
            if part.mask is not None:
                inside = inside & part.mask.to(inside.device)
            if not edge and inside.all():
                yield Part(rows, keys)
                continue
            hidden = not inside.any()
            counted["partial" if edge else "full"] -= 1
            counted["skipped_by_mask" if hidden else "partial"] += 1
            if not hidden:
                yield Part(rows, keys, mask=inside)


def _starts(runs: list[Run]) -> list[int]:
    return list(accumulate((run.length for run in runs), initial=0))[:-1]


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
