"""Tap's view of torch's scaled_dot_product_attention, whichever backend it reaches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitykit.observe.calls import FLEETING, Calls, Operand, as_autocast, is_fleeting
from stabilitykit.observe.chain import relaid

_ATEN = torch.ops.aten
_BACKENDS = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}


def _attend(calls: Calls, func: Any, args: Any, kwargs: Any) -> Tensor:
    return _sdpa(calls, *args, **kwargs)


def _sdpa(
    calls: Calls,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    reason = FLEETING if is_fleeting(query) or is_fleeting(key) else _misfit(query, key, value)
    if reason:
        calls.report(f"scaled_dot_product_attention: {reason}")
        given: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **given)
    q, k, v = as_autocast(query), as_autocast(key), as_autocast(value)
    aligned = getattr(attn_mask, "variant", None)  # a CausalBias of torch is a mask without numbers
    kwargs: dict[str, Any] = {
        "attn_mask": attn_mask if attn_mask is None or aligned else as_autocast(attn_mask),
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    lead = q.shape[:-2]
    folded = lead[:1].numel(), lead[1:].numel()
    told = {**kwargs, **_mask(kwargs["attn_mask"], aligned, lead, folded)}
    held = {"q": q, "k": k, "v": v}
    for name in _alias_order(q, k, v, kwargs):
        held[name] = calls.alias(held[name])
    q, k, v = held.values()
    form, kernel = partial(_by_heads, folded), _Kernel()
    if calls.replace:
        made = calls.replace(form(q), form(k), form(v), **told)
        kernel.backend, out = "replaced", made.reshape(*lead, *made.shape[-2:])
    else:
        with kernel:
            out = F.scaled_dot_product_attention(q, k, v, **kwargs)
    if kernel.kept is not None:
        told["dropout_mask"] = relaid(kernel.kept, lead, folded)
    lse = None if kernel.lse is None else kernel.lse[..., : q.shape[-2]]
    of_q, of_k, of_v, of_out = (Operand(tensor, form) for tensor in (q, k, v, out))
    calls.record(of_q, of_k, of_v, of_out, told, kernel.backend, lse=lse)
    return out


def _mask(mask: Tensor | None, aligned: Any, lead: torch.Size, folded: tuple[int, int]) -> dict[str, Any]:
    if aligned is None:
        return {"attn_mask": relaid(mask, lead, folded)}
    causal: dict[str, Any] = {"attn_mask": None, "is_causal": True}
    return causal | ({"align": "bottom_right"} if aligned.name == "LOWER_RIGHT" else {})


def _by_heads(folded: tuple[int, int], tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 4 else tensor.reshape(*folded, *tensor.shape[-2:])


def _misfit(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why tensors that the kernel lets broadcast are no [b, h, n, d], None where they are."""
    leads = [tuple(tensor.shape[:-2]) for tensor in (q, k, v)]
    if leads[0] == leads[1] == leads[2]:
        return None
    same = len(leads[0]) == len(leads[1]) == 2 and leads[0][0] == leads[1][0] and leads[1] == leads[2]
    if same and leads[0][1] % leads[1][1] == 0:
        return None
    return "q, k and v with leading axes {}, {}, {}".format(*leads)


class _Kernel(TorchDispatchMode):
    """Tells which backend a single call reached, its lse, and what dropout kept where that can be known."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = "math"
        self.lse: Tensor | None = None
        self.kept: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _BACKENDS:
            self.backend, self.lse = _BACKENDS[name], result[1].detach()
        elif name == "bernoulli_":
            self.kept = result != 0
        elif name == "native_dropout":
            self.kept = result[1]
        return result


def _alias_order(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> str:
    # A tensor used twice gets its gradients added in the order its aliases are made: keep the kernel's.
    if q is k or k is v or q is v:
        fused_choice: Any = getattr(torch, "_fused_sdp_choice")  # noqa: B009  private: types do not know it
        choice = fused_choice(q, k, v, **kwargs)
        return "qkv" if choice == 0 else "vkq"
    return "vkq"


HANDLERS: dict[Any, Callable[[Calls, Any, Any, Any], Any]] = dict.fromkeys(
    (
        F.scaled_dot_product_attention,
        _ATEN.scaled_dot_product_attention,
        _ATEN.scaled_dot_product_attention.default,
    ),
    _attend,
)
