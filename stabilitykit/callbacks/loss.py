"""LossMonitor: the true loss and gradient norm of every optimizer step, and the events in them."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from stabilitykit.callbacks.monitor import Monitor
from stabilitykit.callbacks.run import say, world
from stabilitykit.numerics.spikes import Event, SpikeDetector


class LossMonitor(Monitor):
    """Records loss and gradient norm, and flags spikes, divergence and non-finite losses as they come.

    The loss is the mean over the micro-batches of the optimizer step and over the ranks; the norm is
    that of the unscaled gradients before clipping. Values are read one step late, so that nothing
    waits for them; `loss/event` is 1 on the step at which an event is raised.

    Args:
        action: "flag" writes the event; "stop" also ends training, on all ranks alike, at the step
            after the one that spiked, diverged or was not finite.
        grad_norm: whether to measure the gradient norm (one read of all gradients per step).
    """

    kind = "loss"

    def __init__(self, action: Literal["flag", "stop"] = "flag", grad_norm: bool = True):
        super().__init__()
        if action not in ("flag", "stop"):
            raise ValueError(f"LossMonitor: expected action 'flag' or 'stop', got {action!r}")
        self.action = action
        self.grad_norm = grad_norm
        self._detector = SpikeDetector()
        self._micro: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._late: tuple[int, Tensor, Any] | None = None
        self._said = False
        self._stop = False

    def before_optimizer(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Takes the squared norm of this optimizer's gradients; several optimizers add up."""
        if self.grad_norm:
            with self.timed():
                params = (p for group in optimizer.param_groups for p in group["params"])
                grads = [p.grad for p in params if p.grad is not None]
                if grads:
                    self._squares.append(_norm(grads).square())

    def close_batch(self, trainer: Any, module: Any, outputs: Any) -> None:
        """Adds the micro-batch's loss; at the end of the step hands over and reads the step before."""
        with self.timed():
            loss = _loss_of(outputs)
            if loss is None:
                self._say_once()
            else:
                # Lightning divides the loss by the accumulation (automatic optimisation only).
                divided = trainer.accumulate_grad_batches if module.automatic_optimization else 1
                self._micro.append(loss.detach().float() * divided)
            if self.run.stepped:
                self.drain()
                self._hand_over(module.device)
        if self._stop:
            trainer.should_stop = True

    def _hand_over(self, device: torch.device) -> None:
        nan = torch.full((), torch.nan, device=device)
        losses = [loss.to(device) for loss in self._micro]
        squares = [square.to(device) for square in self._squares]
        pair = torch.stack(
            [
                torch.stack(losses).mean() if losses else nan,
                torch.stack(squares).sum().sqrt() if squares else nan,
            ]
        )
        ranks, work = pair, None
        if world() > 1:
            ranks = pair.new_empty(2 * world())
            work = dist.all_gather_into_tensor(ranks, pair, async_op=True)
        if losses:
            self._late = (self.run.step, ranks, work)
        self._micro, self._squares = [], []

    def drain(self) -> None:
        """Reads the step that was handed over and writes its records."""
        if self._late is None:
            return
        step, ranks, work = self._late
        self._late = None
        if work is not None:
            work.wait()
        rows = ranks.view(-1, 2).tolist()
        losses = [row[0] for row in rows]
        self._judge(step, sum(losses) / len(losses), max(row[1] for row in rows), losses)

    def _judge(self, step: int, loss: float, norm: float, losses: list[float]) -> None:
        event = self._detector.update(step, loss)
        opened = event is not None and event.end is None
        values = {
            "loss/value": loss,
            "loss/score": self._detector.score,
            "loss/event": float(opened),
        }
        if self.grad_norm:
            values["loss/grad_norm"] = norm
        self.write(step, values)
        if event is not None:
            detail = {
                **event.to_dict(),
                "monitor": "LossMonitor",
                "message": message(event, losses),
            }
            self.run.write("event", step, {}, detail)
            self._stop = self._stop or (opened and self.action == "stop")

    def _write_event(self, step: int, event: Event, losses: list[float]) -> None:
        detail = {**event.to_dict(), "monitor": "LossMonitor", "message": message(event, losses)}
        self.run.write("event", step, {}, detail)

    def _say_once(self) -> None:
        if not self._said:
            self._said = True
            say(
                "LossMonitor expected a loss from training_step (a tensor or a dict with 'loss'), got "
                "none; steps without one are not recorded"
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """An event still open is written once more, as it stands: a spike may have become a divergence."""
        self.drain()
        for event in self._detector.pending:
            self._write_event(self.run.step - 1, event, [])
        super().on_train_end(trainer, pl_module)

    def memory(self) -> dict[str, Any]:
        """The detector's state."""
        return {"detector": self._detector.state_dict()}

    def recall(self, memory: dict[str, Any]) -> None:
        """The inverse of `memory`."""
        self._detector.load_state_dict(memory["detector"])


def message(event: Event, losses: list[float]) -> str:
    """The event in words; with several ranks, those whose loss is not finite."""
    text = f"loss {event.kind} at step {event.start}"
    if event.kind != "nonfinite":
        text += f": {event.peak:.4g} against a baseline of {event.baseline:.4g}"
    if event.end is not None:
        text += f", over at step {event.end}"
    bad = [rank for rank, loss in enumerate(losses) if loss != loss or abs(loss) == float("inf")]
    if bad and len(losses) > 1:
        text += f" (not finite on rank {', '.join(map(str, bad))} of {len(losses)})"
    return text


def _loss_of(outputs: Any) -> Tensor | None:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _norm(grads: list[Tensor]) -> Tensor:
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
