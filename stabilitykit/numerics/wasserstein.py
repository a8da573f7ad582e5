"""Exact one-dimensional Wasserstein distances between the values of two tensors."""

import torch
from torch import Tensor

_CHUNK = 1 << 24  # values per float64 pass: the doubled copies stay small beside the tensors


def wasserstein(a: Tensor, b: Tensor, p: float = 1) -> float:
    """W_p between the values of `a` and of `b` (the root taken), exact, in their unit.

    Both are flattened; sizes and floating dtypes may differ. It looks at values alone, so tensors that
    are permutations of each other are at distance 0: show it beside a distance that is not blind to
    that. Quantile form of W_p: Villani, Optimal Transport (2009), remark 2.19.

    Raises:
        ValueError: an empty, non-finite or non-floating input; p below 1 or infinite.

    >>> wasserstein(torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0]))
    2.0
    """
    return between_sorted(ordered(a, "a"), ordered(b, "b"), p)


def ordered(values: Tensor, name: str = "values") -> Tensor:
    """The values in rising order [n], ready for `between_sorted`.

    Raises:
        ValueError: an empty, non-finite or non-floating input, with how many of how many, and `name`.
    """
    flat = values.detach().flatten()
    if not flat.is_floating_point():
        raise ValueError(f"expected floating-point values, got {values.dtype} in {name}")
    if flat.numel() == 0:
        raise ValueError(f"expected finite values, got none (empty) in {name}")
    if flat.element_size() == 1:
        flat = flat.to(torch.bfloat16)  # holds every 8-bit float exactly, and can be sorted
    finite = int(torch.isfinite(flat).sum())
    if finite != flat.numel():
        bad = flat.numel() - finite
        raise ValueError(f"expected finite values, got {bad} non-finite of {flat.numel()} in {name}")
    return torch.sort(flat).values


def between_sorted(a: Tensor, b: Tensor, p: float = 1) -> float:
    """W_p between sorted values [n] and [m]; for one set against many, sort it once with `ordered`.

    Raises:
        ValueError: p below 1 or infinite.
    """
    if not 1 <= p < float("inf"):
        raise ValueError(f"expected 1 <= p < inf, got {p}")
    if len(a) == len(b):
        total = sum(_powers(x, y, p).sum() for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True))
        return float(total / len(a)) ** (1 / p)
    n, m = len(a), len(b)
    # Quantile functions step at i/n and j/m: in units of 1/(nm) these are integers, hence exact.
    steps = torch.cat([torch.arange(1, n + 1, device=a.device) * m, torch.arange(1, m, device=a.device) * n])
    ends = torch.sort(steps).values
    widths = torch.diff(ends, prepend=ends.new_zeros(1))
    apart = _powers(a[(ends - 1) // m], b[(ends - 1) // n], p)
    return float((apart * widths).sum() / (n * m)) ** (1 / p)


def _powers(x: Tensor, y: Tensor, p: float) -> Tensor:
    apart = (x.double() - y.double()).abs()
    return apart if p == 1 else apart.pow(p)
