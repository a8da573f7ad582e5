"""What benches share: a training run whose steps are timed, and a row of a result."""

import logging
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytorch_lightning as pl
import torch

from stabilitykit.gpt.module import GPTModule, TextData


class _Clock(pl.Callback):
    """Seconds of every step; the last callback, it sees what the monitors before it took."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._started = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.steps.append(now - self._started)
        self._started = now


def seconds_of_steps(
    shape: dict[str, int], precision: str, callbacks: Sequence[Any], *, steps: int
) -> list[float]:
    """The seconds of each of `steps` training steps of a GPT of this shape, callbacks included."""
    clock = _Clock()
    with TemporaryDirectory() as folder, _quiet():
        trainer = pl.Trainer(
            accelerator="auto",
            devices=1,
            precision=precision,  # pyright: ignore[reportArgumentType]  a literal of Lightning's
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=folder,
            callbacks=[*callbacks, clock],
        )
        torch.manual_seed(0)
        model: dict[str, Any] = {key: value for key, value in shape.items() if key != "batch_size"}
        data = TextData(batch_size=shape["batch_size"], context=shape["context"])
        trainer.fit(GPTModule(vocab_size=256, **model), datamodule=data)
    return clock.steps


def row(name: str, values: Sequence[float], unit: str, limit: float) -> dict[str, Any]:
    """One result: the median of `values`, their middle half (all of them, if few), and median / limit.

    Of a limit of 0 the ratio is 1 where the value is 0 too, else 0.

    >>> row("sort", [2.0, 4.0, 3.0], "s", 6.0)["ratio"]
    0.5
    """
    low, high = min(values), max(values)
    if len(values) > 3:
        low, _, high = statistics.quantiles(values, n=4)
    value = statistics.median(values)
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "limit": limit,
        "ratio": value / limit if limit else float(value == limit),
        "interval": [low, high],
    }


@contextmanager
def _quiet() -> Iterator[None]:
    # Twins that are never measured here say so; the bench knows.
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
