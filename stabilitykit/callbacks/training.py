"""What a trainer does with the loss: its scale, and training_step called once more on one sequence."""

import inspect
from collections.abc import Callable
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def loss_scale(trainer: Any, module: Any) -> float:
    """What the loss is multiplied by before its backward: GradScaler's factor, over the accumulation."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    divided = trainer.accumulate_grad_batches if module.automatic_optimization else 1
    return (1.0 if scaler is None else scaler.get_scale()) / divided


def one_sequence(batch: Any, index: int) -> Any:
    """The batch cut down to one sequence: of every tensor as long as the first one, one entry.

    >>> import torch
    >>> one_sequence({"ids": torch.arange(6).view(3, 2), "weight": torch.ones(2)}, 4)
    {'ids': tensor([[2, 3]]), 'weight': tensor([1., 1.])}
    """
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, lambda tensor: tensors.append(tensor) or tensor)
    size = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    if size == 0:
        return batch
    at = index % size

    def cut(tensor: Tensor) -> Tensor:
        return tensor[at : at + 1] if tensor.dim() and tensor.shape[0] == size else tensor

    return apply_to_collection(batch, Tensor, cut)


def shadow_loss(trainer: Any, module: Any, batch: Any, batch_idx: int) -> Callable[[], Tensor]:
    """A function that runs training_step on `batch` as the trainer would and returns its loss."""
    arguments = [batch, batch_idx][: len(inspect.signature(module.training_step).parameters)]

    def loss() -> Tensor:
        with trainer.precision_plugin.train_step_context():
            outputs = module.training_step(*arguments)
        return outputs["loss"] if isinstance(outputs, dict) else outputs

    return loss
