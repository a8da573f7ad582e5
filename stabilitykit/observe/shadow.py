"""The shadow step: a compiled model's attention, watched in an eager pass beside the run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stabilitykit.observe.apart import copied, mute, streams_kept, unseen
from stabilitykit.observe.calls import AttentionCall
from stabilitykit.observe.tap import Tap


def shadow(
    module: nn.Module, loss: Callable[[], Tensor], on_call: Callable[[AttentionCall], None]
) -> dict[str, str]:
    """Hands the attention calls of `loss()` and its backward to `on_call`; `Tap.unseen` comes back.

    The pass is eager, whatever is compiled, and leaves nothing behind: not in gradients (their hooks do
    not fire), buffers, plain attributes, the random streams, the autocast cache or compiled code. It
    sees the eager kernels on the run's weights. `loss` should not go through a DDP wrapper, which counts
    its forwards.

    Raises:
        RuntimeError: torch's, for checkpointing with `use_reentrant=True`, which knows no `autograd.grad`.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    devices = {p.device for p in module.parameters()}
    tap = Tap(module, on_call)
    with streams_kept(devices), unseen(), _kept(module), _uncached(), torch.enable_grad(), tap:
        value = loss()
        if params and value.requires_grad:
            torch.autograd.grad(value, params, allow_unused=True)
    return tap.unseen


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has its hand in the module, a child of it or one of their methods."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:  # nothing can be compiled, and importing it takes seconds
        return False
    return any(
        isinstance(child, dynamo.OptimizedModule)
        or child._compiled_call_impl is not None
        or any(hasattr(held, "_torchdynamo_orig_callable") for held in (child.forward, *vars(child).values()))
        for child in module.modules()
    )


@contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """What a pass writes into the module, buffers or plain attributes, it writes into copies."""
    with ExitStack() as undo:
        for child in module.modules():
            held = vars(child)
            undo.callback(_put_back, held, dict(held))
            undo.callback(_put_back, child._buffers, dict(child._buffers))
            for own, names in ((child._buffers, child._buffers.keys()), (held, held.keys() - _INTERNAL)):
                own.update({name: copied(own[name], _cloned) for name in names})
        mute(module)
        for p in module.parameters():
            if p._backward_hooks:
                undo.callback(_put_back, p._backward_hooks, dict(p._backward_hooks))
                p._backward_hooks.clear()
        yield


_INTERNAL = frozenset(vars(nn.Module()))


def _cloned(value: Any) -> Any:
    tensor = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    return value.detach().clone() if tensor else value


def _put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    now.clear()
    now.update(before)


@contextmanager
def _uncached() -> Iterator[None]:
    # A cast of a weight that the pass would leave in autocast's cache has a graph that is spent.
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
