"""One kernel call of the ring, forward and backward: torch's fused ops, or exact maths for checks."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from stabilitykit.numerics.exact import exact_attention
from stabilitykit.numerics.scores import require
from stabilitykit.parallel.tiles import Part

KernelName = Literal["fused", "exact"]
_ATEN = torch.ops.aten
GRANULE = 512  # torch's CPU op takes 512 keys at a time, and at most 256 rows; flash fewer of both


class Kernel(NamedTuple):
    """The dtype of a kernel's inputs and results, its two halves, and what a causal call leaves out itself.

    Of a causal call's scores none is computed in squares of `granule` above the diagonal, or a multiple
    of it; None: all are, and are held at once.
    `forward(q, k, v, part, scale)` gives out and lse, -inf and 0 where a row sees no key.
    `backward(grad_out, q, k, v, out, lse, part, scale)` gives this part's share of dq, dk and dv, for
    the out and the (finite) lse of whole rows.
    """

    name: str
    dtype: torch.dtype
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    granule: int | None = None


def kernel_for(q: Tensor, v: Tensor, name: KernelName, *, masked: bool) -> Kernel:
    """The kernel for tensors like q and v; `masked` if some parts will have a mask.

    On a CPU the fused op computes in float32 at least, so that partial results are not rounded to
    16 bits at every hop. On CUDA, flash takes 16-bit inputs without masks; the rest is exact maths.

    Raises:
        ValueError: no such kernel, or a head_dim of v that the fused op cannot take.
    """
    require(name in ("fused", "exact"), f"kernel must be 'fused' or 'exact', got {name!r}")
    if name == "exact":
        return Kernel("exact", torch.float64, _exact, _exact_grad)
    wide = torch.promote_types(q.dtype, torch.float32)
    d, d_v = q.shape[-1], v.shape[-1]
    if q.device.type == "cpu":
        require(d == d_v, f"the fused CPU kernel needs one head_dim for q, k and v, got {d} and {d_v}")
        return Kernel("cpu", wide, _cpu, _cpu_grad, GRANULE)
    flash = q.dtype != wide and d == d_v and d % 8 == 0 and d <= 256 and not masked
    if flash and q.device.type == "cuda":
        return Kernel("flash", q.dtype, _flash, _flash_grad, GRANULE)
    return Kernel("exact", wide, _exact, _exact_grad)


def _cpu(q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    mask = None if part.mask is None else _added(part.mask, q.dtype)
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, part.causal, attn_mask=mask, scale=scale
    )
    if part.mask is not None:  # the op says lse 0 for rows without keys
        lse = lse.masked_fill(~part.mask.any(-1), -math.inf)
    return out, lse


def _cpu_grad(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    mask = None if part.mask is None else _added(part.mask, q.dtype)
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, part.causal, attn_mask=mask, scale=scale
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (_per_query_head(x, q) for x in (k, v))
    return _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, part.causal, scale=scale)[:2]


def _flash_grad(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    n_keys, heads = k.shape[2], k.shape[1]
    k, v = (_per_query_head(x, q) for x in (k, v))
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse.float().contiguous(), None, None, q.shape[2], n_keys, 0.0, part.causal,
        seed, seed.new_zeros(()), scale=scale,
    )  # fmt: skip
    dk, dv = (x.float().unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _exact(q: Tensor, k: Tensor, v: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    mask = None if part.mask is None else part.mask.to(q.device)
    return exact_attention(q, k, v, causal=part.causal, mask=mask, scale=scale, dtype=q.dtype)


def _exact_grad(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: Part, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition: exact_attention_grad cannot serve, its rows end where their keys end."""
    heads = k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        q, grad_out, out = (x.unflatten(1, (heads, -1)) for x in (q, grad_out, out))
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        logits = q @ k.mT * scale - lse.unflatten(1, (heads, -1)).unsqueeze(-1)
        if part.causal:
            hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            logits.masked_fill_(hidden, -math.inf)
        if part.mask is not None:
            mask = part.mask if part.mask.ndim == 2 else part.mask.unsqueeze(2)
            logits.masked_fill_(~mask.to(q.device), -math.inf)
        probs = logits.exp_()
        slope = probs * (grad_out @ v.mT - (grad_out * out).sum(-1, keepdim=True)) * scale
        return (slope @ k).flatten(1, 2), (slope.mT @ q).sum(2), (probs.mT @ grad_out).sum(2)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
