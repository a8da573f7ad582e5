"""Run: what the monitors of one trainer share: step, attempt, folder, log, loggers and cost."""

import platform
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from stabilitykit.records import Record
from stabilitykit.report.sinks import Sinks
from stabilitykit.runlog import RunLog, claim_folder, start_attempt

OVERHEAD_EVERY_N_STEPS = 100
IDLE = 1000  # batches without an optimizer step, after which it is said


class Run:
    """What the monitors of one trainer share: step, attempt, folder, sinks and what they cost.

    `step` is the 0-based index of the optimizer step in progress: it grows at the end of each batch in
    which an optimizer stepped, however many optimizers there are and however many batches they shared.
    """

    def __init__(self, monitors: list[Any]):
        self.monitors = monitors
        self.step = 0
        self.attempt = 1
        self.folder: Path | None = None
        self.stepped = False
        self.vetoed = False  # this step's update is not made
        self.new_step = True
        self.listeners: list[Callable[[Any], None]] = []  # to the attention calls of an open tap
        self.costs: dict[str, float] = dict.fromkeys((m.kind for m in monitors), 0.0)
        self.resumed: dict[str, Any] | None = None
        self._started = False
        self._idle = 0  # batches since an optimizer stepped
        self._log: RunLog | None = None
        self._sinks = Sinks([])
        self._unsent: dict[int, dict[str, float]] = {}
        self._batch_started: float | None = None
        self._busy = 0.0

    def start(self, trainer: Any) -> None:
        """Claims the folder, or takes up the one a checkpoint names, on every rank alike."""
        optimizers = max(len(trainer.optimizers), 1)
        self.step = trainer.global_step // optimizers if self.resumed is None else self.resumed["step"]
        base, folder = Path(trainer.log_dir or trainer.default_root_dir), None
        if trainer.global_rank == 0:
            folder, self.attempt = self._take_folder(base, _meta(trainer, self.monitors))
        shared = (str(folder), self.attempt)
        folder, self.attempt = trainer.strategy.broadcast(shared)
        self.folder = Path(folder) if folder != "None" else None
        if trainer.global_rank == 0:
            if self.folder is not None:
                self._log = RunLog(self.folder)
            self._sinks = Sinks(trainer.loggers)
        self._started = True

    def _take_folder(self, base: Path, meta: dict[str, Any]) -> tuple[Path | None, int]:
        # "None": the disk failed before the first record.
        named = None if self.resumed is None else self.resumed["folder"]
        named = None if named in (None, "None") else Path(named)
        try:
            if named is not None and not named.is_dir():
                say(f"the run folder of the checkpoint is gone ({named}); records go on in a new one")
                named = None
            folder = named or claim_folder(base)
            resumed_at = self.step if self.resumed is not None else None
            return folder, start_attempt(folder, meta, resumed_at)
        except OSError as problem:
            say(f"records are not kept on disk, training goes on: {problem}")
            return None, 1

    def state(self) -> dict[str, Any] | None:
        """Where to take up after a resume; None before there is anything to take up."""
        if not self._started:  # as when a learning rate is searched for before the first step
            return self.resumed
        return {"folder": str(self.folder), "step": self.step + int(self.stepped)}

    def begin_batch(self) -> None:
        """Called once per micro-batch, before any monitor."""
        self._batch_started = time.perf_counter()

    def end_batch(self) -> None:
        """Called once per micro-batch, after every monitor; closes the step if an optimizer stepped."""
        if self._batch_started is not None:
            self._busy += time.perf_counter() - self._batch_started
        self.new_step = self.stepped
        self._idle = 0 if self.stepped else self._idle + 1
        if self._idle == IDLE:
            self._say_idle()
        if not self.stepped:
            return
        if (self.step + 1) % OVERHEAD_EVERY_N_STEPS == 0:
            self.write("overhead", self.step, self.overhead())
        self.stepped = self.vetoed = False
        self.step += 1
        self.send(before=self.step - 1)

    def write(
        self, kind: str, step: int, values: dict[str, float], detail: dict[str, Any] | None = None
    ) -> None:
        """A record to the log at once; its values to the loggers, with all others of its step."""
        if self._log is not None:
            try:
                self._log.write(Record(step, self.attempt, kind, values, detail or {}))
            except OSError as problem:
                self._log = None
                say(f"records are no longer kept on disk, training goes on: {problem}")
        self._sinks.show(kind, step, detail or {})
        if values:
            self.send_beside(step, values)

    def send_beside(self, step: int, values: dict[str, float]) -> None:
        """Numbers for the loggers alone, in the dict of their step."""
        self._unsent.setdefault(step, {}).update(values)

    def send(self, before: int | None = None) -> None:
        """One dict per step to every logger, in step order; values read one step late still join theirs."""
        for step in sorted(self._unsent):
            if before is None or step < before:
                self._sinks.log(self._unsent.pop(step), step)

    def overhead(self) -> dict[str, float]:
        """What each monitor took so far, in percent of the training time without monitors."""
        total = sum(self.costs.values())
        plain = max(self._busy - total, 1e-9)
        values = {f"overhead/{kind}_percent": 100 * cost / plain for kind, cost in self.costs.items()}
        return {**values, "overhead/total_percent": 100 * total / plain}

    def _say_idle(self) -> None:
        say(
            f"no optimizer has stepped in the last {self._idle} batches, so nothing of them is recorded; a "
            "step is seen where Lightning takes it: step() of self.optimizers(), not of a raw optimizer"
        )

    def finish(self) -> None:
        """Writes the last overhead record and sends what is left."""
        last = self.step - 1
        if last < 0 and 0 < self._idle < IDLE:
            self._say_idle()
        if last >= 0 and (last + 1) % OVERHEAD_EVERY_N_STEPS:
            self.write("overhead", last, self.overhead())
        self.close()

    def close(self) -> None:
        """Sends what is left, with a table of the events."""
        last = max([*self._unsent, self.step - 1])
        self._unsent.setdefault(last, {})  # a checkpoint may have sent its numbers before
        self._sinks.tabulate(last)
        self.send()


def world() -> int:
    """How many ranks train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if world() > 1 else 0


def say(message: str) -> None:
    """One warning line, on rank 0."""
    if rank() == 0:
        warnings.warn(f"stabilitykit: {message}", stacklevel=3)


def _meta(trainer: Any, monitors: list[Any]) -> dict[str, Any]:
    packages = (
        "stabilitykit",
        "torch",
        "pytorch-lightning",
        "lightning",
        "flash-attn",
        "wandb",
        "numpy",
    )
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "host": platform.node(),
        "devices": {
            "accelerator": type(trainer.accelerator).__name__,
            "name": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
            "world_size": trainer.world_size,
            "threads": torch.get_num_threads(),
        },
        "config": {
            "precision": str(trainer.precision),
            "max_steps": trainer.max_steps,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
            "model": dict(getattr(trainer.lightning_module, "hparams", {})),
            "monitors": {type(m).__name__: _settings(m) for m in monitors},
        },
    }


def _settings(monitor: Any) -> dict[str, Any]:
    plain = (int, float, str, bool, list, tuple, type(None))
    return {k: v for k, v in vars(monitor).items() if not k.startswith("_") and isinstance(v, plain)}
