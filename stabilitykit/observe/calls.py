"""What an open tap knows of attention calls: their names, their gradients, and what it could not see."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from stabilitykit.observe.modules import Place, in_backward

FLEETING = "its tensors are nested, or live only inside torch.func, and nobody can keep them"


@dataclass(slots=True, eq=False)
class AttentionCall:
    """What one attention call got and gave, in the dtype the kernel saw.

    q [b, h, q, d]; k, v [b, h_kv, k, d]; out, grad_out [b, h, q, d]; dq, dk, dv like q, k, v; lse
    [b, h, q] or None (the backend keeps none). The gradients are None where no backward was seen, and
    as the kernel got them: with the factors of a GradScaler and of accumulation. `kwargs` are the five
    of `scaled_dot_product_attention` and, where those cannot say it, further options of
    `exact_attention` by their names there; `observe.exactly.exact_options` turns all into its options.
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


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


class Operand(NamedTuple):
    """A tensor as the model has it, and what makes [b, h, n, d] of it, or of its gradient."""

    tensor: Tensor
    form: Callable[[Tensor], Tensor] = _as_is

    def seen(self) -> Tensor:
        """The tensor as [b, h, n, d], out of the graph."""
        return self.form(self.tensor.detach())


@dataclass(slots=True, eq=False)
class _Pending:
    call: AttentionCall
    recomputed: bool  # by activation checkpointing, in the backward
    key: Tensor | None  # what an explicit backward will present, the forward's lse
    missing: set[str] = field(default_factory=set)
    versions: list[int] = field(default_factory=list)  # of its tensors, when it was recorded

    def tensors(self) -> list[Tensor]:
        call = self.call
        return [t for t in (call.q, call.k, call.v, call.out, *call.kwargs.values()) if isinstance(t, Tensor)]


