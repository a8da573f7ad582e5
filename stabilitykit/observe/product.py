"""Batched matrix products, however they are spelled, with a letter for each axis."""

import string
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LEAD = "abcdefghijklmnopqrstuvw"


class Product(NamedTuple):
    """`run(a, b)` makes of tensors with the axes `in_a` and `in_b` one with the axes `out`.

    It is `alpha` times the product, plus `bias` if there is one.
    """

    a: Tensor
    b: Tensor
    in_a: str
    in_b: str
    out: str
    run: Callable[[Tensor, Tensor], Tensor]
    alpha: float = 1.0
    bias: Tensor | None = None

    @property
    def summed(self) -> str:
        """The axes that are summed over."""
        return "".join(axis for axis in self.in_a if axis in self.in_b and axis not in self.out)

    @property
    def batched(self) -> bool:
        """Whether neither factor can be a weight, learned or computed from others."""
        return min(len(self.in_a), len(self.in_b)) > 2 and not self.learned

    @property
    def learned(self) -> bool:
        """Whether a factor is a parameter, as of experts or a memory: its gradient is not one call's."""
        return _is_parameter(self.a) or _is_parameter(self.b)


def matmul(func: Any, args: Any, kwargs: Any) -> Product | None:
    """What a call of matmul, mm or bmm multiplies; None where it is no product of two activations."""
    tensors = _given(args, kwargs, "other", "mat2")
    if len(tensors) != 2 or "out" in kwargs or not _activations(*tensors):
        return None
    a, b = tensors
    if min(a.dim(), b.dim()) < 2:
        return None
    lead = _LEAD[: max(a.dim(), b.dim()) - 2]
    own_a, own_b = (lead[len(lead) + 2 - tensor.dim() :] for tensor in (a, b))
    return Product(a, b, own_a + "xy", own_b + "yz", lead + "xz", func)


def baddbmm(func: Any, args: Any, kwargs: Any) -> Product | None:
    """What a call of baddbmm or addmm multiplies, scales and adds."""
    tensors = _given(args, kwargs, "batch1", "mat1", "batch2", "mat2")
    if len(tensors) != 3 or "out" in kwargs or not _activations(*tensors[1:]):
        return None
    bias, a, b = tensors
    lead = _LEAD[: a.dim() - 2]
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    added = (bias if beta == 1 else bias * beta) if beta else None

    def run(a: Tensor, b: Tensor) -> Tensor:
        return func(bias, a, b, beta=beta, alpha=alpha)

    return Product(a, b, lead + "xy", lead + "yz", lead + "xz", run, alpha, added)


def einsum(func: Any, args: Any, kwargs: Any) -> Product | None:
    """What a call of einsum multiplies; None where it is not one product of two activations."""
    equation, *tensors = args
    if len(tensors) == 1 and isinstance(tensors[0], list | tuple):
        tensors = list(tensors[0])
    if len(tensors) != 2 or not _activations(*tensors):
        return None
    terms = _with_out(equation.replace(" ", "")).replace("->", ",").split(",")
    in_a, in_b, out = _spelled_out(terms, tensors)
    if any(len(set(axes)) < len(axes) for axes in (in_a, in_b, out)):
        return None
    return Product(tensors[0], tensors[1], in_a, in_b, out, lambda a, b: func(equation, a, b))


def _given(args: Any, kwargs: Any, *names: str) -> list[Tensor]:
    first = [kwargs["input"]] if "input" in kwargs else []
    return [*first, *args, *(kwargs[name] for name in names if name in kwargs)]


def _with_out(equation: str) -> str:
    """The equation of an einsum with what it makes where that goes without saying.

    >>> _with_out("id,jd"), _with_out("ij,jk->ki")
    ('id,jd->ij', 'ij,jk->ki')
    """
    if "->" in equation:
        return equation
    once = sorted(axis for axis in set(equation) - set(".,") if equation.count(axis) == 1)
    return f"{equation}->{'...' if '...' in equation else ''}{''.join(once)}"


def _spelled_out(terms: list[str], tensors: list[Tensor]) -> list[str]:
    """The terms of an einsum with letters for what `...` stands for."""
    free = sorted(set(string.ascii_letters) - set("".join(terms)))
    hidden = [t.dim() - len(term.replace("...", "")) for t, term in zip(tensors, terms, strict=False)]
    counts = [*hidden, max(hidden)]
    return [
        term.replace("...", "".join(free[max(hidden) - count : max(hidden)]))
        for term, count in zip(terms, counts, strict=True)
    ]


def arranged(tensor: Tensor, have: str, want: str) -> Tensor:
    """The tensor with its axes in the order of `want`; those it lacks have size 1.

    >>> arranged(torch.zeros(2, 3, 5), "bnh", "bhgn").shape
    torch.Size([2, 5, 1, 3])
    """
    tensor = tensor.permute([have.index(axis) for axis in want if axis in have])
    for position, axis in enumerate(want):
        if axis not in have:
            tensor = tensor.unsqueeze(position)
    return tensor


def _activations(*tensors: Tensor) -> bool:
    return not any(_is_parameter(tensor) and tensor.dim() < 3 for tensor in tensors)


def _is_parameter(tensor: Tensor) -> bool:
    weight = torch.nn.Parameter
    return isinstance(tensor, weight) or isinstance(tensor._base, weight)
