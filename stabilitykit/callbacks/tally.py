"""One optimizer step's losses and gradient norm: gathered on the device, read when they are there."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from stabilitykit.callbacks.run import world

_NONE = -1.0  # in the vector of a rank: a weight, norm or scale that there is not


@dataclass(frozen=True, slots=True)
class Numbers:
    """What all ranks found at one step: each rank's loss (None: it had none), and that of all together.

    `loss` is the mean over the ranks, weighted as the module says; `scale` is GradScaler's factor.
    """

    losses: list[float | None]
    loss: float | None
    norm: float | None
    scale: float | None


@dataclass(frozen=True, slots=True)
class Gathered:
    """A step whose numbers are on their way."""

    step: int
    ranks: Tensor
    work: Any

    def read(self) -> Numbers:
        """Waits for them; the only wait there is."""
        if self.work is not None:
            self.work.wait()
        rows = self.ranks.view(-1, 4).tolist()
        losses = [row[0] if row[1] >= 0 else None for row in rows]
        # Not weighted where there is nothing to weigh: NaN times 0 is NaN.
        told = [(row[0], row[1]) for row in rows if row[1] > 0]
        total = sum(weight for _, weight in told)
        nothing = None if all(loss is None for loss in losses) else math.nan
        loss = sum(loss * weight for loss, weight in told) / total if told else nothing
        norms, scales = [row[2] for row in rows if row[2] != _NONE], [row[3] for row in rows]
        return Numbers(losses, loss, _largest(norms), None if scales[0] == _NONE else scales[0])


def _largest(norms: list[float]) -> float | None:
    if any(math.isnan(norm) for norm in norms):
        return math.nan
    return max(norms, default=None)


class Tally:
    """Takes in a step's micro-batches and gradients; nothing here waits for the device."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._squares: dict[int, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._losses)

    def add_loss(self, loss: Tensor, weight: float | Tensor) -> None:
        """A micro-batch's loss, as the mean over `weight` tokens."""
        loss = loss.detach().float()
        if not isinstance(weight, Tensor):
            weight = torch.full((), float(weight), device=loss.device)
        self._losses.append(loss)
        self._weights.append(weight.detach().float())

    def add_gradients(self, optimizer: Any, scale: Tensor | None) -> None:
        """The squared norm of this optimizer's gradients, over `scale`; several optimizers add up.

        Of one that asks more than once in a step (LBFGS, a critic's rounds), the last gradients stand.
        """
        params = (p for group in optimizer.param_groups for p in group["params"])
        grads = [p.grad for p in params if p.grad is not None]
        if grads:
            norm = _norm([grad.coalesce().values() if grad.is_sparse else grad for grad in grads])
            self._squares[id(optimizer)] = (norm if scale is None else norm / scale).square()

    def gather(self, step: int, device: torch.device, scale: Tensor | None = None) -> Gathered:
        """The step's numbers, sent to all ranks; the tally is as it was."""
        none = torch.full((), _NONE, device=device)
        loss, weight = self._mean(device) if self._losses else (none, none)
        squares = [square.to(device) for square in self._squares.values()]
        norm = torch.stack(squares).sum().sqrt() if squares else none
        mine = torch.stack([loss, weight, norm, none if scale is None else scale])
        if world() == 1:
            return Gathered(step, mine, None)
        ranks = mine.new_empty(4 * world())
        return Gathered(step, ranks, dist.all_gather(list(ranks.split(4)), mine, async_op=True))

    def _mean(self, device: torch.device) -> tuple[Tensor, Tensor]:
        losses = torch.stack([loss.to(device) for loss in self._losses])
        weights = torch.stack([weight.to(device) for weight in self._weights])
        total = weights.sum()
        # A micro-batch of masked tokens only has weight 0 and, as a mean of nothing, the loss NaN.
        return torch.where(weights > 0, losses * (weights / total), 0).sum(), total

    def clear(self) -> None:
        """The step is over."""
        self._losses, self._weights, self._squares = [], [], {}


def _norm(grads: list[Tensor]) -> Tensor:
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
