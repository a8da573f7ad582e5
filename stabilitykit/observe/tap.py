"""Tap: sees, or replaces, every attention call of a live model, forward and backward, without editing it."""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stabilitykit.observe import eager, flash, flex, sdpa
from stabilitykit.observe.calls import AttentionCall, Calls
from stabilitykit.observe.chain import strayed
from stabilitykit.observe.modules import followed

__all__ = ["ACROSS_RANKS", "AttentionCall", "Tap"]

ACROSS_RANKS = "attention across ranks, of which no rank has all"

_Handler = Callable[[Calls, Any, Any, Any], Any]
_HANDLERS: dict[Any, _Handler] = {**sdpa.HANDLERS, **eager.HANDLERS}
# By name: their libraries may be imported later.
_OPS: dict[str, _Handler] = {
    **flash.HANDLERS,
    **flex.HANDLERS,
    "ring_attention": lambda calls, func, args, kwargs: _foreign(calls, func, args, kwargs),
}
_COMPILING = {"torch._dynamo", "torch.nn.attention.flex_attention"}
_BACKWARD = (torch.autograd.backward, torch.autograd.grad)


class Tap(TorchFunctionMode):
    """While open, hands every attention call of `module` to `on_call`, each as soon as its backward is done.

    Calls without a backward (no_grad, or closed before it) are handed over when the tap closes. The
    run is unchanged, bit for bit: only aliases and hooks are added, no random number is drawn. Each
    opening starts anew: it names the modules as they are then, and forgets what was seen before.

    Args:
        module: the model whose submodules give the calls their names.
        on_call: receives an `AttentionCall`; gradients and autocast are off while it runs.
        replace: used in place of the kernel, `replace(q, k, v, **kwargs) -> out`, shapes and kwargs as
            in `AttentionCall`.
        forward_only: hand a call over as soon as it has its output, without gradients. Else q, k, v and
            out of every call live until its backward, also where activation checkpointing would free them.
    """

    def __init__(
        self,
        module: nn.Module,
        on_call: Callable[[AttentionCall], None] | None = None,
        replace: Callable[..., Tensor] | None = None,
        *,
        forward_only: bool = False,
    ):
        super().__init__()
        self._module = module
        self._on_call = on_call
        self._replace = replace
        self._forward_only = forward_only
        self._calls = Calls(on_call, replace, forward_only)
        self._open = 0

    @property
    def unseen(self) -> dict[str, str]:
        """By module name, why attention was met and not watched; of this opening or the last."""
        return self._calls.unseen

    def __enter__(self) -> "Tap":
        super().__enter__()
        self._open += 1
        if self._open == 1:
            self._calls = Calls(self._on_call, self._replace, self._forward_only)
            self._resources = ExitStack()
            self._resources.enter_context(followed(self._module, self._calls.enter, self._calls.leave))
            if sys.modules.keys() & _COMPILING:  # else nothing is compiled, and the import takes seconds
                self._resources.enter_context(torch.compiler.set_stance("force_eager"))
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._open -= 1
        if self._open == 0:
            self._resources.close()
            self._calls.close(hand_over=exception[0] is None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Routes attention to its kernel family; enters again what would otherwise run unseen."""
        kwargs = kwargs or {}
        if Calls.muted:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            self._calls.heads = args[4] if len(args) > 4 else kwargs["num_heads"]
            try:
                return self._inside(F, func, args, kwargs)
            finally:
                self._calls.heads = None
        handler = _handler(func)
        if handler is not None:
            return handler(self._calls, func, args, kwargs)
        if func is Tensor.backward:
            kwargs = {"grad_tensors" if key == "gradient" else key: kwargs[key] for key in kwargs}
            return self._inside(torch.autograd, torch.autograd.backward, args, kwargs)
        if func in _BACKWARD:
            return self._inside(torch.autograd, func, args, kwargs)
        result = func(*args, **kwargs)
        strayed(self._calls, func, args, kwargs, result)
        return result

    def _inside(self, namespace: Any, func: Any, args: Any, kwargs: Any) -> Any:
        # These functions take the mode off the stack, then do their work in Python: put it back, and
        # keep them from seeing it, or they would come here for ever.
        before = namespace.has_torch_function
        namespace.has_torch_function = lambda *_: False
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            namespace.has_torch_function = before


@cache
def _handler(func: Any) -> _Handler | None:
    name = _name(func)
    strange = "attn" in name.lower() or "attention" in name.lower()
    if name.startswith("aten::_scaled_dot_product") and name.endswith("_backward"):
        strange = False  # of a call whose forward was seen, by way of a dispatch mode of the user's
    return _HANDLERS.get(func) or _OPS.get(name) or (_stranger if strange else None)


def _foreign(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    calls.report(ACROSS_RANKS)  # the kernels inside run unseen: each has a tile of the whole
    return func(*args, **kwargs)


def _stranger(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    calls.report(f"{_name(func)} is an attention that is not known here")
    return func(*args, **kwargs)


def _name(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name
    return getattr(func, "__name__", "")
