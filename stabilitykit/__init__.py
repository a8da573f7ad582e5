"""stabilitykit: why a pretraining run spikes, drifts or diverges. The public names, imported lazily."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stabilitykit.callbacks import (
        AttentionMonitor,
        LossMonitor,
        PrecursorMonitor,
        RingMonitor,
        WeightMonitor,
        monitors,
    )
    from stabilitykit.numerics.deviation import deviation
    from stabilitykit.numerics.emulated import emulated_flash_attention, emulated_flash_attention_grad
    from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
    from stabilitykit.numerics.spikes import SpikeDetector
    from stabilitykit.numerics.wasserstein import wasserstein
    from stabilitykit.observe.arm import Arm
    from stabilitykit.observe.tap import AttentionCall, Tap
    from stabilitykit.observe.twin import Twin
    from stabilitykit.observe.watch import watch
    from stabilitykit.parallel.layout import shard, unshard
    from stabilitykit.parallel.ring import ring_attention
    from stabilitykit.skiplist import SkippingBatchSampler

_HOMES = {
    "Arm": "observe.arm",
    "AttentionCall": "observe.tap",
    "AttentionMonitor": "callbacks",
    "LossMonitor": "callbacks",
    "PrecursorMonitor": "callbacks",
    "RingMonitor": "callbacks",
    "SkippingBatchSampler": "skiplist",
    "SpikeDetector": "numerics.spikes",
    "Tap": "observe.tap",
    "Twin": "observe.twin",
    "WeightMonitor": "callbacks",
    "deviation": "numerics.deviation",
    "emulated_flash_attention": "numerics.emulated",
    "emulated_flash_attention_grad": "numerics.emulated",
    "exact_attention": "numerics.exact",
    "exact_attention_grad": "numerics.exact",
    "monitors": "callbacks",
    "ring_attention": "parallel.ring",
    "shard": "parallel.layout",
    "unshard": "parallel.layout",
    "wasserstein": "numerics.wasserstein",
    "watch": "observe.watch",
}
__all__ = [
    "Arm",
    "AttentionCall",
    "AttentionMonitor",
    "LossMonitor",
    "PrecursorMonitor",
    "RingMonitor",
    "SkippingBatchSampler",
    "SpikeDetector",
    "Tap",
    "Twin",
    "WeightMonitor",
    "deviation",
    "emulated_flash_attention",
    "emulated_flash_attention_grad",
    "exact_attention",
    "exact_attention_grad",
    "monitors",
    "ring_attention",
    "shard",
    "unshard",
    "wasserstein",
    "watch",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stabilitykit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"stabilitykit.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
