"""How far one set of named tensors is from another: W1, largest difference, relative L2, cosine."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from stabilitykit.numerics.bins import CHUNK
from stabilitykit.numerics.parts import wasserstein_streamed
from stabilitykit.numerics.wasserstein import between_sorted, ordered, wasserstein

ALL = "all weights"  # the row of all tensors together

Load = Callable[[], tuple[Tensor, Tensor]]


def distances(main: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Per name `w1`, `max_abs`, `rel_l2` = ||other - main|| / ||main|| and `cosine`, in float64.

    Where a tensor is not finite, `w1` is nan and the others are what arithmetic gives (nan or inf).

    >>> distances({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 4.5])})["w"]["rel_l2"]
    0.1
    """
    rows = {name: _sums(main[name], other[name]) for name in main}
    return {
        name: {"w1": _w1(_sorted(main[name]), other[name]), **_numbers(row.tolist())}
        for name, row in rows.items()
    }


def compared(pairs: Mapping[str, Load]) -> list[dict[str, Any]]:
    """Rows of `tensor`, `numel` and the numbers of `distances`, largest W1 first, ALL of them last.

    Each pair is called for when its turn comes, and again for the W1 of all, so memory holds about twice the
    largest pair. A row has `nonfinite`, the counts of both, where there are any (its W1 is nan and it comes
    first), and `cast_floor` where dtypes differ: the W1 that rounding to the coarser of them makes alone.
    """
    rows = []
    sums = torch.zeros(0, 7, dtype=torch.float64)
    for name, load in pairs.items():
        main, other = load()
        row = _sums(main, other)
        sums = torch.cat([sums, row[None]])
        w1 = math.nan if row[5:].any() else wasserstein(main, other)
        rows.append(_row(name, main.numel(), w1, row) | _cast_floor(main, other))
    rows.sort(key=lambda row: (not math.isnan(row["w1"]), -row["w1"], -row["max_abs"]))
    whole = _together(sums)
    w1 = math.nan
    if not whole[5:].any():
        w1 = wasserstein_streamed(_side(pairs, 0), _side(pairs, 1))
    return [*rows, _row(ALL, sum(row["numel"] for row in rows), w1, whole)]


def _side(pairs: Mapping[str, Load], side: int) -> Callable[[], Iterable[Tensor]]:
    return lambda: (load()[side] for load in pairs.values())


def _row(name: str, numel: int, w1: float, sums: Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"tensor": name, "numel": numel, "w1": w1, **_numbers(sums.tolist())}
    bad = sums[5:].to(torch.int64).tolist()
    return row | {"nonfinite": bad} if any(bad) else row


def _cast_floor(main: Tensor, other: Tensor) -> dict[str, float]:
    if main.dtype == other.dtype:
        return {}
    fine, coarse = sorted((main, other), key=lambda tensor: torch.finfo(tensor.dtype).eps)
    cast = fine.to(coarse.dtype)
    finite = bool(fine.isfinite().all() and cast.isfinite().all())
    return {"cast_floor": wasserstein(fine, cast) if finite else math.nan}


class Reference:
    """One set of tensors that many others are compared with as a whole: it is sorted once."""

    def __init__(self, main: Mapping[str, Tensor]):
        self._main = main
        self._sorted = _sorted(_flat(main.values()))

    def distance(self, other: Mapping[str, Tensor]) -> dict[str, float]:
        """The numbers of `distances` over all tensors together, as if they were one vector."""
        rows = torch.stack([_sums(tensor, other[name]) for name, tensor in self._main.items()])
        return {"w1": _w1(self._sorted, _flat(other.values())), **_numbers(_together(rows).tolist())}


def ratio(part: float, whole: float) -> float:
    """part / whole; nothing of nothing is 0, something of nothing is inf."""
    if part == 0 or math.isnan(part):
        return part
    return part / whole if whole else math.inf


def nonfinite(tensors: Iterable[Tensor]) -> int:
    """How many values are NaN or inf."""
    return int(torch.stack([(~torch.isfinite(tensor)).sum() for tensor in tensors]).sum())


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _sorted(values: Tensor) -> Tensor | None:
    return ordered(values) if bool(torch.isfinite(values).all()) else None


def _w1(main: Tensor | None, other: Tensor) -> float:
    other_sorted = _sorted(other)
    return math.nan if main is None or other_sorted is None else between_sorted(main, other_sorted)


def _sums(main: Tensor, other: Tensor) -> Tensor:
    # [7]: max |d|, then the sums that add up over tensors: d.d, m.m, o.o, m.o, non-finite m, non-finite o
    pairs = zip(main.detach().flatten().split(CHUNK), other.detach().flatten().split(CHUNK), strict=True)
    return _together(torch.stack([_chunk_sums(m.double(), o.double()) for m, o in pairs]))


def _chunk_sums(m: Tensor, o: Tensor) -> Tensor:
    d = o - m
    bad = [(~torch.isfinite(x)).sum().double() for x in (m, o)]
    return torch.stack([d.abs().amax(), d @ d, m @ m, o @ o, m @ o, *bad])


def _together(rows: Tensor) -> Tensor:
    return torch.cat([rows[:, :1].amax(0), rows[:, 1:].sum(0)])


def _numbers(sums: list[float]) -> dict[str, float]:
    largest, dd, mm, oo, mo = sums[:5]
    cosine = 1.0 if dd == 0 else ratio(mo, math.sqrt(mm) * math.sqrt(oo))
    return {"max_abs": largest, "rel_l2": ratio(math.sqrt(dd), math.sqrt(mm)), "cosine": cosine}


def asides(results: list[dict[str, Any]]) -> Iterator[str]:
    """What the numbers of `compared` do not say, in words: values not finite, a floor by the dtype."""
    for row in results:
        if "nonfinite" in row:
            yield f"{row['tensor']}: not finite: {row['nonfinite'][0]} in A, {row['nonfinite'][1]} in B"
        if "cast_floor" in row:
            yield f"{row['tensor']}: rounding to the coarser dtype alone makes w1 {row['cast_floor']:.3g}"
