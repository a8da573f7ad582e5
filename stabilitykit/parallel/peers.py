"""Other rings, where they can be had: held against ours in the studies and benches."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stabilitykit.parallel.layout import Layout

_ATEN = torch.ops.aten
_TEMPLATE = "torch.distributed.tensor.experimental._context_parallel._attention"


def found(module: str, *names: str) -> list[Callable[..., Any]] | str:
    """The functions of a module, or in words why they are not to be had.

    >>> found("math", "sqrt")[0](9.0), found("maths", "sqrt")
    (3.0, "No module named 'maths'")
    """
    try:
        place = importlib.import_module(module)
        return [getattr(place, name) for name in names]
    except (ImportError, AttributeError) as problem:
        return str(problem)


def torch_ring() -> Callable[..., list[Tensor]] | str:
    """torch's ring, zigzag, causal: `(q, k, v, grad_out or None) -> [out, dq, dk, dv]` of this rank.

    Private to torch (2.13), whose public context_parallel has no CPU kernel; given one it is an oracle that
    shares no line with ours. The lengths must divide by 2 * ranks.
    """
    functions = found(_TEMPLATE, "_templated_ring_attention", "_templated_ring_attention_backward")
    if isinstance(functions, str):
        return functions
    forward, backward = functions

    def attend(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None) -> list[Tensor]:
        with torch.no_grad():
            out, lse, *_ = forward(dist.group.WORLD, 2, _fused, q, k, v, is_causal=True)
            if grad_out is None:
                return [out]
            grads = backward(
                dist.group.WORLD, 2, _fused_grad, grad_out, "grad_out", q, k, v, out, lse, is_causal=True
            )
        return [out, *grads[:3]]

    return attend


def lucidrains_ring() -> Callable[..., list[Tensor]] | str:
    """ring-attention-pytorch's ring, striped, causal: `(q, k, v, grad_out) -> [out]` of this rank.

    An optional peer; without a GPU only these of its dependencies are needed:
    `pip install --no-deps ring-attention-pytorch==0.5.20 einops beartype jaxtyping`. Its dk and dv are wrong
    (0.5.20: `dk, dv = dkv` unpacks what was received and what was sent), so it gives its forward alone.
    """
    functions = found("ring_attention_pytorch.ring_flash_attention", "ring_flash_attn")
    if isinstance(functions, str):
        return functions
    (attention,) = functions

    def attend(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor | None) -> list[Tensor]:
        turned = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out = attention(*turned, causal=True, ring_reduce_col=True, striped_ring_attn=True)
        return [out.transpose(1, 2)]

    return attend


def _fused(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, **_: Any) -> tuple[Tensor, ...]:
    return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


def _fused_grad(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )


PEERS: dict[str, tuple[Layout, Callable[[], Callable[..., list[Tensor]] | str]]] = {
    "torch_ring": ("zigzag", torch_ring),
    "ring_attention_pytorch": ("striped", lucidrains_ring),
}
