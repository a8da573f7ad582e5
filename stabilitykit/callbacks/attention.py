"""AttentionMonitor: on due steps, how far the attention kernels are from exact attention."""

from fnmatch import fnmatch
from typing import Any, Literal

import torch

from stabilitykit.callbacks.budget import Budget, Clock, Most
from stabilitykit.callbacks.deviations import Deviations
from stabilitykit.callbacks.monitor import Monitor
from stabilitykit.callbacks.ranks import everyone, merged
from stabilitykit.callbacks.run import rank, say, world
from stabilitykit.callbacks.training import loss_scale, one_sequence, shadow_loss
from stabilitykit.observe.attention import NUMBERS, worst
from stabilitykit.observe.bias import DeltaWalk
from stabilitykit.observe.sample import Look
from stabilitykit.observe.shadow import is_compiled, shadow
from stabilitykit.observe.step import StepNumbers
from stabilitykit.observe.tap import ACROSS_RANKS, AttentionCall, Tap


class AttentionMonitor(Monitor):
    """On due steps compares every attention call, forward and backward, with exact attention.

    The model is not edited and the run is unchanged, bit for bit; between due steps nothing is in place.
    Measured on the first micro-batch of a due step; of a compiled model in a step of its own beside it, on
    one sequence. A head over its limit on three of its last five looks, or not finite, is a `deviation`.
    Price: q, k, v and out of its calls live until their backward, checkpointed or not.

    The budget begins with 2 heads, 64 rows and 1 sequence per call. After eight due steps it takes
    what costs, spread over all steps, under 0.5 % of the training time: up to everything, down to
    layers that take turns. Every head and row, and dk and dv of every head, is seen within the
    number of due steps that a record's `budget.covered_within` says: half of the heads are the same
    at each look, the others take turns, also over the ranks, or are those with the largest bound on
    their logits and those over a limit at their last looks. What is sampled depends on the step,
    the data and the chosen budget, which checkpoints keep.

    Args:
        every_n_steps: due when `(step + 1) % every_n_steps == 0`.
        heads: how many heads of each call, or which; None: the budget chooses.
        rows: how many query rows of each head; None: the budget chooses.
        sequences: how many sequences of the batch; None: the budget chooses.
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
        self.heads, self.rows, self.sequences = heads, rows, sequences
        self.reference = reference
        self.backward = backward
        self.modules = [modules] if isinstance(modules, str) else modules
        self.budget = budget
        self.log_layers = log_layers
        self._budget = Budget(every_n_steps, heads, rows, sequences)
        self._deviations, self._walk = Deviations(), DeltaWalk()
        self._order: list[str] = []
        self._said: set[str] = set()
        self._clock = Clock()
        self._batch: tuple[Any, int] | None = None
        self._tap: Tap | None = None
        self._step: StepNumbers | None = None
        self._unseen: dict[str, str] = {}
        self._source = "step"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Patterns that match no module are an error before training, not an empty record after it."""
        super().setup(trainer, pl_module, stage)
        self._budget.every_n_steps = self.every_n_steps
        names = [name for name, _ in pl_module.named_modules() if name]
        for pattern in self.modules or []:
            if not any(fnmatch(name, pattern) for name in names):
                raise ValueError(
                    f"AttentionMonitor: expected modules to match a module, {pattern!r} matches none of "
                    + ", ".join(names)
                )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Opens the step on its first micro-batch, which a shadow step takes a sequence of."""
        self._batch = batch, batch_idx
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._batch = None

    def open_step(self, trainer: Any, module: Any) -> None:
        """Opens the tap on a due step; beside a compiled model runs the shadow step."""
        self._close()
        self._step = None  # of a step that an exception cut off
        costs = self.run.costs
        self._clock.begin(self._budget, sum(costs.values()), costs[self.kind], self.due)
        if not self.due:
            return
        with self.timed():
            compiled = is_compiled(module)
            self._source, self._unseen = ("shadow" if compiled else "step"), {}
            self._step = self._new_step(1.0 if compiled else loss_scale(trainer, module))
            if compiled:
                self._run_shadow(trainer, module)
            else:
                self._tap = Tap(module, self._measure)
                self._tap.__enter__()

    def _new_step(self, loss_scale: float) -> StepNumbers:
        size = self._budget.size
        return StepNumbers(
            seed=str(self.run.step),
            heads=size.heads,
            rows=size.rows,
            sequences=size.sequences,
            look=self._look,
            modules=self.modules,
            backward=self.backward,
            dtype=torch.float64 if self.reference == "float64" else torch.float32,
            loss_scale=loss_scale,
        )

    def _look(self, name: str) -> Look | None:
        """Layers take turns when the budget says so; one with a head over its limit is looked at."""
        number, every = (self.run.step + 1) // self.every_n_steps - 1, self._budget.size.layers_every
        suspects = self._deviations.suspects(name)
        turn = name not in self._order or (number + self._order.index(name)) % every == 0
        if not turn and not suspects:
            return None
        return Look(number // every, rank(), world(), suspects)

    def _measure(self, call: AttentionCall) -> None:
        if call.q.is_cuda:
            torch.cuda.synchronize()  # or the kernels queued before would count as our cost
        assert self._step is not None
        with self.timed():
            self._step(call)
        for listen in self.run.listeners:
            listen(call)

    def _run_shadow(self, trainer: Any, module: Any) -> None:
        assert self._batch is not None and self._step is not None
        if not module.automatic_optimization:
            self._unseen = {"(compiled model)": "manual optimisation: its training_step takes steps itself"}
            return
        batch, batch_idx = self._batch
        part = one_sequence(batch, self.run.step)
        # The calls count inside the time of the whole shadow step.
        self._unseen = shadow(module, shadow_loss(trainer, module, part, batch_idx), self._step)

    def before_optimizer(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """The backward is done: the optimizer steps without the tap (manual loops may have more to come)."""
        if module.automatic_optimization:
            self._close()

    def close_batch(self, trainer: Any, module: Any, outputs: Any) -> None:
        """Closes the tap after the first micro-batch; writes when the step is complete."""
        self._close()
        if self.run.stepped and self._step is not None:
            with self.timed():
                self._write_step(self._step)
            self._step = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Whatever failed, the tap does not stay open."""
        self._close(exception)
        super().on_exception(trainer, pl_module, exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """An event still open is written once more, as it stands."""
        for event in self._deviations.pending():
            self.run.write("event", self.run.step - 1, {}, event)
        super().on_train_end(trainer, pl_module)

    def _close(self, exception: BaseException | None = None) -> None:
        tap, self._tap = self._tap, None
        if tap is not None:
            tap.__exit__(type(exception) if exception else None, exception, None)
            self._unseen = dict(tap.unseen)

    def _write_step(self, found: StepNumbers) -> None:
        step, figures = self.run.step, self._budget.figures(Most.of(found.shapes))
        self._unseen = {name: self._explained(reason) for name, reason in self._unseen.items()}
        skipped = {**self._unseen, **found.skipped}
        told = everyone((found.layers, skipped, found.out_of_memory, figures))
        layers = merged([(host, part[0]) for host, part in told])
        skipped = {name: reason for _, part in told for name, reason in part[1].items()}
        self._walk.add(layers)
        self._order += [name for name in layers if name not in self._order]
        events = self._deviations.update(step, layers)
        numbers = worst(list(layers.values()))
        values = {f"attention/{key}": numbers[key] for key in NUMBERS if key in numbers}
        self._say_if_blind(found, skipped)
        self.write(step, values, self._detail(found, layers, skipped))
        for event in events:
            self.run.write("event", step, {}, event)
        if self.log_layers:
            self.run.send_beside(step, _per_layer(layers))
        self._next_size([part for _, part in told])

    def _detail(self, found: StepNumbers, layers: dict[str, Any], skipped: dict[str, str]) -> dict[str, Any]:
        size = self._budget.size
        detail: dict[str, Any] = {
            "layers": layers,
            "sampled": {"heads": size.heads, "rows": size.rows, "sequences": size.sequences},
            "budget": {
                "covered_within": found.covered_within * size.layers_every,
                "layers_every": size.layers_every,
                "settled": self._budget.settled,
            },
            "source": self._source,
            "golden": "rounded",
        }
        return {**detail, "skipped": skipped} if skipped else detail

    def _next_size(self, parts: list[Any]) -> None:
        """All ranks take the same size from the next due step on: what they were told is the same."""
        if any(out_of_memory for _, _, out_of_memory, _ in parts):
            before = self._budget.size
            self._budget.shrink()
            self._say_once(
                f"AttentionMonitor ran out of memory at step {self.run.step} with {before}; from "
                f"the next due step on it measures {self._budget.size}. Training goes on"
            )
            return
        figures = [figures for *_, figures in parts if figures is not None]
        if len(figures) == len(parts):
            self._budget.choose(max(figures, key=lambda figures: figures.over))

    def _say_if_blind(self, found: StepNumbers, skipped: dict[str, str]) -> None:
        for reason in dict.fromkeys(self._unseen.values()):
            first, *others = (name for name, why in self._unseen.items() if why == reason)
            names = f"{first} and {len(others)} more" if others else first
            self._say_once(
                f"AttentionMonitor does not see the attention of {names}: {reason}. Training goes on"
            )
        if found.shapes or (skipped and all(why.startswith(ACROSS_RANKS) for why in skipped.values())):
            return
        why = "; ".join(sorted({f"{name}: {reason}" for name, reason in skipped.items()}))
        why = why or (
            "saw no attention call in this step; it watches torch's scaled_dot_product_attention and "
            "what is built on it"
        )
        self._say_once(f"AttentionMonitor measured nothing: {why}. Training goes on")

    def _explained(self, reason: str) -> str:
        if reason != ACROSS_RANKS:
            return reason
        watched = any(monitor.kind == "ring" for monitor in self.run.monitors)
        return f"{reason}; {'RingMonitor watches' if watched else 'add stabilitykit.RingMonitor for'} it"

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)

    def memory(self) -> dict[str, Any]:
        """The chosen budget, the open events, the running sums, and the order in which layers take turns."""
        return {
            "budget": self._budget.state_dict(),
            "deviations": self._deviations.state_dict(),
            "walk": self._walk.state_dict(),
            "order": list(self._order),
        }

    def recall(self, memory: dict[str, Any]) -> None:
        """The inverse of `memory`."""
        if memory:  # a checkpoint of an earlier version has none
            self._budget.load_state_dict(memory["budget"])
            self._deviations.load_state_dict(memory["deviations"])
            self._walk.load_state_dict(memory["walk"])
            self._order = list(memory["order"])


def _per_layer(layers: dict[str, Any]) -> dict[str, float]:
    return {
        f"attention/{key}/{name.replace('.', '_').replace('#', '_')}": value
        for name, row in layers.items()
        for key, value in row.items()
        if key in NUMBERS
    }
