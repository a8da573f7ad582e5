"""The loss of one sequence of a batch, by the user's own training_step, without what it logs."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


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
        with trainer.precision_plugin.train_step_context(), _unlogged(module):
            outputs = module.training_step(*arguments)
        return outputs["loss"] if isinstance(outputs, dict) else outputs

    return loss


@contextmanager
def _unlogged(module: Any) -> Iterator[None]:
    # What the step logs would be logged twice.
    silent = ("log", "log_dict")
    for name in silent:
        setattr(module, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in silent:
            delattr(module, name)
