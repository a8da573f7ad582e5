"""Exact Wasserstein distances of values that lie in parts: over ranks, or in more than memory holds."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch import distributed as dist

from stabilitykit.numerics.bins import BINS, between, counted, nonfinite
from stabilitykit.numerics.wasserstein import (
    between_counted,
    flattened,
    moved,
    require_finite,
    require_order,
    sort,
)

IN_MEMORY = 1 << 26  # values sorted at a time by `wasserstein_streamed`

Parts = Callable[[], Iterable[Tensor]]


def wasserstein_sharded(a: Tensor, b: Tensor, group: dist.ProcessGroup | None = None, p: float = 1) -> float:
    """`wasserstein` of values whose parts the ranks of `group` hold, the same number on every rank.

    `a` and `b` are this rank's parts, of any size, also empty (of a DTensor: `to_local()`, each value on one
    rank). Every rank gets the bins that hold its share of the sorted values, so memory is twice the largest
    share, which grows where many values fall into one of the 65,536 bins. 16-bit pairs stay where they are.

    Raises:
        ValueError: as `wasserstein`, on every rank, with the numbers over all of them.
    """
    require_order(p)
    x, y = flattened(a, "a"), flattened(b, "b")
    if x.element_size() != y.element_size():
        x, y = _widened(x), _widened(y)
    own_x, own_y = counted(x), counted(y)
    counts = torch.stack([own_x, own_y])
    dist.all_reduce(counts, group=group)
    n, m = _sizes(counts, x.dtype, y.dtype)
    if x.element_size() == y.element_size() == 2:
        return between_counted(counts[0], x.dtype, counts[1], y.dtype, p)
    longer, shorter = (x, own_x, counts[0]), (y, own_y, counts[1])
    if n < m:
        longer, shorter, n, m = shorter, longer, m, n
    rank = dist.get_rank(group)
    (mine, cuts), (other, other_cuts) = _shares(*longer, group), _shares(*shorter, group)
    facing = _align(other, cuts, other_cuts, n, m, group)
    total = moved(mine, facing, p, n, m, start=cuts[rank])
    dist.all_reduce(total, group=group)
    return float(total / n) ** (1 / p)


def wasserstein_streamed(a: Parts, b: Parts, p: float = 1) -> float:
    """`wasserstein` of all tensors that `a()` yields and all that `b()` yields, each as one set of values.

    Both are called once per `IN_MEMORY` values and twice more, so what they yield may come from a file.
    Memory: three copies of `IN_MEMORY` values and the largest tensor; more where many values fall
    into one of the 65,536 bins.

    Raises:
        ValueError: as `wasserstein`.
    """
    require_order(p)
    dtype = (
        torch.float64 if any(t.dtype == torch.float64 for parts in (a, b) for t in parts()) else torch.float32
    )
    counts = torch.stack(
        [sum((counted(part) for part in _flat(parts, dtype)), _no_counts()) for parts in (a, b)]
    )
    n, m = _sizes(counts, dtype, dtype)
    if n < m:
        a, b, n, m, counts = b, a, m, n, counts.flip(0)
    ends, other_ends = counts.cumsum(1)
    total, start = torch.zeros((), dtype=torch.float64), 0
    for first, last in _ranges(ends):
        stop = int(ends[last])
        mine = _gathered(a, dtype, first, last)
        begin, end = _facing(start, stop, n, m)
        low, high = (int(torch.searchsorted(other_ends, at, right=True)) for at in (begin, end - 1))
        other = _gathered(b, dtype, low, high)
        skipped = begin - (int(other_ends[low - 1]) if low else 0)
        total += moved(mine, other[skipped : skipped + end - begin], p, n, m, start)
        start = stop
    return float(total / n) ** (1 / p)


def _widened(flat: Tensor) -> Tensor:
    return flat.float() if flat.element_size() == 2 else flat


def _gathered(parts: Parts, dtype: torch.dtype, first: int, last: int) -> Tensor:
    """The values of some bins in rising order; sorted in place, for memory is what bounds the caller."""
    values = torch.cat([between(part, first, last).cpu() for part in _flat(parts, dtype)])
    values.numpy().sort()
    return values


def _no_counts() -> Tensor:
    return torch.zeros(BINS, dtype=torch.int64)


def _flat(parts: Parts, dtype: torch.dtype) -> Iterator[Tensor]:
    for tensor in parts():
        yield flattened(tensor, "values").to(dtype)


def _sizes(counts: Tensor, dtype_a: torch.dtype, dtype_b: torch.dtype) -> tuple[int, int]:
    n, m = counts.sum(1).tolist()
    require_finite(nonfinite(counts[0], dtype_a), n, "a")
    require_finite(nonfinite(counts[1], dtype_b), m, "b")
    return n, m


def _ranges(ends: Tensor) -> Iterator[tuple[int, int]]:
    """First and last bins of neighbouring ranges of about IN_MEMORY values each; none is empty."""
    steps = torch.searchsorted(
        ends, torch.arange(IN_MEMORY, int(ends[-1]) + IN_MEMORY, IN_MEMORY).clamp_(max=int(ends[-1]))
    )
    yield from ((first + 1, last) for first, last in pairwise([-1, *torch.unique(steps).tolist()]))


def _facing(start: int, stop: int, n: int, m: int) -> tuple[int, int]:
    """Which positions of m sorted values lie at the quantiles of positions [start, stop) of n."""
    return start * m // n, -(-stop * m // n)


def _shares(
    flat: Tensor, own: Tensor, counts: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, list[int]]:
    """This rank's share of all sorted values, and the position at which each rank's share begins."""
    world = dist.get_world_size(group)
    ends = counts.cumsum(0)
    owner = ((ends - counts) * world // ends[-1]).clamp_(max=world - 1)

    def per_rank(of: Tensor) -> list[int]:
        return of.new_zeros(world).index_add_(0, owner, of).tolist()

    sent = per_rank(own)
    received = _exchange_sizes(sent, flat.device, group)
    cuts = [0, *torch.tensor(per_rank(counts)).cumsum(0).tolist()]
    return sort(_exchange(sort(flat), sent, received, group)), cuts


def _align(
    other: Tensor, cuts: list[int], other_cuts: list[int], n: int, m: int, group: dist.ProcessGroup | None
) -> Tensor:
    """The values of the shorter set at the quantiles of this rank's share of the longer."""
    rank = dist.get_rank(group)
    wanted = [_facing(start, stop, n, m) if stop > start else (0, 0) for start, stop in pairwise(cuts)]
    held = list(pairwise(other_cuts))
    sent = [_overlap(held[rank], want) for want in wanted]
    received = [_overlap(have, wanted[rank]) for have in held]
    begin = other_cuts[rank]
    values = torch.cat([other[first - begin : last - begin] for first, last in sent])
    return _exchange(
        values, [last - first for first, last in sent], [last - first for first, last in received], group
    )


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    first = max(one[0], other[0])
    return first, max(first, min(one[1], other[1]))


def _exchange_sizes(sent: list[int], device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    sizes = torch.tensor(sent, device=device)
    received = torch.empty_like(sizes)
    dist.all_to_all_single(received, sizes, group=group)
    return received.tolist()


def _exchange(
    values: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    result = values.new_empty(sum(received))
    dist.all_to_all_single(result, values, received, sent, group=group)
    return result
