"""Number formats: how finely each one spaces its numbers, and rounding to it.

A `Precision` is a torch.dtype, "tf32" or an int, the mantissa bits stored (bfloat16 has 7).
"""

import torch
from torch import Tensor

Precision = torch.dtype | str | int

_EXPONENT = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}


def unit_roundoff(dtype: Precision) -> float:
    """The largest relative error of one rounding to the nearest: 2^-(mantissa bits + 1).

    >>> unit_roundoff(torch.bfloat16) == unit_roundoff(7) == 2**-8
    True
    """
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return torch.finfo(dtype).eps / 2
    if dtype == "tf32":
        return 2.0**-11
    if isinstance(dtype, int) and not isinstance(dtype, bool) and dtype >= 0:
        return 2.0 ** -(dtype + 1)
    raise ValueError(f'dtype must be a floating torch.dtype, "tf32" or mantissa bits >= 0, got {dtype!r}')


def rounded(x: Tensor, precision: Precision) -> Tensor:
    """`x`, float64 or float32, at `precision`: to the nearest, ties to even; in the dtype of `x`.

    A torch.dtype brings its own subnormals and overflow; "tf32" and mantissa widths have the
    exponents of `x`. A precision finer than `x` changes nothing.

    >>> rounded(torch.tensor([1.25, 1.75, 70000.0]), 1).tolist()
    [1.0, 2.0, 65536.0]
    >>> rounded(torch.tensor([1.0 + 2**-11, 70000.0]), torch.float16).tolist()
    [1.0, inf]
    """
    if unit_roundoff(precision) <= unit_roundoff(x.dtype):
        return x
    if isinstance(precision, torch.dtype) and torch.float32 in (precision, x.dtype):
        return x.to(precision).to(x.dtype)
    step = ulp(x, precision)
    near = torch.round(x / step) * step
    # A cast of float64 to 16 bits rounds to float32 first, hence twice: here it only overflows.
    return near.to(precision).to(x.dtype) if isinstance(precision, torch.dtype) else near


def ulp(x: Tensor, precision: Precision) -> Tensor:
    """2^floor(log2|x|) times the format's eps; below its normal numbers, the spacing there.

    >>> ulp(torch.tensor([-5.0, 0.0]), torch.bfloat16).tolist() == [2**-5, 2**-133]
    True
    """
    integer, exponent = _EXPONENT[x.dtype]
    power = (x.view(integer) & exponent).view(x.dtype)
    smallest = torch.finfo(precision if isinstance(precision, torch.dtype) else x.dtype).smallest_normal
    # The upper limit leaves infinity infinite when divided by its step.
    return power.clamp(smallest, torch.finfo(x.dtype).max) * (2 * unit_roundoff(precision))
