"""Faults planted on purpose, for the zoo, the studies and the tests."""

from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

Kind = Literal["random_bytes", "repeated_byte", "shuffled_labels"]
_KINDS = ("random_bytes", "repeated_byte", "shuffled_labels")
_PASSED_ON = (
    *("prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices"),
    *("prepare_data", "setup", "teardown", "state_dict", "load_state_dict", "on_exception"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
    *("transfer_batch_to_device", "on_after_batch_transfer"),
)


class PlantedBatch(pl.LightningDataModule):
    """`data` with one training batch spoilt on purpose: the fault is planted, not found.

    Args:
        data: The data module whose batches are (inputs, targets) of token ids.
        at_batch: The batch to spoil, 0-based over the whole run (without accumulation: the step).
        kind: What to put in its place: "random_bytes", "repeated_byte" or, of the targets only,
            "shuffled_labels".
        seed: Of the replacement.
    """

    def __init__(
        self,
        data: pl.LightningDataModule,
        at_batch: int,
        kind: Kind = "random_bytes",
        seed: int = 0,
    ):
        if at_batch < 0:
            raise ValueError(f"expected at_batch >= 0, got {at_batch}")
        if kind not in _KINDS:
            raise ValueError(f"expected kind to be one of {', '.join(_KINDS)}, got {kind!r}")
        self.data = data
        super().__init__()
        self.at_batch, self.seed = at_batch, seed
        self.kind: Kind = kind
        # On the instance, not as methods of the class: Lightning asks of each hook whether it is
        # overridden, and must hear what it would hear of `data`.
        for name in _PASSED_ON:
            setattr(self, name, getattr(data, name))

    @property
    def trainer(self) -> pl.Trainer | None:
        """The trainer, which Lightning assigns here."""
        return self.data.trainer

    @trainer.setter  # a plain attribute in Lightning, which `data` would not see
    def trainer(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, trainer: pl.Trainer | None
    ) -> None:
        self.data.trainer = trainer

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The batch, spoilt if its turn has come."""
        batch = self.data.on_before_batch_transfer(batch, dataloader_idx)
        trainer = self.trainer
        assert trainer is not None
        # The trainer counts a batch only after this hook, and its count survives a resume.
        if not trainer.training or trainer.fit_loop.total_batch_idx + 1 != self.at_batch:
            return batch
        rank_zero_info(f"stabilitykit: planted fault: batch {self.at_batch} is replaced by {self.kind}")
        return spoilt(batch, self.kind, seed=self.seed)


def spoilt(batch: tuple[Tensor, Tensor], kind: Kind, *, seed: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of the shapes of `batch`, token ids below 256 where they are new.

    >>> zeros = torch.zeros(2, 3, dtype=torch.int64)
    >>> inputs, targets = spoilt((zeros, zeros), "repeated_byte", seed=0)
    >>> bool((inputs == targets).all()), len(inputs.unique())
    (True, 1)
    """
    inputs, targets = batch
    generator = torch.Generator().manual_seed(seed)
    if kind == "shuffled_labels":
        order = torch.randperm(targets.numel(), generator=generator)
        return inputs, targets.flatten()[order].view_as(targets)
    rows, length = inputs.shape
    drawn = (1, 1) if kind == "repeated_byte" else (rows, length + 1)
    stream = torch.randint(256, drawn, generator=generator).expand(rows, length + 1)
    return stream[:, :-1].clone(), stream[:, 1:].clone()
