"""Tap: sees, or replaces, every attention call of a live model, forward and backward, without editing it."""

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_SDPA = (
    F.scaled_dot_product_attention,
    _ATEN.scaled_dot_product_attention,
    _ATEN.scaled_dot_product_attention.default,
)
_FUSED = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
}


@dataclass(slots=True, eq=False)
class AttentionCall:
    """What one attention call got and gave, in the dtype the kernel saw.

    q [b, h, q, d]; k, v [b, h_kv, k, d]; out, grad_out [b, h, q, d]; dq, dk, dv like q, k, v; lse
    [b, h, q] or None (the backend keeps none). The gradients are None where no backward was seen.
    Several calls of one module in one pass are named `name`, `name#1`, ...
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    kwargs: dict[str, Any]
    backend: str
    lse: Tensor | None = None
    grad_out: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Pending:
    call: AttentionCall
    recomputed: bool  # by activation checkpointing, in the backward
    missing: set[str] = field(default_factory=set)


class Tap(TorchFunctionMode):
    """While open, hands every attention call of `module` to `on_call`, each as soon as its backward is done.

    Calls without a backward (no_grad, or closed before it) are handed over when the tap closes. The
    run is unchanged, bit for bit: only aliases and hooks are added, no random number is drawn.

    Args:
        module: the model whose submodules give the calls their names.
        on_call: receives an `AttentionCall`; gradients and autocast are off while it runs.
        replace: used in place of the kernel, `replace(q, k, v, **kwargs) -> out`, kwargs as of
            `torch.nn.functional.scaled_dot_product_attention`.
    """

    def __init__(
        self,
        module: nn.Module,
        on_call: Callable[[AttentionCall], None] | None = None,
        replace: Callable[..., Tensor] | None = None,
    ):
        super().__init__()
        self._module = module
        self._on_call = on_call
        self._replace = replace
        self._stack: list[str] = []
        self._seen: Counter[tuple[str, bool]] = Counter()
        self._pending: list[_Pending] = []
        self._done: set[str] = set()
        self._busy = False
        self._open = 0

    def __enter__(self) -> "Tap":
        super().__enter__()
        self._open += 1
        if self._open == 1:
            self._resources = ExitStack()
            for name, child in self._module.named_modules():
                pre = child.register_forward_pre_hook(partial(self._enter_module, name))
                post = child.register_forward_hook(self._leave_module, always_call=True)
                self._resources.callback(pre.remove)
                self._resources.callback(post.remove)
            if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
                self._resources.enter_context(torch.compiler.set_stance("force_eager"))
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._open -= 1
        if self._open == 0:
            self._resources.close()
            if exception[0] is None:
                self._hand_over_rest()
            self._pending.clear()
            self._stack.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Routes attention to `_attend`; enters again what would otherwise run unseen."""
        kwargs = kwargs or {}
        if self._busy:
            return func(*args, **kwargs)
        if func in _SDPA:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._inside(F, func, args, kwargs)
        if func is Tensor.backward:
            kwargs = {"grad_tensors" if key == "gradient" else key: kwargs[key] for key in kwargs}
            return self._inside(torch.autograd, torch.autograd.backward, args, kwargs)
        if func in (torch.autograd.backward, torch.autograd.grad):
            return self._inside(torch.autograd, func, args, kwargs)
        return func(*args, **kwargs)

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

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q, k, v = (_as_autocast(tensor) for tensor in (query, key, value))
        kwargs: dict[str, Any] = {
            "attn_mask": None if attn_mask is None else _as_autocast(attn_mask),
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        aliases, order = {"q": q, "k": k, "v": v}, _alias_order(q, k, v, kwargs)
        watched = [name for name in order if torch.is_grad_enabled() and aliases[name].requires_grad]
        for name in watched:
            aliases[name] = aliases[name].view_as(aliases[name])
        kernel = _Kernel()
        attention = self._replace or F.scaled_dot_product_attention
        with kernel:
            out = attention(aliases["q"], aliases["k"], aliases["v"], **kwargs)
        if self._on_call is not None:
            call = AttentionCall(
                self._name(),
                q.detach(),
                k.detach(),
                v.detach(),
                out.detach(),
                kwargs,
                "replaced" if self._replace else kernel.backend,
                None if kernel.lse is None else kernel.lse[..., : q.shape[-2]],
            )
            self._await_backward(call, out, {f"d{name}": aliases[name] for name in watched})
        return out

    def _await_backward(self, call: AttentionCall, out: Tensor, inputs: dict[str, Tensor]) -> None:
        pending = _Pending(call, recomputed=_in_backward())
        if pending.recomputed and not self._stack:
            self._recognise(call)
        self._pending.append(pending)
        if inputs and out.requires_grad:
            for slot, tensor in {"grad_out": out, **inputs}.items():
                pending.missing.add(slot)
                tensor.register_hook(partial(self._arrived, pending, slot))

    def _recognise(self, call: AttentionCall) -> None:
        # A checkpoint inside a module's forward is recomputed without calling the module, so the stack
        # does not name it; its first pass, which had no graph, got the very same input.
        for pending in self._pending:
            if not pending.missing and not pending.recomputed and torch.equal(pending.call.q, call.q):
                call.name = pending.call.name
                self._pending.remove(pending)
                return

    def _arrived(self, pending: _Pending, slot: str, grad: Tensor) -> None:
        if pending not in self._pending or slot not in pending.missing:
            return  # closed meanwhile, or a second backward through a kept graph
        setattr(pending.call, slot, grad.detach())
        pending.missing.discard(slot)
        if not pending.missing:
            self._pending.remove(pending)
            self._done.add(pending.call.name)
            self._hand_over(pending.call)

    def _hand_over(self, call: AttentionCall) -> None:
        assert self._on_call is not None
        self._busy = True
        try:
            with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
                self._on_call(call)
        finally:
            self._busy = False

    def _hand_over_rest(self) -> None:
        # Activation checkpointing runs a call twice; the one with a backward has told everything.
        for pending in self._pending:
            name = pending.call.name
            if name not in self._done and not pending.recomputed:
                self._done.add(name)
                self._hand_over(pending.call)

    def _name(self) -> str:
        name = self._stack[-1] if self._stack else ""
        count = self._seen[name, _in_backward()]
        self._seen[name, _in_backward()] += 1
        return f"{name}#{count}" if count else name

    def _enter_module(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append(name)

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._stack:
            self._stack.pop()


class _Kernel(TorchDispatchMode):
    """Tells which backend a single attention call reached, and its lse; math where no fused one did."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = "math"
        self.lse: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        backend = _FUSED.get(func.overloadpacket.__name__)
        if backend:
            self.backend, self.lse = backend, result[1].detach()
        return result


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _as_autocast(tensor: Tensor) -> Tensor:
    # SDPA casts on its inside; done here, the tensors we hold are those the kernel got.
    device = tensor.device.type
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    if eligible and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _alias_order(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> str:
    # A tensor used twice gets its gradients added in the order its aliases are made: keep the kernel's.
    if q is k or k is v or q is v:
        fused_choice: Any = getattr(torch, "_fused_sdp_choice")  # noqa: B009  private: types do not know it
        choice = fused_choice(q, k, v, **kwargs)
        return "qkv" if choice == 0 else "vkq"
    return "vkq"