class Calls:
    """The calls of one opening of a tap; the kernel families record into it.

    Each call is handed to `on_call` as soon as its backward is done, those without one at the end; with
    `forward_only` as soon as it has its output, and nothing of it is kept.
    """

    muted: ClassVar[bool] = False  # while one tap hands over, what that computes is seen by none

    def __init__(
        self,
        on_call: Callable[[AttentionCall], None] | None,
        replace: Callable[..., Tensor] | None,
        forward_only: bool = False,
    ):
        self.replace = replace
        self._forward_only = forward_only
        self.heads: int | None = None  # of the multi_head_attention_forward that is running
        self._on_call = on_call
        self._place = Place()
        self._entered: dict[str, str] = {}
        self._reported: dict[str, str] = {}
        self._pending: list[_Pending] = []
        self._done: set[str] = set()

    # Where the model is.

    def enter(self, name: str, module: nn.Module) -> None:
        """The forward of module `name` begins; one whose class says Attention owes a record."""
        self._place.enter(name, module)
        kind = type(module).__name__
        if any(word in kind.lower() for word in ("attention", "attn", "mha")):
            self._entered[name] = kind

    def leave(self) -> None:
        """The innermost module's forward ends."""
        self._place.leave()

    def suspect(self) -> None:
        """The running module, whatever its name, takes a softmax of a product: it owes a record."""
        if not self._again:
            self._entered.setdefault(self._place.here, "a softmax of a product")

    def report(self, reason: str) -> None:
        """Attention of the running module is not watched, for `reason`."""
        if not self._again:
            self._reported.setdefault(self._place.here, reason)

    @property
    def _again(self) -> bool:
        """Whether activation checkpointing computes again, outside any module, what has been seen in one."""
        return in_backward() and not self._place.known

    @property
    def unseen(self) -> dict[str, str]:
        """Reason by module name: attention that was met and not watched, modules that left no record."""
        told = self._place.named | self._reported.keys()
        silent = {
            name: f"{kind} ran and left no record; what it calls is no attention known here"
            for name, kind in self._entered.items()
            if not any(_within(one, name) or _within(name, one) for one in told)
        }
        return self._reported | silent

    # What a kernel family does with a call.

    def alias(self, tensor: Tensor) -> Tensor:
        """A view whose gradient is that of the one call it goes into; without one where none will flow."""
        if not tensor.requires_grad:
            return tensor
        return tensor.view_as(tensor) if torch.is_grad_enabled() else tensor.detach()

    def record(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        out: Operand,
        kwargs: dict[str, Any],
        backend: str,
        *,
        lse: Tensor | None = None,
        key: Tensor | None = None,
    ) -> AttentionCall | None:
        """A call whose gradients come by hooks on its aliases or, given `key`, by `gradients`."""
        name = self._place.name()
        if self._on_call is None:
            return None
        told = {k: v.detach() if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        call = AttentionCall(name, q.seen(), k.seen(), v.seen(), out.seen(), told, backend, lse)
        if self._forward_only:
            if not in_backward():  # else activation checkpointing, which runs it once more
                self._hand_over(call)
            return call
        pending = _Pending(call, in_backward(), key)
        pending.versions = [version(tensor) for tensor in pending.tensors()]
        if pending.recomputed:
            self._recognise(call)
        self._pending.append(pending)
        if key is None and out.tensor.requires_grad:
            inputs = {"dq": q, "dk": k, "dv": v}
            watched = {slot: operand for slot, operand in inputs.items() if operand.tensor.requires_grad}
            for slot, operand in {"grad_out": out, **watched}.items():
                pending.missing.add(slot)
                operand.tensor.register_hook(partial(self._arrived, pending, slot, operand.form))
        return call

    def take_back(self, call: AttentionCall | None, reason: str) -> None:
        """Forgets a recorded call that was not handed over yet, and says why."""
        for pending in self._pending:
            if pending.call is call:
                self._reported.setdefault(pending.call.name.split("#")[0], reason)
        self._pending = [pending for pending in self._pending if pending.call is not call]

    def gradients(self, key: Tensor, **grads: Tensor) -> None:
        """All gradients of the call that was recorded with `key`."""
        for pending in self._pending:
            if pending.key is not None and _same(pending.key, key):
                for slot, grad in grads.items():
                    setattr(pending.call, slot, grad.detach())
                self._complete(pending)
                return

    def close(self, *, hand_over: bool) -> None:
        """Hands over what has no backward, or drops it."""
        if hand_over:
            # Activation checkpointing runs a call twice; the one with a backward has told everything.
            for pending in self._pending:
                if pending.call.name not in self._done and not pending.recomputed:
                    self._done.add(pending.call.name)
                    self._hand_over_intact(pending)
        self._pending.clear()
        self._place.clear()

    def _recognise(self, call: AttentionCall) -> None:
        # Recomputation meets the calls of a module in another order, or outside any module; the first
        # pass, if it had no graph of its own, got the very same input and has the right name.
        for pending in self._pending:
            here = not self._place.known or self._place.here == pending.call.name.split("#")[0]
            first = here and not pending.missing and not pending.recomputed
            if first and _same(pending.call.q, call.q):
                call.name = pending.call.name
                self._pending.remove(pending)
                return

    def _arrived(self, pending: _Pending, slot: str, form: Callable[[Tensor], Tensor], grad: Tensor) -> None:
        if pending not in self._pending or slot not in pending.missing:
            return  # closed meanwhile, or a second backward through a kept graph
        setattr(pending.call, slot, form(grad.detach()))
        pending.missing.discard(slot)
        if not pending.missing:
            self._complete(pending)

    def _complete(self, pending: _Pending) -> None:
        name = pending.call.name
        self._pending = [other for other in self._pending if other.call.name != name]
        self._done.add(name)
        self._hand_over_intact(pending)

    def _hand_over_intact(self, pending: _Pending) -> None:
        name = pending.call.name.split("#")[0]
        if [version(tensor) for tensor in pending.tensors()] == pending.versions:
            self._hand_over(pending.call)
        else:
            reason = "its tensors were written to, in place, before its backward was done"
            self._reported.setdefault(name, reason)

    def _hand_over(self, call: AttentionCall) -> None:
        assert self._on_call is not None
        Calls.muted = True
        try:
            with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
                self._on_call(call)
        finally:
            Calls.muted = False


def is_fleeting(tensor: Tensor) -> bool:
    """Whether the tensor cannot be kept as [b, h, n, d]: nested, or wrapped by vmap, grad and the like."""
    return tensor.is_nested or is_functorch_wrapped_tensor(tensor)


def version(tensor: Tensor) -> int:
    """How often the tensor, or what it is a view of, was written to; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


def as_autocast(tensor: Tensor) -> Tensor:
    """What autocast makes of a tensor inside a kernel; done outside, it is what we hold."""
    device = tensor.device.type
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    if eligible and torch.is_autocast_enabled(device):
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or (one.shape == other.shape and torch.equal(one, other))


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
