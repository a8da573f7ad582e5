"""Exact attention for the calls that a tap sees: their options, and a drop-in for `replace`."""

from typing import Any

import torch
from torch import Tensor

from stabilitykit.numerics.exact import exact_attention, exact_attention_grad, plain_attention

FURTHER = ("window", "softcap", "alibi_slopes", "align", "cu_seqlens_q", "cu_seqlens_k", "dropout_mask")


def exact_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of `exact_attention` that say what the kwargs of an `AttentionCall` say.

    >>> exact_options({"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.5, "softcap": 50.0})
    {'causal': True, 'mask': None, 'scale': 0.5, 'dropout_p': 0.0, 'softcap': 50.0}
    """
    own = {"causal": "is_causal", "mask": "attn_mask", "scale": "scale", "dropout_p": "dropout_p"}
    said = {name: kwargs[theirs] for name, theirs in own.items()}
    return said | {name: kwargs[name] for name in FURTHER if name in kwargs}


def part_of(options: dict[str, Any], *, sequences: Any = None, heads: slice | None = None) -> dict[str, Any]:
    """What `options` are for some `sequences` (indices) or some `heads` of the call alone."""
    result = dict(options)
    for name, inner in {"mask": 2, "dropout_mask": 2, "alibi_slopes": 0}.items():  # axes after the head's
        if result.get(name) is not None:
            result[name] = _picked(_picked(result[name], inner + 1, sequences), inner, heads)
    return result


def _picked(tensor: Tensor, inner: int, index: Any) -> Tensor:
    """The entries at `index` of the axis that has `inner` axes after it; a tensor without it serves all."""
    if index is None or tensor.dim() <= inner or tensor.shape[-1 - inner] == 1:
        return tensor
    return tensor[(..., index, *[slice(None)] * inner)]


def attend_exactly(
    q: Tensor, k: Tensor, v: Tensor, *, dtype: torch.dtype = torch.float64, **kwargs: Any
) -> Tensor:
    """Exact attention [b, h, q, d_v] in the format of q, with exact gradients, for `Tap(replace=...)`.

    kwargs as in `AttentionCall`. Dropout whose mask is not given is drawn here, as the kernel draws it
    on a CPU. Where the mask gets gradients itself, all scores are held at once.

    Raises:
        ValueError: as `exact_attention`.
    """
    options = drawn_options(q, k, kwargs)
    mask = options["mask"]
    if mask is not None and mask.requires_grad:
        return plain_attention(q.to(dtype), k.to(dtype), v.to(dtype), **options).to(q.dtype)
    out: Any = _Exact.apply(q, k, v, {**options, "dtype": dtype})
    return out


def drawn_options(q: Tensor, k: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`exact_options`, with the mask of dropout that was not given drawn as the kernel does on a CPU."""
    options = exact_options(kwargs)
    p = options["dropout_p"]
    if p > 0 and options.get("dropout_mask") is None:
        ones = torch.ones(*q.shape[:3], k.shape[2], dtype=_drawn(q.dtype), device=q.device)
        options["dropout_mask"] = torch.dropout(ones, p, train=True) != 0
    return options


def _drawn(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        return exact_attention(q, k, v, **options)[0].to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dq, dk, dv = exact_attention_grad(q, k, v, grads[0], **ctx.options)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
