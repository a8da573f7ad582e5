"""Tap's view of the flash-attn library: its custom ops, forward and backward, fixed and packed lengths.

They run inside an autograd function, where a tap sees no graph: the backward op tells the gradients.
"""

from typing import Any

import torch
from torch import Tensor

from stabilitykit.observe.calls import Calls, Operand

# Arguments that are read, or that change no result. A tensor in any other one is not understood.
_READ = {
    "q", "k", "v", "dout", "out", "softmax_lse", "dq", "dk", "dv", "alibi_slopes",
    "cu_seqlens_q", "cu_seqlens_k", "rng_state", "scheduler_metadata",
}  # fmt: skip


def _forward(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    said = _arguments(func, args, kwargs)
    reason = _unknown(said)
    if reason:
        calls.report(f"flash_attn with {reason}")
        return result
    out, lse = result[0], result[1]
    options, packed = _options(said), said.get("cu_seqlens_q") is not None
    replaced = _replaces(calls, options)
    if replaced:
        heads = (_by_heads(said[name]) for name in "qkv")
        out.copy_(_by_tokens(replaced(*heads, **options), packed))
    q, k, v, seen = (Operand(tensor, _by_heads) for tensor in (said["q"], said["k"], said["v"], out))
    rows = lse[None] if packed else lse
    backend = "replaced" if replaced else "flash_attn"
    calls.record(q, k, v, seen, options, backend, lse=rows[..., : q.seen().shape[2]], key=lse)
    return result


def _backward(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    result = func(*args, **kwargs)
    said = _arguments(func, args, kwargs)
    if _unknown(said):
        return result
    grads = [said[name] for name in ("dq", "dk", "dv")]
    if grads[0] is None:  # flash-attn 3 makes them itself
        grads = list(result[:3])
    options, packed = _options(said), said.get("cu_seqlens_q") is not None
    replaced = _replaces(calls, options)
    if replaced:
        with torch.enable_grad():
            leaves = [_by_heads(said[name]).detach().requires_grad_() for name in "qkv"]
            out = replaced(*leaves, **options)
        dout = _by_heads(said["dout"])
        own = torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)
        for grad, true in zip(grads, own, strict=True):
            grad.copy_(_by_tokens(true, packed))
    dq, dk, dv = map(_by_heads, grads)
    calls.gradients(said["softmax_lse"], grad_out=_by_heads(said["dout"]), dq=dq, dk=dk, dv=dv)
    return result


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an op by name, those left out by their defaults; flash-attn 3's by the names of 2."""
    op = func if isinstance(func, torch._ops.OpOverload) else func.default
    said = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    said |= {a.name: value for a, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    said["causal"] = said.get("causal", said.get("is_causal"))
    return said


def _unknown(said: dict[str, Any]) -> str | None:
    strange = [name for name, value in said.items() if isinstance(value, Tensor) and name not in _READ]
    strange += ["attention_chunk"] if said.get("attention_chunk") else []
    return f"{', '.join(strange)}, which is not understood" if strange else None


def _replaces(calls: Calls, options: dict[str, Any]) -> Any:
    if calls.replace and options["dropout_p"] > 0:
        calls.report("flash_attn, not replaced: what its dropout drops is not known")
        return None
    return calls.replace


def _options(said: dict[str, Any]) -> dict[str, Any]:
    """The kwargs of an `AttentionCall`; what SDPA's five cannot say only where it is said."""
    q, k, packed = said["q"], said["k"], said.get("cu_seqlens_q") is not None
    window = (said["window_size_left"], said["window_size_right"])
    options: dict[str, Any] = {
        "attn_mask": None,
        "dropout_p": said.get("dropout_p", 0.0),
        "is_causal": said["causal"],
        "scale": said["softmax_scale"],
        "enable_gqa": q.shape[-2] != k.shape[-2],
    }
    if window != (-1, -1):
        options["window"] = window
    if said.get("softcap"):
        options["softcap"] = said["softcap"]
    if said.get("alibi_slopes") is not None:
        options["alibi_slopes"] = said["alibi_slopes"]
    if packed:
        options |= {name: said[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    levelled = said["causal"] or "window" in options or "alibi_slopes" in options
    if levelled and (packed or q.shape[-3] != k.shape[-3]):
        options["align"] = "bottom_right"
    return options


def _by_heads(tensor: Tensor) -> Tensor:
    """[b, n, h, d], or packed [n, h, d], as [b, h, n, d]."""
    return (tensor if tensor.dim() == 4 else tensor[None]).transpose(1, 2)


def _by_tokens(tensor: Tensor, packed: bool) -> Tensor:
    tokens = tensor.transpose(1, 2)
    return tokens[0] if packed else tokens


HANDLERS = {
    "flash_attn::_flash_attn_forward": _forward,
    "flash_attn::_flash_attn_varlen_forward": _forward,
    "flash_attn::_flash_attn_backward": _backward,
    "flash_attn::_flash_attn_varlen_backward": _backward,
    "flash_attn_3::fwd": _forward,
    "flash_attn_3::bwd": _backward,
}
