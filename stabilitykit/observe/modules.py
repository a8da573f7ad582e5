"""Which module of a model is running, and names for what happens in it."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


class Place:
    """The stack of running modules; several things named in one module are `name`, `name#1`, ..."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._seen: Counter[tuple[str, bool]] = Counter()

    @property
    def here(self) -> str:
        """The innermost running module; "" outside any."""
        return self._stack[-1] if self._stack else ""

    @property
    def known(self) -> bool:
        """Whether any module is running: a recomputation may call functions outside of all."""
        return bool(self._stack)

    @property
    def named(self) -> set[str]:
        """The modules in which something was named."""
        return {name for name, _ in self._seen}

    def enter(self, name: str, module: nn.Module) -> None:
        """The forward of `module` begins."""
        self._stack.append(name)

    def leave(self) -> None:
        """The innermost module's forward ends."""
        if self._stack:
            self._stack.pop()

    def clear(self) -> None:
        """No module is running."""
        self._stack.clear()

    def name(self) -> str:
        """A name of its own for what happens now; recomputation in a backward counts anew."""
        at = self.here, in_backward()
        count = self._seen[at]
        self._seen[at] += 1
        return f"{self.here}#{count}" if count else self.here


@contextmanager
def followed(
    model: nn.Module, enter: Callable[[str, nn.Module], None], leave: Callable[[], None]
) -> Iterator[None]:
    """While open, `enter(name, module)` and `leave()` are called around the forward of every submodule."""
    with ExitStack() as hooks:
        for name, child in model.named_modules():
            if _needs_no_name(child):
                continue
            before = child.register_forward_pre_hook(partial(_entered, enter, name))
            after = child.register_forward_hook(partial(_left, leave), always_call=True)
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield


def in_backward() -> bool:
    """Whether autograd is running a backward, as while activation checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1


def _entered(enter: Callable[[str, nn.Module], None], name: str, module: nn.Module, args: Any) -> None:
    enter(name, module)


def _left(leave: Callable[[], None], module: nn.Module, args: Any, result: Any) -> None:
    leave()


def _needs_no_name(module: nn.Module) -> bool:
    # torch's own layers without children (Linear, LayerNorm, ...) call no attention; hooks would slow them.
    return type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is None
