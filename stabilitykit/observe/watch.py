"""watch: the attention maths in a training loop of your own, plain PyTorch or Fabric; no Trainer."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stabilitykit.observe.attention import NUMBERS, worst
from stabilitykit.observe.bias import DeltaWalk
from stabilitykit.observe.sample import Look
from stabilitykit.observe.step import StepNumbers
from stabilitykit.observe.tap import Tap


class Watched:
    """What `watch` yields: the numbers of the step in progress, or between steps of the last one."""

    def __init__(
        self,
        model: nn.Module,
        every_n_steps: int,
        loss_scale: float | Callable[[], float],
        options: dict[str, Any],
    ):
        self.step = 0  # optimizer steps finished inside the block
        self._model, self._every, self._loss_scale = model, every_n_steps, loss_scale
        self._options = options
        self._walk = DeltaWalk()
        self._tap: Tap | None = None
        self._optimizer: int | None = None
        self._now: StepNumbers | None = None
        self._last: StepNumbers | None = None
        self._warned = False

    @property
    def numbers(self) -> dict[str, float]:
        """The records' values: key -> worst over what was measured; empty if the step was not due."""
        found = worst(list(self.layers.values()))
        return {f"attention/{key}": found[key] for key in NUMBERS if key in found}

    @property
    def layers(self) -> dict[str, dict[str, Any]]:
        """Name -> numbers of each layer, per head under "heads", in the order of the forward pass."""
        found = self._found()
        return {} if found is None else {name: found.layers[name] for name in reversed(found.layers)}

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> why a call, or a module that looks like attention, was not measured."""
        found = self._found()
        return {} if found is None else found.skipped

    def _found(self) -> StepNumbers | None:
        return self._now if self._now is not None and (self._now.layers or self._now.skipped) else self._last

    def _open(self) -> None:
        self._now = None
        if (self.step + 1) % self._every == 0:
            number, scale = (self.step + 1) // self._every - 1, self._loss_scale
            self._now = StepNumbers(
                seed=str(self.step),
                look=lambda name: Look(number),
                **self._options,
                loss_scale=scale() if callable(scale) else scale,
            )
            self._tap = Tap(self._model, self._now)
            self._tap.__enter__()

    def _close(self, exception: BaseException | None = None) -> None:
        tap, self._tap = self._tap, None
        if tap is not None and self._now is not None:
            tap.__exit__(type(exception) if exception else None, exception, None)
            self._now.skipped |= tap.unseen
            self._walk.add(self._now.layers)

    def _forward(self, module: nn.Module, args: Any) -> None:
        # The next micro-batch of a step that was measured on its first one; a checkpoint calls from
        # within the backward.
        if self._now is not None and self._now.layers and torch._C._current_graph_task_id() == -1:
            self._close()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._close()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_ours(optimizer):
            self._finish()
            self.step += 1
            self._open()

    def _finish(self) -> None:
        self._last = self._now
        if self._now is not None and not self._now.layers and not self._warned:
            self._warned = True
            why = "; ".join(f"{name}: {reason}" for name, reason in self._now.skipped.items())
            warnings.warn(
                f"stabilitykit: watch measured nothing: {why or 'saw no attention call in this step'}",
                stacklevel=2,
            )

    def _is_ours(self, optimizer: Optimizer) -> bool:
        # Of several optimizers of one model, the first that steps counts the steps.
        if self._optimizer is None:
            mine = {id(parameter) for parameter in self._model.parameters()}
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                self._optimizer = id(optimizer)
        return self._optimizer == id(optimizer)


@contextmanager
def watch(
    model: nn.Module,
    *,
    every_n_steps: int = 1,
    heads: int | list[int] = 2,
    rows: int = 64,
    sequences: int = 1,
    reference: torch.dtype = torch.float64,
    backward: bool = True,
    modules: str | list[str] | None = None,
    loss_scale: float | Callable[[], float] = 1.0,
) -> Iterator[Watched]:
    """Compares the attention of `model` with exact attention, step by step, inside the block.

    Around a whole training loop, or around each of its steps. A step ends when an optimizer of the
    model's parameters has stepped; its first forward and backward are measured:

        with stabilitykit.watch(model, every_n_steps=100) as watched:
            for batch in batches:
                loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if watched.numbers:
                    print(watched.step, watched.numbers["attention/roundoff_ratio"])

    The run is unchanged, bit for bit; a model compiled by torch.compile runs eagerly on due steps.

    Args:
        model: the model, or what wraps it.
        every_n_steps: due when `(step + 1) % every_n_steps == 0`.
        heads: how many heads of each call, or which; they take turns, as `rows` do.
        rows: how many query rows of each head.
        sequences: how many sequences of the batch.
        reference: the exact attention's format, float64 or float32.
        backward: whether to compare dq, dk and dv as well.
        modules: names of the modules to measure, with * and ?; None: all.
        loss_scale: what the loss is multiplied by before its backward, or a function that says it,
            as `scaler.get_scale`; matters to `delta_bias` only.

    Raises:
        ValueError: an argument out of its range; a pattern of `modules` that matches nothing.
    """
    patterns = [modules] if isinstance(modules, str) else modules
    counts = {"every_n_steps": every_n_steps, "heads": heads, "rows": rows, "sequences": sequences}
    for name, value in counts.items():
        if value == [] or (isinstance(value, int) and value < 1):
            raise ValueError(f"watch: expected {name} >= 1, got {value!r}")
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns or []:
        if not any(fnmatch(name, pattern) for name in names):
            raise ValueError(
                f"watch: expected modules to match a module, {pattern!r} matches none of {', '.join(names)}"
            )
    options = {"heads": heads, "rows": rows, "sequences": sequences, "modules": patterns}
    watched = Watched(model, every_n_steps, loss_scale, {**options, "backward": backward, "dtype": reference})
    hooks = [
        model.register_forward_pre_hook(watched._forward),
        register_optimizer_step_pre_hook(watched._before_step),
        register_optimizer_step_post_hook(watched._after_step),
    ]
    watched._open()
    try:
        yield watched
    except BaseException as problem:
        watched._close(problem)
        raise
    else:
        watched._close()
    finally:
        for hook in hooks:
            hook.remove()
