"""WeightMonitor: how far twins of the run drift from its weights, in units of the run's own noise."""

import inspect
import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from stabilitykit.callbacks.lockstep import Lockstep, refuse_sharded, twin_bytes
from stabilitykit.callbacks.monitor import Monitor
from stabilitykit.callbacks.run import say, world
from stabilitykit.numerics.distance import Reference, distances, nonfinite, ratio
from stabilitykit.observe.arm import Arm
from stabilitykit.observe.shadow import is_compiled
from stabilitykit.observe.twin import Twin
from stabilitykit.observe.update import refuse_lacking

NO_EFFECT = "this arm had no effect"
_EAGER = "eager twin"
_LOG = logging.getLogger(__name__)


class WeightMonitor(Monitor):
    """Trains twins of the run for some steps and records how far their weights are from the run's.

    One twin per arm, and `floor_seeds` more that differ by a jitter of one ulp: the distance that
    nothing but rounding makes in as many steps. All start from the live weights and optimizer state
    of a due step, run `window` optimizer steps beside the main run, and are measured and dropped. The
    run is unchanged, bit for bit; outside of windows nothing is in place. Each twin costs a training
    step of its precision per step of a window, and a checkpoint saved inside one holds the twins.

    Args:
        every_n_steps: a window opens on steps where `(step + 1) % every_n_steps == 0`.
        window: how many steps twins run; None: one set from the start to the end of training, measured
            every `every_n_steps`.
        arms: in what the twins differ; see `Arm.parse`. Where the model is compiled, an arm that replaces
            attention runs eager, so it is measured against one more twin, which is eager and no more.
        floor_seeds: how many jittered twins give the floor.
        max_gib: refuse to train when the twins need more memory than this.

    Raises:
        ValueError: an argument out of its range; an arm that does not parse; before training: more
            memory needed than `max_gib`, a window longer than the run, sharded parameters.
    """

    kind = "weights"

    def __init__(
        self,
        every_n_steps: int = 1000,
        window: int | None = 10,
        arms: Sequence[str] = ("float32",),
        floor_seeds: int = 3,
        max_gib: float | None = None,
    ):
        super().__init__(every_n_steps)
        if window is not None and not 1 <= window <= every_n_steps:
            expected = f"window from 1 to every_n_steps = {every_n_steps}"
            raise ValueError(f"WeightMonitor: expected {expected}, got {window}")
        if floor_seeds < 0:
            raise ValueError(f"WeightMonitor: expected floor_seeds >= 0, got {floor_seeds}")
        if max_gib is not None and max_gib <= 0:
            raise ValueError(f"WeightMonitor: expected max_gib > 0, got {max_gib}")
        if isinstance(arms, str) or not arms:
            raise ValueError(f"WeightMonitor: expected a list of at least one arm, got {arms!r}")
        self.window = window
        self.arms = list(arms)
        self.floor_seeds = floor_seeds
        self.max_gib = max_gib
        self._arms = {f"arm {text}": Arm.parse(text) for text in self.arms}
        if len({arm.key for arm in self._arms.values()}) < len(self.arms):
            raise ValueError(f"WeightMonitor: expected arms that differ, got {self.arms}")
        self._floor = {f"floor {seed}": Arm.parse("jitter") for seed in range(floor_seeds)}
        self._lockstep: Lockstep | None = None
        self._told: set[str] = set()
        self._forked_at = 0
        self._measured: int | None = None
        self._restored: dict[str, Any] | None = None

    # Before training.

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """What cannot work is refused before the first step."""
        self._drop()
        refuse_sharded(trainer, pl_module)
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise ValueError("WeightMonitor: expected training_step to take a batch, got a dataloader_iter")
        if self.window is not None and 0 <= trainer.max_steps < self.window:
            expected = f"window <= max_steps = {trainer.max_steps}"
            raise ValueError(f"WeightMonitor: expected {expected}, got {self.window}")
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        for arm in self._arms.values():
            refuse_lacking(arm, trainer.optimizers, scaled=scaled)
        if self.max_gib is not None:
            arms = self._all(pl_module).values()
            needed = sum(twin_bytes(pl_module, trainer.optimizers, arm) for arm in arms) / 2**30
            if needed > self.max_gib:
                count = sum(p.numel() for p in pl_module.parameters())
                raise ValueError(
                    f"WeightMonitor: needs {needed:.3g} GiB for {len(arms)} twins of {count} parameters, "
                    f"allowed {self.max_gib:g}"
                )

    # The steps.

    def open_step(self, trainer: Any, module: Any) -> None:
        """Forks the twins on a due step, or takes up those of a checkpoint."""
        self._drop_outdated()
        if self._lockstep is None:
            restored = self._take_restored(module)
            if restored or self.window is None or self.due:
                with self._settled(module):
                    self._fork(trainer, module, restored)

    def _drop_outdated(self) -> None:
        if self._lockstep is not None and (change := self._lockstep.outdated()):
            at = f"step {self.run.step}; its twins, forked at step {self._forked_at}"
            say(f"WeightMonitor: the run has {change} at {at}, cannot follow: dropped. Training goes on")
            self._drop()

    def _all(self, module: Any) -> dict[str, Arm]:
        replacing = any(arm.attention for arm in self._arms.values())
        eager = replacing and is_compiled(module)
        return {**self._arms, **self._floor, **({_EAGER: Arm.parse("eager")} if eager else {})}

    def _fork(self, trainer: Any, module: Any, restored: dict[str, Any] | None) -> None:
        self._measured = None
        self._forked_at = restored["forked_at"] if restored else self.run.step
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        twins = {}
        for name, arm in self._all(module).items():
            seed = zlib.crc32(f"{name}/{self._forked_at}".encode())
            twins[name] = Twin(module, trainer.optimizers, arm, scaler=scaler, seed=seed, at=self.run.step)
            if restored:
                twins[name].load_state_dict(restored["twins"][name])
        self._lockstep = Lockstep(trainer, module, twins, lambda: self.run.step)
        self._lockstep.open(partial(self._settled, module))

    def _take_restored(self, module: Any) -> dict[str, Any] | None:
        restored, self._restored = self._restored, None
        if restored is None or set(restored["twins"]) == set(self._all(module)):
            return restored
        say(
            f"WeightMonitor: the checkpoint's twins ({', '.join(restored['twins'])}) are not those asked "
            f"for; they are dropped at step {self.run.step}"
        )
        return None

    @contextmanager
    def _settled(self, module: Any) -> Iterator[None]:
        # Kernels run late: what was queued before is not our cost, and what we queue is.
        settle = torch.cuda.synchronize if module.device.type == "cuda" else int
        settle()
        with self.timed():
            yield
            settle()

    def before_optimizer(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """The twins' optimizers step a moment before the main one (manual ones have stepped already)."""
        if self._lockstep is not None and module.automatic_optimization:
            with self._settled(module):
                self._lockstep.step(vetoed=self.run.vetoed)

    def close_batch(self, trainer: Any, module: Any, outputs: Any) -> None:
        """Measures at the end of a window, or on due steps of twins that go on."""
        self.drain()

    def drain(self) -> None:
        """Writes the record of a step that is complete."""
        if self._lockstep is None or not self.run.stepped or self._measured == self.run.step:
            return
        ended = self.window is not None and self.run.step >= self._forked_at + self.window - 1
        self._drop_outdated()
        if self._lockstep is not None and (ended or (self.window is None and self.due)):
            self._measured = self.run.step
            with self.timed():
                self._write_step(self._lockstep.twins)
        if ended:
            self._drop()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The twins go; a resume finishes a window that was cut off."""
        super().on_train_end(trainer, pl_module)
        self._drop()

    def unmeasured(self) -> str | None:
        """As every monitor's; or a window that was cut off."""
        if self._lockstep is None or self.window is None:
            return super().unmeasured()
        return (
            f"after {self.run.step - self._forked_at} of the window of {self.window} steps that opened at "
            f"step {self._forked_at}; it is recorded only if training is resumed"
        )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Whatever failed, the module has its own training_step; the twins stay for a last checkpoint."""
        super().on_exception(trainer, pl_module, exception)
        if self._lockstep is not None:
            self._lockstep.close()

    def _drop(self) -> None:
        if self._lockstep is not None:
            self._lockstep.close()
        self._lockstep = None

    # The record.

    def _write_step(self, twins: Mapping[str, Twin]) -> None:
        if world() > 1 and dist.get_rank() > 0:
            return  # twins are equal on all ranks, as the run is
        main = next(iter(twins.values())).pairs()[0]
        others = {name: twin.pairs()[1] for name, twin in twins.items()}
        arms = {arm: others[name] for name, arm in self._arms.items()}
        floor = [others[name] for name in self._floor]
        values, detail = compared(main, arms, floor, eager=others.get(_EAGER))
        detail |= {"forked_at": self._forked_at, "window": self.window}
        unreplaced = {arm.text: twins[name].unreplaced for name, arm in self._arms.items()}
        if any(unreplaced.values()):
            detail["unreplaced"] = {text: told for text, told in unreplaced.items() if told}
        self.write(self.run.step, values, detail)
        self._tell(detail)

    def _tell(self, detail: dict[str, Any]) -> None:
        """What a user may take for a measurement and is none, once per arm."""
        said = dict.fromkeys(detail.get("no_effect", ()), NO_EFFECT)
        for arm, modules in detail.get("unreplaced", {}).items():
            name, why = next(iter(modules.items()))
            said[arm] = f"attention is not replaced in {len(modules)} modules, the first {name!r}: {why}"
        for arm in said.keys() - self._told:
            _LOG.warning(f"WeightMonitor: arm {arm!r}, step {self.run.step}: {said[arm]}")
        self._told |= said.keys()

    def memory(self) -> dict[str, Any]:
        """The twins of an open window, tensors and all."""
        if self._lockstep is None:
            return self._restored or {}
        twins = {name: twin.state_dict() for name, twin in self._lockstep.twins.items()}
        return {"forked_at": self._forked_at, "twins": twins}

    def recall(self, memory: dict[str, Any]) -> None:
        """The inverse of `memory`; the twins are made at the next step, where the run's tensors are."""
        self._restored = memory or None


def compared(
    main: Mapping[str, Tensor],
    arms: Mapping[Arm, Mapping[str, Tensor]],
    floor: Sequence[Mapping[str, Tensor]],
    *,
    eager: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Values and detail of a record: each arm's tensors against the run's, beside the jittered ones'.

    Arms that replace attention are held against the `eager` twin, where there is one.
    """
    reference = Reference(main)
    written = reference if eager is None else Reference(eager)
    jittered = [reference.distance(tensors) for tensors in floor]
    floors = {key: [row[key] for row in jittered] for key in ("w1", "rel_l2")}
    values: dict[str, float] = {}
    tensors, words, bad = {}, {}, {"main": nonfinite(main.values())}
    for arm, other in arms.items():
        start = main if eager is None or arm.attention is None else eager
        row = (reference if start is main else written).distance(other)
        row |= {f"{key}_over_floor": ratio(row[key], median(of)) for key, of in floors.items() if of}
        values |= {f"weights/{arm.key}/{key}": number for key, number in row.items()}
        tensors[arm.text] = distances(start, other)
        bad[arm.text] = nonfinite(other.values())
        words[arm.text] = verdict(arm, row, floors["rel_l2"], bad["main"], bad[arm.text])
    detail: dict[str, Any] = {"tensors": tensors, "floor": floors, "verdict": words}
    if without := [arm for arm, told in words.items() if told == NO_EFFECT]:
        detail["no_effect"] = without
    if eager is not None:
        detail["against_eager"] = [arm.text for arm in arms if arm.attention is not None]
    return values, {**detail, "nonfinite": bad} if any(bad.values()) else detail


def verdict(arm: Arm, row: Mapping[str, float], floor: Sequence[float], main_bad: int, twin_bad: int) -> str:
    """In words, whether an arm's distance (relative L2, for W1 is blind to permutation) is noise."""
    if main_bad or twin_bad:
        return f"not finite: {main_bad} weights of the run, {twin_bad} of the twin"
    if row["max_abs"] == 0 and arm.text != "same":
        return NO_EFFECT
    if not floor:
        return "no floor was measured"
    if not all(map(math.isfinite, floor)):
        return "the floor is not finite"
    if row["rel_l2"] > max(floor):
        return f"above all {len(floor)} jitter seeds (p = 1/{len(floor) + 1})"
    return "not distinguishable from the floor"
