"""What a trainer does with the loss: its scale, its update, and training_step once more on one sequence."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


def loss_scale(trainer: Any, module: Any) -> float:
    """What the loss is multiplied by before its backward: GradScaler's factor, over the accumulation."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    divided = trainer.accumulate_grad_batches if module.automatic_optimization else 1
    return (1.0 if scaler is None else scaler.get_scale()) / divided


def scale_tensor(trainer: Any, device: torch.device) -> Tensor | None:
    """GradScaler's factor as a tensor, read without waiting for the device; None without a scaler."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.scale(torch.ones((), device=device))


def unscales_itself(optimizer: Any) -> bool:
    """Whether the optimizer takes gradients that GradScaler has not unscaled (fused ones)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def drop_update(trainer: Any, optimizer: Any) -> None:
    """Makes the optimizer's coming step an empty one: no gradients, hence no change of weights or state.

    Schedules, the step count and GradScaler go on as after any step.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and unscales_itself(optimizer):
        scaler.unscale_(optimizer)  # which looks for inf; without gradients the step could not
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def vocabulary(module: Any) -> int | None:
    """The size of the vocabulary, from the hyper-parameters or the config of a part; None: not known."""
    places = [getattr(module, "hparams", None), *(getattr(part, "config", None) for part in module.modules())]
    for place in places:
        size = getattr(place, "vocab_size", None)
        if isinstance(size, int) and size > 1:
            return size
    return None


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
