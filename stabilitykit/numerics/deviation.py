"""How far a kernel's result is from the exact one, in numbers that formats and shapes share.

All of them are computed in float64.
"""

import math

import torch
from torch import Tensor

from stabilitykit.numerics.formats import Precision, rounded, ulp, unit_roundoff


def deviation(
    fast: Tensor,
    exact: Tensor,
    low: Tensor | None = None,
    perturbed: Tensor | None = None,
    *,
    dtype: Precision | None = None,
) -> dict[str, float]:
    """The distance of `fast` from `exact`, tensors of one shape, as plain floats by these keys.

    With D = fast - exact, u the unit roundoff of `dtype` (default: fast.dtype), 0/0 = 0, x/0 = inf:

    - `max_abs`, `mean_abs`, `rmse`: of D, in the tensors' own unit.
    - `rel_l2`: ||D|| / ||exact||; `cosine`: of fast and exact, -1..1.
    - `error_constant`: max|D| / (u max|exact|); about 1 for one rounding (vLLM's tolerance theory).
    - `error_vs_baseline`, given `low`, plain attention in the kernel's dtype: max|D| / (max|low -
      exact| + atol), atol = 2 max|(exact + .3 - .3) - exact| in `dtype` (FlashAttention-3's tests).
    - `roundoff_ratio`, given `perturbed`, the exact result on inputs moved by `perturb`: ||D|| /
      ||perturbed - exact||; near 1 = as good as the format allows here (TTrace, arXiv 2506.09280).
    - `sign_bias`: mean of sign(exact) D / ulp(exact) where exact is not 0, ulp the unit in the last
      place of `dtype`; > 0 = away from zero (arXiv 2510.04212).
    - `nonfinite_fast`, `nonfinite_exact`: how many entries are NaN or infinite.

    The numbers are over the entries finite on both sides (NaN if there is none), so a NaN in the
    reference hides nothing else. If fast is not finite where exact is, every error but `cosine`
    and `sign_bias` is inf. Entries of `low` and `perturbed` that are not finite are left out.

    Raises:
        ValueError: empty tensors or tensors of different shapes.

    >>> numbers = deviation(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    >>> numbers["max_abs"], numbers["mean_abs"], numbers["rel_l2"]
    (1.0, 0.5, 0.2)
    """
    _check(fast, exact, low, perturbed)
    precision = fast.dtype if dtype is None else dtype
    fast_ok, exact_ok = fast.isfinite(), exact.isfinite()
    both = fast_ok & exact_ok
    near, true = _entries(fast, both), _entries(exact, both)
    gap = near - true
    top, norm = gap.abs().max().item(), gap.norm().item()
    errors = {
        "max_abs": top,
        "mean_abs": gap.abs().mean().item(),
        "rmse": gap.square().mean().sqrt().item(),
        "rel_l2": _ratio(norm, true.norm().item()),
        "error_constant": _ratio(top, unit_roundoff(precision) * true.abs().max().item()),
    }
    if low is not None:
        kept = both & low.isfinite()
        noise = (_entries(low, kept) - _entries(exact, kept)).abs().max().item()
        errors["error_vs_baseline"] = _ratio(top, noise + _one_add(true, precision))
    if perturbed is not None:
        kept = both & perturbed.isfinite()
        moved = (_entries(perturbed, kept) - _entries(exact, kept)).norm().item()
        errors["roundoff_ratio"] = _ratio(norm, moved)
    if (exact_ok & ~fast_ok).any():
        errors = dict.fromkeys(errors, math.inf)
    return errors | {
        "cosine": _cosine(near, true),
        "sign_bias": _sign_bias(gap, true, precision),
        "nonfinite_fast": float((~fast_ok).sum()),
        "nonfinite_exact": float((~exact_ok).sum()),
    }


def by_quartile(
    fast: Tensor,
    exact: Tensor,
    low: Tensor | None = None,
    perturbed: Tensor | None = None,
    *,
    dtype: Precision | None = None,
) -> list[dict[str, float]]:
    """The numbers of `deviation` for each quarter of the query positions, dim -2 of [..., q, d].

    Under a causal mask the first rows average few values, so their errors hide those of all others.

    Raises:
        ValueError: as `deviation`, and fewer than 4 positions.

    >>> fast = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    >>> [numbers["max_abs"] for numbers in by_quartile(fast, torch.zeros(4, 1))]
    [1.0, 2.0, 4.0, 8.0]
    """
    _check(fast, exact, low, perturbed)
    if fast.ndim < 2 or fast.shape[-2] < 4:
        raise ValueError(f"quartiles need [..., q, d] with q >= 4, got shape {tuple(fast.shape)}")
    tensors = (fast, exact, low, perturbed)
    quarters = ((None,) * 4 if x is None else x.tensor_split(4, -2) for x in tensors)
    return [deviation(*parts, dtype=dtype) for parts in zip(*quarters, strict=True)]


def perturb(tensor: Tensor, dtype: Precision, generator: torch.Generator) -> Tensor:
    """`tensor` * (1 + u r) in float64, u the unit roundoff of `dtype`, r uniform in [-1, 1].

    Inputs as far from `tensor` as a rounding to `dtype` may move them, for `roundoff_ratio`.
    """
    r = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=generator.device).to(
        tensor.device
    )
    return tensor.detach().double() * (1 + unit_roundoff(dtype) * (2 * r - 1))


def _check(fast: Tensor, *others: Tensor | None) -> None:
    if not fast.numel():
        raise ValueError(f"deviation needs at least one entry, got shape {tuple(fast.shape)}")
    for name, other in zip(("exact", "low", "perturbed"), others, strict=True):
        if other is not None and other.shape != fast.shape:
            got = f"got {tuple(other.shape)} and {tuple(fast.shape)}"
            raise ValueError(f"{name} must have the shape of fast, {got}")


def _entries(x: Tensor, wanted: Tensor) -> Tensor:
    """The wanted entries in float64; one NaN where there are none, so that no number hides it."""
    # Nearly always all are: to pick them one by one took a fifth of a due step's time.
    x = (x.detach().flatten() if wanted.all() else x.detach()[wanted]).double()
    return x if x.numel() else x.new_full((1,), math.nan)


def _ratio(error: float, size: float) -> float:
    if size == 0:
        return math.inf if error else 0.0
    return error / size


def _cosine(a: Tensor, b: Tensor) -> float:
    cosine = _ratio(torch.dot(a, b).item(), a.norm().item() * b.norm().item())
    return math.copysign(1.0, cosine) if abs(cosine) > 1 else cosine  # above 1 by rounding only


def _one_add(true: Tensor, precision: Precision) -> float:
    """FlashAttention-3's atol: twice what adding and taking away 0.3 does in `precision`."""
    if isinstance(precision, torch.dtype):
        x = true.to(precision)
        moved = (x + 0.3 - 0.3) - x
    else:
        x, step = rounded(true, precision), rounded(true.new_tensor(0.3), precision)
        moved = rounded(rounded(x + step, precision) - step, precision) - x
    return 2 * moved.abs().max().item()


def _sign_bias(gap: Tensor, true: Tensor, precision: Precision) -> float:
    gap, true = gap[true != 0], true[true != 0]
    return (true.sign() * gap / ulp(true, precision)).mean().item() if true.numel() else 0.0
