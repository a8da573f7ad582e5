"""The one meaning of due and of a monitor's hooks; every monitor is a `Monitor`."""

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from stabilitykit.callbacks.run import Run, rank
from stabilitykit.callbacks.training import drop_update


def _callback_classes() -> tuple[type, ...]:
    # pytorch_lightning and lightning.pytorch each check for their own Callback class; serve both.
    found = []
    for package in ("pytorch_lightning", "lightning"):
        try:
            version("pytorch-lightning" if package == "pytorch_lightning" else package)
        except PackageNotFoundError:
            continue
        module = package if package == "pytorch_lightning" else "lightning.pytorch"
        found.append(import_module(module).Callback)
    return tuple(found)


_LOG = logging.getLogger(__name__)  # not a warning: a run may end anywhere

AnyCallback: Any = type("AnyCallback", _callback_classes(), {})


_RUNS: "WeakKeyDictionary[Any, Run]" = WeakKeyDictionary()


class Monitor(AnyCallback):
    """Decides when, measures, and writes one record per optimizer step and kind.

    Args:
        every_n_steps: due when `(step + 1) % every_n_steps == 0`, as Lightning's `log_every_n_steps`.

    Raises:
        ValueError: `every_n_steps` below 1; two monitors of one kind in one trainer.
    """

    kind: ClassVar[str]
    run: Run

    def __init__(self, every_n_steps: int = 1):
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"{type(self).__name__}: expected every_n_steps >= 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps

    @property
    def due(self) -> bool:
        """Whether the optimizer step in progress is one to measure."""
        return (self.run.step + 1) % self.every_n_steps == 0

    @property
    def _first(self) -> bool:
        return self.run.monitors[0] is self

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time inside as this monitor's cost."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.run.costs[self.kind] += time.perf_counter() - started

    def write(self, step: int, values: dict[str, float], detail: dict[str, Any] | None = None) -> None:
        """A record of this monitor's kind."""
        self.run.write(self.kind, step, values, detail)

    # What a monitor does; the hooks below decide when.

    def open_step(self, trainer: Any, module: Any) -> None:
        """Before the first micro-batch of an optimizer step."""

    def veto(self, trainer: Any, module: Any, optimizer: Any) -> bool:
        """Whether this update must not be made; asked before any monitor sees the gradients."""
        return False

    def before_optimizer(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Gradients are complete and unscaled, not yet clipped."""

    def close_batch(self, trainer: Any, module: Any, outputs: Any) -> None:
        """After a micro-batch; `self.run.stepped` says whether it ended an optimizer step."""

    def drain(self) -> None:
        """Writes what was held back; called before a checkpoint is saved and at the end."""

    def unmeasured(self) -> str | None:
        """When the run ended, if it left this monitor without a record; None if not."""
        if self.run.step >= self.every_n_steps:
            return None
        return (
            f"after {self.run.step} steps, before the first that is due (every_n_steps = "
            f"{self.every_n_steps}); nothing was recorded"
        )

    def memory(self) -> dict[str, Any]:
        """This monitor's own state: plain values and tensors."""
        return {}

    def recall(self, memory: dict[str, Any]) -> None:
        """The inverse of `memory`."""

    # Lightning's hooks.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """One `Run` per trainer and fit, made by its first monitor."""
        if stage != "fit":
            return
        monitors = [callback for callback in trainer.callbacks if isinstance(callback, Monitor)]
        same = [type(m).__name__ for m in monitors if m.kind == self.kind]
        if len(same) > 1:
            raise ValueError(f"expected one monitor of each kind in trainer.callbacks, got {same}")
        if monitors[0] is self:
            _RUNS[trainer] = Run(monitors)
        if not hasattr(self, "run"):
            self._unlearnt = copy.deepcopy(self.memory())
        self.run = _RUNS[trainer]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The run's folder is claimed when everything of a checkpoint has been restored."""
        if self._first:
            self.run.start(trainer)
        if self.run.resumed is None and self.run.step == 0:
            self.recall(copy.deepcopy(self._unlearnt))  # what an earlier run taught is not of this one

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Opens the step on its first micro-batch."""
        if self._first:
            self.run.begin_batch()
        if self.run.new_step:
            self.open_step(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """An optimizer is about to step: this batch ends an optimizer step."""
        if self._first:
            self.run.stepped = True
            vetoes = [monitor.veto(trainer, pl_module, optimizer) for monitor in self.run.monitors]
            self.run.vetoed = any(vetoes)
        self.before_optimizer(trainer, pl_module, optimizer)
        if self.run.vetoed and self.run.monitors[-1] is self:
            drop_update(trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Closes the micro-batch, and after the last monitor the step."""
        self.close_batch(trainer, pl_module, outputs)
        if self.run.monitors[-1] is self:
            self.run.end_batch()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Nothing stays unsaid."""
        self.drain()
        when = self.unmeasured()
        if when and rank() == 0:
            _LOG.warning(f"{type(self).__name__}: training ended {when}")
        if self.run.monitors[-1] is self:
            self.run.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keeps what is known; runs no collective, for other ranks may be gone."""
        if hasattr(self, "run"):
            if trainer.world_size == 1:
                self.drain()
            if self.run.monitors[-1] is self:
                self.run.close()

    def state_dict(self) -> dict[str, Any]:
        """The run's place and this monitor's memory."""
        if not hasattr(self, "run"):
            return {}
        self.drain()
        if self.run.monitors[-1] is self:
            self.run.send()  # a process that takes up from here does not have these values
        return {"run": self.run.state(), "memory": self.memory()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        if state_dict and hasattr(self, "run"):
            self.run.resumed = state_dict["run"]
            self.recall(state_dict["memory"])
