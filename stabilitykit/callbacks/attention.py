"""AttentionMonitor: on due steps, how far the attention kernels are from exact attention."""

import math
import platform
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import distributed as dist

from stabilitykit.callbacks.monitor import Monitor
from stabilitykit.callbacks.run import say, world
from stabilitykit.catalog import CATALOG
from stabilitykit.observe.attention import Sample, measured, unmeasurable, worst
from stabilitykit.observe.tap import AttentionCall, Tap

HEADS, ROWS, SEQUENCES = 2, 64, 1


class AttentionMonitor(Monitor):
    """On due steps compares every attention call, forward and backward, with exact attention.

    The model is not edited and the run is unchanged, bit for bit; between due steps nothing is in
    place. Measured on the first micro-batch of a due step. What is sampled depends on the step alone.

    Args:
        every_n_steps: due when `(step + 1) % every_n_steps == 0`.
        heads: how many heads of each call, or which; None: 2.
        rows: how many query rows of each head; None: 64.
        sequences: how many sequences of the batch; None: 1.
        reference: the exact attention's format.
        backward: whether to compare dq, dk and dv as well.
        modules: names of the modules to measure, with * and ?; None: all.
        budget: "auto" chooses whatever is None.
        log_layers: whether the loggers get every layer's numbers too, not the worst only.

    Raises:
        ValueError: an argument out of its range; a pattern of `modules` that matches nothing.
    """

    kind = "attention"

    def __init__(
        self,
        every_n_steps: int = 100,
        heads: int | list[int] | None = None,
        rows: int | None = None,
        sequences: int | None = None,
        reference: Literal["float64", "float32"] = "float64",
        backward: bool = True,
        modules: str | list[str] | None = None,
        budget: Literal["auto"] = "auto",
        log_layers: bool = False,
    ):
        super().__init__(every_n_steps)
        for name, value in {"heads": heads, "rows": rows, "sequences": sequences}.items():
            if value is not None and (value == [] or (isinstance(value, int) and value < 1)):
                raise ValueError(f"AttentionMonitor: expected {name} >= 1, got {value!r}")
        if reference not in ("float64", "float32"):
            raise ValueError(f"AttentionMonitor: expected reference float64 or float32, got {reference!r}")
        if budget != "auto":
            raise ValueError(f"AttentionMonitor: expected budget 'auto', got {budget!r}")
        self.heads: int | list[int] = HEADS if heads is None else heads
        self.rows = ROWS if rows is None else rows
        self.sequences = SEQUENCES if sequences is None else sequences
        self.reference = reference
        self.backward = backward
        self.modules = [modules] if isinstance(modules, str) else modules
        self.budget = budget
        self.log_layers = log_layers
        self._tap: Tap | None = None
        self._layers: dict[str, dict[str, Any]] = {}
        self._skipped: dict[str, str] = {}
        self._said: set[str] = set()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Patterns that match no module are an error before training, not an empty record after it."""
        super().setup(trainer, pl_module, stage)
        names = [name for name, _ in pl_module.named_modules() if name]
        for pattern in self.modules or []:
            if not any(fnmatch(name, pattern) for name in names):
                raise ValueError(
                    f"AttentionMonitor: expected modules to match a module, {pattern!r} matches none of "
                    + ", ".join(names)
                )

    def open_step(self, trainer: Any, module: Any) -> None:
        """Opens the tap on a due step."""
        self._close()
        if self.due:
            with self.timed():
                self._layers, self._skipped = {}, {}
                self._tap = Tap(module, self._measure)
                self._tap.__enter__()

    def before_optimizer(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """The backward is done: the optimizer steps without the tap (manual loops may have more to come)."""
        if module.automatic_optimization:
            self._close()

    def close_batch(self, trainer: Any, module: Any, outputs: Any) -> None:
        """Closes the tap after the first micro-batch; writes when the step is complete."""
        self._close()
        if self.run.stepped and self.due:
            with self.timed():
                self._write_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Whatever failed, the tap does not stay open."""
        self._close(exception)
        super().on_exception(trainer, pl_module, exception)

    def _close(self, exception: BaseException | None = None) -> None:
        tap, self._tap = self._tap, None
        if tap is not None:
            tap.__exit__(type(exception) if exception else None, exception, None)

    def _measure(self, call: AttentionCall) -> None:
        name = call.name or "(no module)"
        if self.modules and not any(fnmatch(name.split("#")[0], p) for p in self.modules):
            return
        if call.q.is_cuda:
            torch.cuda.synchronize()  # or the kernels queued before would count as our cost
        with self.timed():
            reason = unmeasurable(call)
            if reason is not None:
                self._skipped[name] = reason
                return
            sample = Sample.draw(
                call,
                f"{self.run.step}/{name}",
                heads=self.heads,
                rows=self.rows,
                sequences=self.sequences,
            )
            dtype = torch.float64 if self.reference == "float64" else torch.float32
            self._layers[name] = measured(call, sample, backward=self.backward, dtype=dtype)

    def _write_step(self) -> None:
        layers = _in_order(_worst_ranks(self._layers), self._layers)
        detail: dict[str, Any] = {
            "layers": layers,
            "sampled": {"heads": self.heads, "rows": self.rows, "sequences": self.sequences},
            "source": "step",
            "golden": "rounded",
        }
        if self._skipped:
            detail["skipped"] = self._skipped
        self._warn_if_blind()
        numbers = worst(list(layers.values()))
        values = {f"attention/{k}": v for k, v in numbers.items() if f"attention/{k}" in CATALOG}
        self.write(self.run.step, values, detail)
        if self.log_layers:
            self.run.send_beside(self.run.step, _per_layer(layers))

    def _warn_if_blind(self) -> None:
        if self._layers:
            return
        why = "; ".join(sorted({f"{name}: {reason}" for name, reason in self._skipped.items()}))
        text = why or (
            "saw no attention call in this step; it watches torch's scaled_dot_product_attention and "
            "what is built on it"
        )
        if text not in self._said:
            self._said.add(text)
            say(f"AttentionMonitor measured nothing: {text}. Training goes on")


def _in_order(layers: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    # Backward hands the last layer over first; people read from the first.
    return {name: layers[name] for name in [*reversed(mine), *(n for n in layers if n not in mine)]}


def _worst_ranks(mine: dict[str, Any]) -> dict[str, Any]:
    """Per layer the row of the rank that is farthest off, with its rank and host."""
    if world() == 1:
        return mine
    everyone: list[Any] = [None] * world()
    dist.all_gather_object(everyone, (platform.node(), mine))
    result: dict[str, Any] = {}
    for rank, (host, layers) in enumerate(everyone):
        for name, row in layers.items():
            if name not in result or _badness(row) > _badness(result[name]):
                result[name] = {"rank": rank, "host": host, **row}
    return result


def _badness(row: dict[str, Any]) -> tuple[float, float]:
    count = row["nonfinite"] + row.get("grad_nonfinite", 0.0)
    ratios = (row["roundoff_ratio"], row.get("grad_roundoff_ratio", 0.0))
    return count, max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)


def _per_layer(layers: dict[str, Any]) -> dict[str, float]:
    return {
        f"attention/{key}/{name.replace('.', '_').replace('#', '_')}": value
        for name, row in layers.items()
        for key, value in row.items()
        if f"attention/{key}" in CATALOG
    }
