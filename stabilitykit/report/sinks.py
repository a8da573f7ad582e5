"""Hands a step's numbers to every logger; a logger that fails is dropped and training goes on."""

import warnings
from collections.abc import Iterable, Mapping
from typing import Protocol


class MetricLogger(Protocol):
    """What a sink needs of a logger; every Lightning logger has it."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Takes the numbers of one step."""
        ...


class Sinks:
    """Loggers that get one dict per step, unchanged, non-finite numbers included."""

    def __init__(self, loggers: Iterable[MetricLogger]):
        self._loggers = list(loggers)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One call per logger; a logger's first failure is warned about and is its last call."""
        for logger in list(self._loggers):
            try:
                # A copy each: loggers are known to add keys of their own to what they are given.
                logger.log_metrics(dict(values), step=step)
            except Exception as problem:  # whatever a view raises, the run it shows must not die of it
                self._loggers.remove(logger)
                warnings.warn(
                    f"{type(logger).__name__} failed at step {step} and gets no more numbers: {problem!r}",
                    stacklevel=2,
                )
