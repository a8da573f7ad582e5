"""How far one set of named tensors is from another: W1, largest difference, relative L2, cosine."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from stabilitykit.numerics.wasserstein import between_sorted, ordered


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


class Reference:
    """One set of tensors that many others are compared with as a whole: it is sorted once."""

    def __init__(self, main: Mapping[str, Tensor]):
        self._main = main
        self._sorted = _sorted(_flat(main.values()))

    def distance(self, other: Mapping[str, Tensor]) -> dict[str, float]:
        """The numbers of `distances` over all tensors together, as if they were one vector."""
        rows = torch.stack([_sums(tensor, other[name]) for name, tensor in self._main.items()])
        whole = torch.cat([rows[:, :1].amax(0), rows[:, 1:].sum(0)])
        return {"w1": _w1(self._sorted, _flat(other.values())), **_numbers(whole.tolist())}


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
    # [5]: max |d|, then the sums that add up over tensors: d.d, m.m, o.o, m.o
    m, o = main.detach().double().flatten(), other.detach().double().flatten()
    d = o - m
    return torch.stack([d.abs().amax(), d @ d, m @ m, o @ o, m @ o])


def _numbers(sums: list[float]) -> dict[str, float]:
    largest, dd, mm, oo, mo = sums
    cosine = 1.0 if dd == 0 else ratio(mo, math.sqrt(mm) * math.sqrt(oo))
    return {"max_abs": largest, "rel_l2": ratio(math.sqrt(dd), math.sqrt(mm)), "cosine": cosine}
