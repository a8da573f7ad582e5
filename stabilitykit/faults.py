"""Faults planted on purpose, for the zoo, the studies and the tests."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from stabilitykit.observe.tap import Tap

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

    What is spoilt are the batch's samples: where a skip list leaves them out, nothing is.

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
        redrawn = getattr(
            trainer.train_dataloader, "redrawn", None
        )  # as our own loader, `gpt.corpus.Batches`
        if redrawn is not None and redrawn(self.at_batch):
            _say(f"none: the skip list leaves out batch {self.at_batch}")
            return batch
        _say(f"batch {self.at_batch} is replaced by {self.kind}")
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


class PlantedLearningRate(pl.Callback):
    """One optimizer step with a learning rate that is `factor` times too high: planted, not found.

    Args:
        at_step: The step, 0-based.
        factor: What the learning rate of every parameter group is multiplied by.
    """

    def __init__(self, at_step: int, factor: float = 30.0):
        self.at_step, self.factor = _checked(at_step), factor
        self._handles: list[Any] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Raises the learning rate until the optimizer has stepped, before any scheduler sees it."""
        if _step(trainer) != self.at_step:
            return
        _say(f"the learning rate of step {self.at_step} is multiplied by {self.factor:g}")
        before = [group["lr"] for group in optimizer.param_groups]

        def put_back(*_: Any) -> None:
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate

        self._handles.append(optimizer.register_step_post_hook(put_back))
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The optimizer has stepped."""
        while self._handles:
            self._handles.pop().remove()


class PlantedSecondMoment(pl.Callback):
    """Adam's second moment multiplied by `factor` before one step: zeroed, or stale. Planted, not found.

    Args:
        at_step: The step, 0-based.
        factor: 0 zeroes it, as a faulty resume does; 1.0e-4 makes it stale.
    """

    def __init__(self, at_step: int, factor: float = 0.0):
        self.at_step, self.factor = _checked(at_step), factor

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Changes the moments just before they are used.

        Raises:
            ValueError: an optimizer that keeps none.
        """
        if _step(trainer) != self.at_step:
            return
        moments = [state["exp_avg_sq"] for state in optimizer.state.values() if "exp_avg_sq" in state]
        if not moments:
            raise ValueError(
                f"expected an optimizer that has second moments (exp_avg_sq) at step {self.at_step}, got "
                f"{type(optimizer).__name__} without"
            )
        _say(f"the second moment before step {self.at_step} is multiplied by {self.factor:g}")
        for moment in moments:
            moment.mul_(self.factor)


class PlantedScale(pl.Callback):
    """The scale of attention's scores wrong in some heads of one layer from a step on: planted, not found.

    Args:
        at_step: The first step with the fault, 0-based.
        layer: The attention call it is in, by its place in the forward pass, 0-based.
        heads: How many query heads, the first ones.
        factor: What their scale is multiplied by: 0, 0.1, or -1 for its sign flipped.
    """

    def __init__(self, at_step: int, layer: int = 0, heads: int = 4, factor: float = 0.0):
        for name, value, least in (("layer", layer, 0), ("heads", heads, 1)):
            if value < least:
                raise ValueError(f"expected {name} >= {least}, got {value}")
        self.at_step, self.layer, self.heads, self.factor = _checked(at_step), layer, heads, factor
        self._said = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on `training_step` attends through the fault, when its time has come."""
        original = pl_module.training_step

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if _step(trainer) < self.at_step:
                return original(*args, **kwargs)
            if not self._said:
                self._said = True
                where = f"{self.heads} heads of attention {self.layer}"
                _say(f"from step {self.at_step} the scale in {where} is multiplied by {self.factor:g}")
            with Tap(pl_module, replace=self._replacement()):
                return original(*args, **kwargs)

        vars(pl_module)["training_step"] = training_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """`training_step` is the module's own again."""
        vars(pl_module).pop("training_step", None)

    def _replacement(self) -> Callable[..., Tensor]:
        calls = itertools.count()

        def attend(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
            if next(calls) == self.layer:
                # On q, so that whoever watches from outside sees the scores that the kernel sees.
                factors = torch.ones(q.shape[1], 1, 1, dtype=q.dtype, device=q.device)
                factors[: self.heads] = self.factor
                q = q * factors
            return F.scaled_dot_product_attention(q, k, v, **kwargs)

        return attend


def _checked(at_step: int) -> int:
    if at_step < 0:
        raise ValueError(f"expected at_step >= 0, got {at_step}")
    return at_step


def _step(trainer: pl.Trainer) -> int:
    """The optimizer step in progress: Lightning counts that of every optimizer."""
    return trainer.global_step // max(len(trainer.optimizers), 1)


def _say(what: str) -> None:
    rank_zero_info(f"stabilitykit: planted fault: {what}")
