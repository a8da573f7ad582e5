"""StepNumbers: the attention calls of one step as numbers, each measured as it is handed over."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch

from stabilitykit.observe.attention import measured, unmeasurable
from stabilitykit.observe.sample import Look, Sample, covered_within
from stabilitykit.observe.tap import AttentionCall

OUT_OF_MEMORY = "out of memory while it was measured"


@dataclass(kw_only=True)
class StepNumbers:
    """An `on_call` for a Tap: fills `layers`, name -> numbers, and `skipped`, name -> reason.

    Args:
        seed: of what is drawn: the same seed, calls and looks give the same sample.
        heads: of each call, how many or which; likewise `rows` and `sequences`.
        look: by the name of a call, its look; None: it has no turn at this step.
        modules: patterns of names with * and ?; None: all.
        backward: whether to compare gradients too.
        dtype: of the exact attention.
        loss_scale: what the loss was multiplied by before its backward.
    """

    seed: str
    heads: int | list[int]
    rows: int
    sequences: int
    look: Callable[[str], Look | None]
    modules: list[str] | None = None
    backward: bool = True
    dtype: torch.dtype = torch.float64
    loss_scale: float = 1.0
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    shapes: list[tuple[int, int, int, int]] = field(default_factory=list)  # heads, per key head, rows, b
    covered_within: int = 1
    out_of_memory: bool = False

    def __call__(self, call: AttentionCall) -> None:
        """Measures a call, unless it is not to be measured or cannot be."""
        name = call.name or "(no module)"
        if self.modules and not any(fnmatch(name.split("#")[0], pattern) for pattern in self.modules):
            return
        reason = unmeasurable(call)
        if reason is None and self.out_of_memory:
            reason = OUT_OF_MEMORY  # a smaller sample is for all ranks to agree on, after the step
        if reason is not None:
            self.skipped[name] = reason
            return
        b, h, length = call.q.shape[:3]
        self.shapes.append((h, h // call.k.shape[1], length, b))
        look = self.look(name)
        if look is not None:
            self._measure(name, call, look)

    def _measure(self, name: str, call: AttentionCall, look: Look) -> None:
        size: dict[str, Any] = {"heads": self.heads, "rows": self.rows}
        self.covered_within = max(self.covered_within, covered_within(call, **size, world=look.world))
        try:
            sample = Sample.draw(call, f"{self.seed}/{name}", **size, sequences=self.sequences, look=look)
            self.layers[name] = measured(
                call, sample, backward=self.backward, dtype=self.dtype, loss_scale=self.loss_scale
            )
        except RuntimeError as problem:
            if not _memory_ran_out(problem):
                raise
            self.out_of_memory = True
            self.skipped[name] = OUT_OF_MEMORY


def _memory_ran_out(problem: RuntimeError) -> bool:
    # A CPU's allocator has no error of its own.
    words = ("can't allocate memory", "not enough memory")
    return isinstance(problem, torch.OutOfMemoryError) or any(word in str(problem) for word in words)
