"""LossMonitor: the true loss and gradient norm of every optimizer step, and the events in them."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from stabilitykit.callbacks.batches import BadBatches
from stabilitykit.callbacks.judge import PATIENCE, Judge
from stabilitykit.callbacks.messages import Around, detail_of
from stabilitykit.callbacks.monitor import Monitor
from stabilitykit.callbacks.ranks import everyone
from stabilitykit.callbacks.resume import Resume
from stabilitykit.callbacks.run import say
from stabilitykit.callbacks.tally import Gathered, Numbers, Tally
from stabilitykit.callbacks.training import scale_tensor, unscales_itself, vocabulary
from stabilitykit.numerics.event import Event
from stabilitykit.skiplist import SkipList

_ACTIONS = ("flag", "skip", "stop")
_OF_BATCHES = ("spike", "nonfinite")  # kinds that a bad batch may have made


@dataclass(frozen=True, slots=True)
class _Decision:
    """What `skip` found before the update: the loss's event, and why the update is not made."""

    event: Event | None
    reason: str | None


class LossMonitor(Monitor):
    """Records loss and gradient norm, and flags spikes, divergence and non-finite losses as they come.

    The loss is the mean over the micro-batches of the optimizer step and over the ranks, weighted by
    `module.loss_tokens` where the module has it: how many tokens the loss of its last `training_step`
    is the mean of (a number or a tensor). The norm is that of the unscaled gradients before clipping.
    Values are read one step late, so that nothing waits for them; `loss/event` is 1 on the step at
    which an event of the loss is raised. Batches that spiked are in the run folder's skip.json, with
    their samples where the data says which (see `BadBatches`).

    Args:
        action: "flag" writes the event; "stop" also ends training, on all ranks alike, at the step
            after the one that spiked, diverged or was not finite; "skip" does not make the update of
            a step whose loss spikes (ten in a row at most) or whose loss or gradient is not finite.
            It decides before the update, for the loss that went into `backward`, and with several
            optimizers for all of them when the first one is about to step. Its price, each step, is
            one small all-gather and one wait for the device; `overhead/loss_percent` counts it.
        grad_norm: whether to measure and watch the gradient norm (one read of all gradients per step).
        markers: reasons by step, as {1200: "new data mix"}: events in the 200 steps after name them.
    """

    kind = "loss"

    def __init__(
        self,
        action: Literal["flag", "skip", "stop"] = "flag",
        grad_norm: bool = True,
        markers: dict[int, str] | None = None,
    ):
        super().__init__()
        if action not in _ACTIONS:
            raise ValueError(f"LossMonitor: expected action 'flag', 'skip' or 'stop', got {action!r}")
        self.action = action
        self.grad_norm = grad_norm
        self.markers = dict(markers or {})
        self._judge = Judge()
        self._tally = Tally()
        self._late: Gathered | None = None
        self._decision: _Decision | None = None
        self._bad = BadBatches()
        self._resume = Resume()
        self._trainer: Any = None
        self._hosts: list[str] = []
        self._resumed_at: int | None = None
        self._vocabulary: int | None = None
        self._said: set[str] = set()
        self._stop = False

    # Lightning's hooks that only this monitor needs.

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """What is asked once: hosts, vocabulary, how the run was started, an earlier skip list."""
        super().on_train_start(trainer, pl_module)
        twins = any(monitor.kind == "weights" for monitor in self.run.monitors)
        if self.action == "skip" and twins and not pl_module.automatic_optimization:
            raise ValueError(
                "LossMonitor: expected automatic optimisation for action 'skip' beside WeightMonitor (its "
                "twins have made their update when the loss is judged), got manual optimisation"
            )
        self._trainer, self._stop, self._late, self._decision = trainer, False, None, None
        self._tally.clear()  # of a step that an exception cut off
        self._hosts = [host for host, _ in everyone(None)]
        self._resumed_at = None if self.run.resumed is None else self.run.step
        self._vocabulary = vocabulary(pl_module)
        self._resume.start(trainer, self.run.step)
        self._bad.begin_pass()
        self._bad.start(self.run.folder)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """A new pass through the data."""
        self._bad.begin_pass()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Notes where the batch came from."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        with self.timed():
            self._bad.note(self.run.step, trainer.fit_loop.total_batch_idx, batch)
            self._resume.look(trainer)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """The loss as `skip` must know it: before the update, free of accumulation and loss scale."""
        if self.action == "skip":
            with self.timed():
                scale = scale_tensor(trainer, loss.device)
                loss = loss.detach().float() * _divided(trainer, pl_module)
                self._add(pl_module, loss if scale is None else loss / scale)

    # The step.

    def veto(self, trainer: Any, module: Any, optimizer: Any) -> bool:
        """Takes the gradient norm and, under `skip`, the decision, on all ranks alike."""
        with self.timed():
            if self.grad_norm:
                scale = scale_tensor(trainer, module.device) if unscales_itself(optimizer) else None
                self._tally.add_gradients(optimizer, scale)
            if self.action != "skip":
                return False
            if self._decision is None or self._late is not None:
                self.drain()
                self._decision = self._decide(trainer, module)
            return self._decision.reason is not None

    def _decide(self, trainer: Any, module: Any) -> _Decision:
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        numbers = self._tally.gather(self.run.step, module.device).read()
        if numbers.loss is None:
            return _Decision(None, None)
        event = self._judge.take_loss(self.run.step, numbers.loss)
        # A scaler skips what overflows by itself, and needs to see it.
        reason = self._judge.skip(numbers.loss, None if scaled else numbers.norm)
        return _Decision(event, reason)

    def close_batch(self, trainer: Any, module: Any, outputs: Any) -> None:
        """Adds the micro-batch's loss; at the end of the step hands over and reads the step before."""
        with self.timed():
            if self.action != "skip":
                loss = _loss_of(outputs)
                if loss is not None:
                    # Lightning divides the loss by the accumulation (automatic optimisation only).
                    self._add(module, loss.detach().float() * _divided(trainer, module))
            if not self._tally:
                self._say_once(
                    "LossMonitor expected a loss from training_step (a tensor or a dict with 'loss'), got "
                    "none; steps without one are not recorded"
                )
            if self.run.stepped:
                self.drain()
                scale = scale_tensor(trainer, module.device)
                self._late = self._tally.gather(self.run.step, module.device, scale)
                self._tally.clear()
        if self._stop:
            trainer.should_stop = True

    def _add(self, module: Any, loss: Tensor) -> None:
        self._tally.add_loss(loss, getattr(module, "loss_tokens", 1))

    def drain(self) -> None:
        """Reads the step that was handed over and writes its records."""
        if self._late is None:
            return
        late, self._late = self._late, None
        numbers = late.read()
        decision, self._decision = self._decision, None
        if numbers.loss is None:
            return
        if decision is None:
            decision = _Decision(self._judge.take_loss(late.step, numbers.loss), None)
        self._write_step(late.step, numbers.loss, numbers, decision)

    def _write_step(self, step: int, loss: float, numbers: Numbers, decision: _Decision) -> None:
        event, norm, scale = decision.event, numbers.norm, numbers.scale
        opened = event is not None and event.end is None
        values = {
            "loss/value": loss,
            "loss/score": self._judge.score,
            "loss/spike_score": self._judge.spike_score,
            "loss/event": float(opened),
        }
        overflow = scale is not None and norm is not None and not math.isfinite(norm)
        skipped = decision.reason or ("overflow" if overflow else None)
        if norm is not None:
            values["loss/grad_norm"] = norm
        if scale is not None:
            values["loss/scale"] = scale
        if scale is not None or self.action == "skip":
            values["loss/skipped"] = float(skipped is not None)
        self.write(step, values, {"skipped": skipped} if skipped else None)
        self._stop = self._stop or (opened and self.action == "stop")
        listed = self._list(step, event, decision.reason)
        for told in self._events(step, loss, numbers, event, overflow=overflow):
            about = decision.reason if told is event and opened else None
            self._tell(step, told, numbers.losses, skipped=about, listed=listed if told is event else 0)
        self._say_what_is_odd()

    def _events(
        self, step: int, loss: float, numbers: Numbers, event: Event | None, *, overflow: bool
    ) -> list[Event]:
        """Everything that opens or closes at this step, the loss's first."""
        found = [event]
        # An overflow is the scaler's business, a gradient of a loss that is not finite no news.
        if numbers.norm is not None and not overflow and math.isfinite(loss):
            found.append(self._judge.take_gradients(step, numbers.norm))
        if numbers.scale is not None:
            found.append(self._judge.take_scale(step, numbers.scale))
        if step == 0 and self._vocabulary is not None:
            found += self._judge.initial(step, loss, self._vocabulary)
        return [one for one in found if one is not None]

    def _list(self, step: int, event: Event | None, skipped: str | None) -> int:
        """Puts the bad batches of this step in the skip list; how many."""
        first, reason = step, skipped
        if event is not None and event.end is None and event.kind in _OF_BATCHES:
            first, reason = int(event.onset), event.kind
        return self._bad.add(first, step, reason, self._trainer.train_dataloader) if reason else 0

    def _tell(
        self,
        step: int,
        event: Event,
        losses: list[float | None],
        *,
        skipped: str | None = None,
        listed: int = 0,
    ) -> None:
        around = Around(
            losses=losses,
            hosts=self._hosts,
            markers=self.markers,
            resumed_at=self._resumed_at,
            finite=self._judge.finite,
            skipped=skipped,
            listed=listed,
            advice=self._resume.advice(event.onset, self._bad.file),
        )
        self.run.write("event", step, {}, detail_of(event, around))

    def _say_what_is_odd(self) -> None:
        if not self._judge.gradients_available:
            self._say_once("the gradient norm is exactly 0 since the first step: taken as not available")
        if self._judge.gave_up:
            self._say_once(
                f"{PATIENCE} updates in a row were skipped and the loss is still up: it is not these "
                "batches, and updates go on"
            )

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            say(what)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """An event still open is written once more, as it stands: a spike may have become a divergence."""
        self.drain()
        for event in self._judge.pending:
            self._tell(self.run.step - 1, event, [])
        super().on_train_end(trainer, pl_module)

    # What a checkpoint holds.

    def state_dict(self) -> dict[str, Any]:
        """As every monitor's; and a file with this step is about to be there to resume from."""
        state = super().state_dict()
        if state and state["run"]:
            self._resume.saving(state["run"]["step"])
        return state

    def memory(self) -> dict[str, Any]:
        """What was learnt and listed; the checkpoints that are known."""
        return {
            "judge": self._judge.state_dict(),
            "skip_list": list(self._bad.listed.entries),
            "checkpoints": dict(self._resume.steps),
        }

    def recall(self, memory: dict[str, Any]) -> None:
        """The inverse of `memory`."""
        self._judge.load_state_dict(memory["judge"])
        self._bad.listed = SkipList(memory["skip_list"])
        self._resume.steps = dict(memory["checkpoints"])


def _divided(trainer: Any, module: Any) -> int:
    return trainer.accumulate_grad_batches if module.automatic_optimization else 1


def _loss_of(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
