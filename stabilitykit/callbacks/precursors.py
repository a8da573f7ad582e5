"""PrecursorMonitor: what moves before a loss does, per layer, each signal against its own past."""

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from stabilitykit.callbacks.lockstep import spread
from stabilitykit.callbacks.monitor import Monitor
from stabilitykit.callbacks.parity import Parity
from stabilitykit.callbacks.run import say, world
from stabilitykit.callbacks.signals import Layers, judged, per_layer, values_of, without
from stabilitykit.numerics.bands import Bands
from stabilitykit.observe.calls import AttentionCall
from stabilitykit.observe.forward import Forward, layer_of, output_head
from stabilitykit.observe.shadow import is_compiled
from stabilitykit.observe.tap import Tap
from stabilitykit.observe.updates import Updates


class PrecursorMonitor(Monitor):
    """On due steps records, per layer, signals that are known to move before the loss does.

    Gradient norm, update/weight ratio, RMS_t (gradients against Adam's second moment), share of
    gradients below eps, largest weight, activation outliers, largest logit and entropy of attention; of
    the run, logZ of the output and the loss scale. Each is held against a robust band of its own past;
    the record says which are outside and since when, and the report tells of every loss event which
    were first. The run is unchanged, bit for bit; between due steps nothing is in place; a due step has
    one transfer to the host. While its optimizer steps, a sample of every weight tensor is kept.

    Norms are of the whole model where parameters are sharded (FSDP2, tensor parallel). Of a
    compiled model the forward pass is not seen.

    Args:
        every_n_steps: due when `(step + 1) % every_n_steps == 0`.
        output_head: the name of the module that yields the logits; None: the last one whose weight
            has a row per token.
        parity_every_n_steps: how often the ranks of a data-parallel run compare a checksum of their
            weights; the one that differs is a `parity` event. None: never.
        log_layers: whether the loggers get every layer's numbers too, not the worst only.

    Raises:
        ValueError: an argument out of its range; an `output_head` that is no module.
    """

    kind = "precursors"

    def __init__(
        self,
        every_n_steps: int = 10,
        output_head: str | None = None,
        parity_every_n_steps: int | None = 1000,
        log_layers: bool = False,
    ):
        super().__init__(every_n_steps)
        if parity_every_n_steps is not None and parity_every_n_steps < 1:
            raise ValueError(
                f"PrecursorMonitor: expected parity_every_n_steps >= 1 or None, got {parity_every_n_steps}"
            )
        self.output_head = output_head
        self.parity_every_n_steps = parity_every_n_steps
        self.log_layers = log_layers
        self._bands, self._parity = Bands(), Parity()
        self._head: str | None = None
        self._layers: list[str] = []
        self._sharded: str | None = None
        self._updates: Updates | None = None
        self._forward: Forward | None = None
        self._tap: Tap | None = None
        self._scale: Tensor | None = None
        self._device = torch.device("cpu")
        self._missing: dict[str, str] = {}
        self._said: set[str] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Looks up the layers and the output's head, when strategies have made of the model what they do."""
        super().on_train_start(trainer, pl_module)
        modules = [name for name, _ in pl_module.named_modules() if name]
        if self.output_head is not None and self.output_head not in modules:
            raise ValueError(
                f"PrecursorMonitor: expected output_head to be a module, {self.output_head!r} is none of "
                + ", ".join(modules)
            )
        self._head = self.output_head or output_head(pl_module)
        self._layers = list(dict.fromkeys(layer_of(f"{name}.weight") for name in ["", *modules]))
        self._sharded = spread(trainer, pl_module)

    # The step.

    def open_step(self, trainer: Any, module: Any) -> None:
        """Opens the hooks and the tap on a due step."""
        self._close()
        if not self.due:
            return
        with self.timed():
            self._missing = {}
            self._updates = Updates(dict(self._trained(module)), world())
            if is_compiled(module):
                for name in ("max_logit", "entropy", "log_z", "outlier"):
                    self._missing[name] = "the forward pass of a compiled model is not seen"
                return
            self._forward = Forward(module, self._layers, self._head)
            if any(monitor.kind == "attention" and monitor.due for monitor in self.run.monitors):
                self.run.listeners.append(self._listen)  # its tap serves both
            else:
                self._tap = Tap(module, self._listen, forward_only=True)
                self._tap.__enter__()

    def _trained(self, module: Any) -> list[tuple[str, Tensor]]:
        reason = None
        if self._sharded is not None and not any(isinstance(p, DTensor) for p in module.parameters()):
            reason = f"{self._sharded} does not say which parts of the parameters a rank holds"
        elif any(map(is_lazy, module.parameters())):
            reason = "lazy parameters have no shape before the first forward pass"
        if reason is not None:
            self._missing |= dict.fromkeys(("grad_norm", *_OF_UPDATES), reason)
            return []
        return [(name, p) for name, p in module.named_parameters() if p.requires_grad]

    def _listen(self, call: AttentionCall) -> None:
        if self._forward is not None:
            with self.timed():
                self._forward(call)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """The forward pass is over: the backward runs without the hooks and the tap."""
        self._close_forward()

    def before_optimizer(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Takes the gradients; the rest when the optimizer has stepped."""
        if self._updates is None:
            return
        with self.timed():
            self._device = module.device
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = None if scaler is None or scaler._scale is None else scaler._scale
            # get_scale() would wait for the device; update() changes the scale in place.
            self._scale = None if scale is None else scale.detach().clone()
            inside = getattr(optimizer, "_step_supports_amp_scaling", False)
            self._updates.watch(optimizer, self._scale if inside else None)

    def close_batch(self, trainer: Any, module: Any, outputs: Any) -> None:
        """Only the first micro-batch is looked at; the record is written when the step is complete."""
        self._close_forward()
        if not self.run.stepped:
            return
        self.drain()
        if self.parity_every_n_steps and (self.run.step + 1) % self.parity_every_n_steps == 0 and world() > 1:
            with self.timed():
                self._compare_replicas(module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Whatever failed, nothing stays in place."""
        if hasattr(self, "run"):  # not if the data's setup failed, before this one's
            self._close()
        super().on_exception(trainer, pl_module, exception)

    def _close_forward(self) -> None:
        if self._forward is not None and self._forward.is_open:
            with self.timed():
                if self._tap is not None:
                    self._tap.__exit__(None, None, None)
                self._forward.close()

    def _close(self) -> None:
        self._close_forward()
        if self._updates is not None:
            self._updates.close()
        if self._listen in self.run.listeners:
            self.run.listeners.remove(self._listen)
        self._updates = self._forward = self._tap = None

    # The record.

    def drain(self) -> None:
        """Writes the record of a step that is complete."""
        if self.run.stepped and self._updates is not None:
            with self.timed():
                self._write_step(self._updates)
                self._close()

    def _write_step(self, updates: Updates) -> None:
        step = self.run.step
        layers, whole, stepped = self._read(updates)
        # Gradients that overflow are GradScaler's business: it halves its factor, which is judged.
        shown = layers if stepped or self._scale is None else without(layers, "grad_norm")
        moved = judged(self._bands, step, shown, whole)
        for name in updates.untold:
            reason = f"{name} does not tell when it has stepped"
            self._missing |= dict.fromkeys(_OF_UPDATES, reason)
        self._look_for_missing(layers, whole, stepped and not self.run.vetoed)
        detail: dict[str, Any] = {"layers": layers, "moved": moved, "every": self.every_n_steps}
        if not stepped and not updates.untold:
            detail["overflow"] = self._scale is not None
        if self._missing:
            detail["skipped"] = self._missing
        self.write(step, values_of(layers, whole, moved), detail)
        if self.log_layers:
            self.run.send_beside(step, _per_layer(layers))

    def _read(self, updates: Updates) -> tuple[Layers, dict[str, float], bool]:
        """Signals per layer and of the run, global over the ranks, and whether the weights were updated."""
        device, parts = self._device, [updates, *([self._forward] if self._forward else [])]
        scale = torch.full((1,), -math.inf, device=device) if self._scale is None else self._scale.view(1)
        sums = torch.cat([part.sums(device) for part in parts])
        peaks = torch.cat([*(part.peaks(device) for part in parts), scale.double()])
        peaks = peaks.nan_to_num(math.inf, math.inf, -math.inf)  # a collective may lose a NaN
        if world() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(peaks, dist.ReduceOp.MAX)
        # The one transfer of a due step.
        numbers = torch.cat([sums, peaks]).tolist()
        adds, tops = numbers[: len(sums)], numbers[len(sums) :]
        found = updates.read(adds, tops)
        layers = per_layer(found, {name: p.numel() for name, p in updates.parameters.items()})
        whole = {} if self._scale is None else {"loss_scale": tops[-1]}
        if self._forward:
            n = len(updates.parameters)
            seen, of_all = self._forward.read(adds[5 * n :], tops[n:])
            layers = {
                name: {**layers.get(name, {}), **seen.get(name, {})}
                for name in self._layers
                if name in layers or name in seen
            }
            whole |= of_all
        return layers, whole, all("update" in row for row in found.values())

    def _look_for_missing(self, layers: Layers, whole: dict[str, float], stepped: bool) -> None:
        """What is absent is said in every record, with the reason, and aloud once."""
        present = {name for row in layers.values() for name in row} | whole.keys()
        moments = stepped and "grad_norm" in present
        reasons = _REASONS if moments else {k: v for k, v in _REASONS.items() if k in _BEFORE_STEP}
        for name, reason in reasons.items():
            if name not in present:
                self._missing.setdefault(name, reason)
        new = {name: reason for name, reason in self._missing.items() if name not in self._said}
        if new:
            self._said |= new.keys()
            told = "; ".join(
                f"{', '.join(n for n in new if new[n] == why)}: {why}" for why in dict.fromkeys(new.values())
            )
            say(f"PrecursorMonitor does not measure {told}. Training goes on")

    # The ranks against each other.

    def _compare_replicas(self, module: Any) -> None:
        if self._sharded is not None:
            if "parity" not in self._said:
                self._said.add("parity")
                say(f"PrecursorMonitor does not compare replicas: {self._sharded}. Training goes on")
            return
        event = self._parity.check(self.run.step, dict(module.named_parameters()))
        if event is not None:
            self.run.write("event", self.run.step, {}, event)

    def memory(self) -> dict[str, Any]:
        """The bands, and what is known of the replicas."""
        return {"bands": self._bands.state_dict(), "parity": self._parity.state_dict()}

    def recall(self, memory: dict[str, Any]) -> None:
        """The inverse of `memory`."""
        self._bands.load_state_dict(memory["bands"])
        self._parity.load_state_dict(memory["parity"])


_REASONS = {
    "grad_norm": "no parameter had a gradient",
    "rms": "no optimizer keeps a second moment (exp_avg_sq)",
    "eps_share": "no optimizer has an eps",
    "outlier": "no numbered layer gave a dense tensor that is not mostly 0",
    "log_z": "no output head ran; name its module by output_head",
    "max_logit": "no attention call was seen",
}
_OF_UPDATES = ("update_ratio", "rms", "eps_share", "max_weight")
_BEFORE_STEP = ("grad_norm", "outlier", "log_z", "max_logit")


def _per_layer(layers: Layers) -> dict[str, float]:
    return {
        f"precursors/{key}/{name.replace('.', '_')}": value
        for name, row in layers.items()
        for key, value in row.items()
    }
