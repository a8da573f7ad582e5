"""Tap's view of torch's scaled_dot_product_attention, whichever backend it reaches."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitykit.observe.calls import Calls, Operand, as_autocast

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
    q, k, v = as_autocast(query), as_autocast(key), as_autocast(value)
    kwargs: dict[str, Any] = {
        "attn_mask": None if attn_mask is None else as_autocast(attn_mask),
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    held = {"q": q, "k": k, "v": v}
    for name in _alias_order(q, k, v, kwargs):
        held[name] = calls.alias(held[name])
    q, k, v = held.values()
    kernel = _Kernel()
    if calls.replace:
        kernel.backend, out = "replaced", calls.replace(q, k, v, **kwargs)
    else:
        with kernel:
            out = F.scaled_dot_product_attention(q, k, v, **kwargs)
    if kernel.kept is not None:
        kwargs["dropout_mask"] = kernel.kept
    lse = None if kernel.lse is None else kernel.lse[..., : q.shape[-2]]
    calls.record(Operand(q), Operand(k), Operand(v), Operand(out), kwargs, kernel.backend, lse=lse)
    return out


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
