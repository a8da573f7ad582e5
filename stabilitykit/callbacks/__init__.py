"""Lightning hooks to measures to records; thin."""

from stabilitykit.callbacks.attention import AttentionMonitor
from stabilitykit.callbacks.loss import LossMonitor
from stabilitykit.callbacks.monitor import Monitor
from stabilitykit.callbacks.precursors import PrecursorMonitor
from stabilitykit.callbacks.ring import RingMonitor
from stabilitykit.callbacks.weights import WeightMonitor


def monitors() -> list[Monitor]:
    """The cheap set recommended for any run: `Trainer(callbacks=stabilitykit.monitors())`."""
    return [LossMonitor(), AttentionMonitor(), PrecursorMonitor()]


__all__ = [
    "AttentionMonitor",
    "LossMonitor",
    "Monitor",
    "PrecursorMonitor",
    "RingMonitor",
    "WeightMonitor",
    "monitors",
]
