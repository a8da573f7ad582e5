"""RingMonitor: on due steps, how far attention across ranks is from exact attention, and its balance."""

from contextlib import ExitStack
from typing import Any

import torch

from stabilitykit.callbacks.damage import Damaged
from stabilitykit.callbacks.deviations import WHOLE, Deviations, Judged
from stabilitykit.callbacks.loads import Loads, balances
from stabilitykit.callbacks.monitor import Monitor
from stabilitykit.callbacks.ranks import Layers, everyone, merged
from stabilitykit.callbacks.run import say
from stabilitykit.observe.apart import is_apart
from stabilitykit.observe.attention import worst
from stabilitykit.observe.modules import Place, followed
from stabilitykit.parallel.call import RingCall, watched
from stabilitykit.parallel.invariants import IDENTITIES, damages
from stabilitykit.parallel.measured import measured

_BESIDE = "(beside the run)"  # a twin's or a shadow step's call
RATIOS = ("roundoff_ratio", "rel_l2", "grad_roundoff_ratio", "grad_rel_l2")
JUDGED: dict[str, Judged] = {
    "roundoff_ratio": Judged("ring/roundoff_ratio", "output roundoff ratio"),
    "grad_roundoff_ratio": Judged("ring/grad_roundoff_ratio", "dq roundoff ratio"),
    "nonfinite": Judged("attention/nonfinite", "NaN or inf in the output", True),
    "grad_nonfinite": Judged("attention/grad_nonfinite", "NaN or inf in dq", True),
    **{name: Judged(f"ring/{name}", name.replace("_", " ")) for name in IDENTITIES if name != "transport"},
}


class RingMonitor(Monitor):
    """On due steps compares every `ring_attention` call, forward and backward, with exact attention.

    Five identities over all ranks' tensors that hold whatever the inputs, a checksum of every block at
    every hop, and a few rows of every rank against exact attention over the keys of all ranks. Their
    rounding errors aside, all ranks must be as good as one: a head over a limit on three of its last
    five looks, or an identity, is a `deviation` event; a block that did not arrive as it was sent is a
    `ring` event at once, with the ranks and the hop. The record also says how the work fell on the
    ranks: tiles counted, CPU seconds, and how long each waited.

    The run is unchanged, bit for bit; between due steps nothing is in place. Measured on the first
    micro-batch of a due step; which rows is drawn by the step.

    Args:
        every_n_steps: due when `(step + 1) % every_n_steps == 0`; alike on all ranks.
        rows: how many rows of each rank; alike on all ranks.
        log_layers: whether the loggers get every layer's numbers too, not the worst only.

    Raises:
        ValueError: an argument out of its range.
    """

    kind = "ring"

    def __init__(self, every_n_steps: int = 100, rows: int = 8, log_layers: bool = False):
        super().__init__(every_n_steps)
        if rows < 1:
            raise ValueError(f"RingMonitor: expected rows >= 1, got {rows!r}")
        self.rows = rows
        self.log_layers = log_layers
        self._deviations = Deviations("ring", "attention across ranks is off", JUDGED)
        self._damaged = Damaged()
        self._open: ExitStack | None = None
        self._place = Place()
        self._waiting: list[RingCall] = []  # without a backward so far
        self._layers: Layers | None = None
        self._loads = Loads()
        self._said = False

    def open_step(self, trainer: Any, module: Any) -> None:
        """Listens to the calls of a due step."""
        self._close()
        self._layers = None  # of a step that an exception cut off
        if not self.due:
            return
        with self.timed():
            self._place, self._loads, self._layers = Place(), Loads(), {}
            self._open = ExitStack()
            self._open.enter_context(followed(module, self._place.enter, self._place.leave))
            self._open.enter_context(watched(self._take, self._name))

    def _name(self) -> str:
        return _BESIDE if is_apart() else self._place.name() or "(no module)"

    def _take(self, call: RingCall) -> None:
        if call.name == _BESIDE:
            return
        if call.grad_out is None:  # reentrant checkpointing has none of its first pass
            self._waiting.append(call)
            return
        self._waiting = [other for other in self._waiting if other.name != call.name]
        self._measure(call)

    def _measure(self, call: RingCall) -> None:
        if call.q.is_cuda:
            torch.cuda.synchronize()  # or the kernels queued before would count as our cost
        assert self._layers is not None
        with self.timed():
            row = measured(call, rows=self.rows, seed=f"{self.run.step}/{call.name}")
            if row["transport"]:
                members = call.ring.members
                row["damages"] = [damage.among(members) for damage in damages(call)]
            self._layers[call.name] = {**row, **worst(row["heads"])}
            self._loads.add(call)

    def before_optimizer(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """The backward is done (manual loops may have more to come)."""
        if module.automatic_optimization:
            self._close()

    def close_batch(self, trainer: Any, module: Any, outputs: Any) -> None:
        """Stops listening after the first micro-batch; writes when the step is complete."""
        self._close()
        if self.run.stepped and self._layers is not None:
            with self.timed():
                self._write_step(self._layers)
            self._layers = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Whatever failed, nothing stays open, and no other rank is waited for."""
        self._waiting = []
        self._close()
        super().on_exception(trainer, pl_module, exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """An event still open is written once more, as it stands."""
        for event in [*self._deviations.pending(), *self._damaged.pending()]:
            self.run.write("event", self.run.step - 1, {}, event)
        super().on_train_end(trainer, pl_module)

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()
            for call in self._waiting:
                self._measure(call)
            self._waiting = []

    def _write_step(self, mine: Layers) -> None:
        step = self.run.step
        told = everyone((mine, self._loads))
        layers = merged([(host, part[0]) for host, part in told])
        hosts = [host for host, _ in told]
        events = [
            *self._deviations.update(step, {name: _with_identities(row) for name, row in layers.items()}),
            *self._damaged.update(
                step, {name: row.get("damages", []) for name, row in layers.items()}, hosts
            ),
        ]
        if not layers and not self._said:
            self._said = True
            say(
                "RingMonitor measured nothing: saw no ring_attention call in this step; it watches "
                "stabilitykit.ring_attention. Training goes on"
            )
        rings = balances([part[1] for _, part in told])
        numbers = worst([*layers.values(), *rings])
        values = {f"ring/{key}": numbers[key] for key in NUMBERS if key in numbers}
        self.write(step, values, {"layers": layers, "rows": self.rows, "balance": rings})
        for event in events:
            self.run.write("event", step, {}, event)
        if self.log_layers:
            self.run.send_beside(step, _per_layer(layers))

    def memory(self) -> dict[str, Any]:
        """The open events and the last looks."""
        return {"deviations": self._deviations.state_dict(), "damaged": self._damaged.state_dict()}

    def recall(self, memory: dict[str, Any]) -> None:
        """The inverse of `memory`."""
        self._deviations.load_state_dict(memory["deviations"])
        self._damaged.load_state_dict(memory["damaged"])


NUMBERS = (*RATIOS, *IDENTITIES, "imbalance", "wait_percent")


def _with_identities(row: dict[str, Any]) -> dict[str, Any]:
    """The layer's row with its identities as one more row of its heads."""
    whole = {"head": WHOLE, **{name: row[name] for name in IDENTITIES if name in row}}
    return {**row, "heads": [whole, *row["heads"]]}


def _per_layer(layers: Layers) -> dict[str, float]:
    return {
        f"ring/{key}/{name.replace('.', '_').replace('#', '_')}": value
        for name, row in layers.items()
        for key, value in row.items()
        if key in NUMBERS
    }
