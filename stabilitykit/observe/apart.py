"""Keeps a twin's pass apart from the run: its random streams, its autocast, the taps that watch it."""

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from stabilitykit.observe.tap import Tap

_apart = False  # of all threads: on a GPU a checkpoint is computed again in the backward's own


def is_apart() -> bool:
    """Whether what runs now is a pass beside the run, under `unseen`: hooks on modules must not take it."""
    return _apart


@contextmanager
def streams_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Random numbers drawn inside (torch on CPU and `devices`, python, numpy) were never drawn after it."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices:
            if device.type not in ("cpu", "meta"):
                stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        yield


def seed_streams(seed: int) -> None:
    """All the streams of `streams_kept` start from `seed`."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def copied(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """A copy of the containers that a pass could change, with `leaf` of what they hold."""
    if isinstance(value, dict):
        own = copy.copy(value)
        own.update({key: copied(item, leaf) for key, item in value.items()})
        return own
    if isinstance(value, list | deque):
        own = copy.copy(value)
        for index, item in enumerate(value):
            own[index] = copied(item, leaf)
        return own
    if type(value) is tuple:
        return tuple(copied(item, leaf) for item in value)
    if isinstance(value, set):
        return copy.copy(value)
    return leaf(value)


def mute(module: Any) -> None:
    """A LightningModule logs nothing till its attributes are put back: these numbers are not the run's."""
    if hasattr(module, "log") and hasattr(module, "log_dict"):
        vars(module).update(log=_muted, log_dict=_muted)


def _muted(*args: Any, **kwargs: Any) -> None:
    pass


@contextmanager
def autocast(devices: Iterable[torch.device], dtype: torch.dtype | Literal[False]) -> Iterator[None]:
    """Autocast to `dtype`, or none at all, whatever is on outside."""
    with ExitStack() as stack:
        for kind in sorted({device.type for device in devices}):
            on: dict[str, Any] = {"dtype": dtype} if dtype else {}
            stack.enter_context(torch.autocast(kind, enabled=bool(dtype), cache_enabled=False, **on))
        yield


@contextmanager
def precision(
    devices: Iterable[torch.device],
    autocast_to: torch.dtype | Literal[False] | None,
    default: torch.dtype | None,
) -> Iterator[None]:
    """Autocast as `autocast` has it, new tensors in format `default`; None leaves it as it is outside."""
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        if autocast_to is not None:
            stack.enter_context(autocast(devices, autocast_to))
        if default is not None:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(default)
        yield


def as_written(wanted: bool) -> AbstractContextManager[Any]:
    """Where `wanted`, what is compiled runs as it is written."""
    if wanted and "torch._dynamo" in sys.modules:  # else nothing is compiled, and the import takes seconds
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def sharded(module: nn.Module) -> list[str]:
    """Names of the parameters that are spread over ranks: to swap one would leave the run's in use."""
    return [name for name, p in module.named_parameters() if isinstance(p, DTensor)]


def refuse_incomplete(module: nn.Module, who: str) -> None:
    """ValueError where parameters are spread over ranks, or have no shape yet."""
    if spread := sharded(module):
        raise ValueError(
            f"{who}: expected whole parameters on every rank, got {spread[0]!r} sharded; save checkpoints of "
            "two runs and compare them with `stabilitykit compare A B`"
        )
    if lazy := [name for name, p in module.named_parameters() if is_lazy(p)]:
        raise ValueError(
            f"{who}: expected parameters that have a shape, got {lazy[0]!r}, lazy; run a batch through the "
            "module before training"
        )


@contextmanager
def unseen() -> Iterator[None]:
    """No `Tap` that is open outside sees what runs inside, and `is_apart` is true there.

    Other modes are part of the computation (torch.device is one) and stay.
    """
    modes = _get_current_function_mode_stack()
    others = [mode for mode in modes if not isinstance(mode, Tap)]
    _restack(modes, others)
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before
        _restack(others, modes)


def _restack(now: Sequence[Any], then: Sequence[Any]) -> None:
    for _ in now:
        _pop_mode()
    for mode in then:
        _push_mode(mode)
