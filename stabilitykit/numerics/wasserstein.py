"""Exact one-dimensional Wasserstein distances between the values of two tensors."""

import math

import numpy as np
import torch
from torch import Tensor

from stabilitykit.numerics.bins import CHUNK, counted, edges, nonfinite


def wasserstein(a: Tensor, b: Tensor, p: float = 1) -> float:
    """W_p between the values of `a` and of `b` (the root taken), exact, in their unit.

    Both are flattened; sizes and floating dtypes may differ. It looks at values alone, so tensors that
    are permutations of each other are at distance 0: show it beside a distance that is not blind to
    that. Quantile form of W_p: Villani, Optimal Transport (2009), remark 2.19.

    Memory: a sorted copy of each tensor on its device (on CUDA also torch.sort's, 16 bytes per value more
    while one is sorted) and a few MiB; two 16-bit tensors are counted, which takes 2 MiB at any size.

    Raises:
        ValueError: an empty, non-finite, non-floating or meta input; p below 1 or infinite.

    >>> wasserstein(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0]))
    2.0
    """
    require_order(p)
    x, y = flattened(a, "a"), flattened(b, "b")
    if x.element_size() == y.element_size() == 2:
        counts_x, counts_y = counted(x), counted(y)
        require_finite(nonfinite(counts_x, x.dtype), len(x), "a")
        require_finite(nonfinite(counts_y, y.dtype), len(y), "b")
        return between_counted(counts_x, x.dtype, counts_y, y.dtype, p)
    return between_sorted(ordered(x, "a"), ordered(y, "b"), p)


def ordered(values: Tensor, name: str = "values") -> Tensor:
    """The values in rising order [n], ready for `between_sorted`.

    Raises:
        ValueError: an empty, non-finite or non-floating input, with how many of how many, and `name`.
    """
    flat = flattened(values, name)
    if flat.element_size() == 2:
        counts = counted(flat)
        require_finite(nonfinite(counts, flat.dtype), len(flat), name)
        return edges(flat.dtype, flat.device).repeat_interleave(counts)
    rising = sort(flat)
    # Sorted, what is not finite stands at the ends.
    ends_finite = bool(torch.isfinite(rising[:: max(len(rising) - 1, 1)]).all())
    require_finite(0 if ends_finite else int((~torch.isfinite(rising)).sum()), len(rising), name)
    return rising


def between_sorted(a: Tensor, b: Tensor, p: float = 1) -> float:
    """W_p between sorted values [n] and [m]; for one set against many, sort it once with `ordered`.

    Raises:
        ValueError: p below 1 or infinite.
    """
    require_order(p)
    a, b = (a, b) if len(a) >= len(b) else (b, a)
    return float(moved(a, b, p, len(a), len(b)) / len(a)) ** (1 / p)


def between_counted(
    counts_a: Tensor, dtype_a: torch.dtype, counts_b: Tensor, dtype_b: torch.dtype, p: float = 1
) -> float:
    """W_p between 16-bit values that were counted [65536]; exact while lcm(n, m) is below 2^63."""
    n, m = int(counts_a.sum()), int(counts_b.sum())
    whole = math.lcm(n, m)
    if whole >= 2**63:
        raise ValueError(f"expected sizes whose least common multiple is below 2^63, got {n} and {m}")
    # Quantile functions step at i/n and j/m: in units of 1/lcm(n, m) these are integers, hence exact.
    ends_a, ends_b = counts_a.cumsum(0) * (whole // n), counts_b.cumsum(0) * (whole // m)
    ends = torch.sort(torch.cat([ends_a, ends_b])).values
    widths = torch.diff(ends, prepend=ends.new_zeros(1))
    ends, widths = ends[widths > 0], widths[widths > 0]
    x = edges(dtype_a, ends.device)[torch.searchsorted(ends_a, ends)]
    y = edges(dtype_b, ends.device)[torch.searchsorted(ends_b, ends)]
    return float((_powers(x, y, p) * widths).sum() / whole) ** (1 / p)


def moved(a: Tensor, b: Tensor, p: float, n: int, m: int, start: int = 0) -> Tensor:
    """The share of n * W_p^p that a part of the longer of two sorted sets of n >= m values makes.

    `a` holds its values from position `start` on, `b` the other's from position start * m // n on, at
    least to where a's quantiles end.
    """
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for at in range(0, len(a), CHUNK):
        part = a[at : at + CHUNK]
        if n == m:
            total += _powers(part, b[at : at + CHUNK], p).sum()
            continue
        # In units of 1/(nm) a value of `a` is m wide and one of `b` n: it faces one of them, or two.
        place, rest = divmod((start + at) * m, n)
        begins = torch.arange(len(part), device=a.device) * m + rest
        facing = begins // n
        first = ((facing + 1) * n - begins).clamp_(max=m)
        facing += place - start * m // n
        near, far = b[facing], b[(facing + 1).clamp_(max=len(b) - 1)]
        total += (_powers(part, near, p) * first + _powers(part, far, p) * (m - first)).sum() / m
    return total


def sort(flat: Tensor) -> Tensor:
    """The values [n] in rising order, NaN last."""
    if flat.device.type == "cpu":
        return torch.from_numpy(
            np.sort(flat.numpy())
        )  # vectorised quicksort; torch's takes 5 to 15 times longer
    return torch.sort(flat).values


def flattened(values: Tensor, name: str) -> Tensor:
    """The values [n] in a format that can be sorted: 16, 32 or 64 bits, contiguous, without a graph.

    Raises:
        ValueError: values that are not floating-point, or a meta tensor's, which are not there.
    """
    if not values.is_floating_point():
        raise ValueError(f"expected floating-point values, got {values.dtype} in {name}")
    if values.is_meta:
        raise ValueError(f"expected values, got a meta tensor without any in {name}")
    flat = values.detach().flatten().contiguous()
    return flat.to(torch.bfloat16) if flat.element_size() == 1 else flat  # it holds every 8-bit float exactly


def require_order(p: float) -> None:
    """ValueError unless W_p is there."""
    if not 1 <= p < float("inf"):
        raise ValueError(f"expected 1 <= p < inf, got {p}")


def require_finite(bad: int, of: int, name: str) -> None:
    """ValueError that says how many of how many are not, or that there are none at all."""
    if of == 0:
        raise ValueError(f"expected finite values, got none (empty) in {name}")
    if bad:
        raise ValueError(f"expected finite values, got {bad} non-finite of {of} in {name}")


def _powers(x: Tensor, y: Tensor, p: float) -> Tensor:
    apart = (x.double() - y.double()).abs_()
    return apart if p == 1 else apart.pow_(p)
