"""stabilitykit: tells why a pretraining run spikes, drifts or diverges. The public names, imported lazily."""

from importlib import import_module
from typing import Any

_HOMES = {
    "AttentionMonitor": "callbacks.attention",
    "LossMonitor": "callbacks.loss",
    "monitors": "callbacks",
    "Tap": "observe.tap",
    "AttentionCall": "observe.tap",
    "exact_attention": "numerics.exact",
    "exact_attention_grad": "numerics.exact",
    "deviation": "numerics.deviation",
    "SpikeDetector": "numerics.spikes",
}
__all__ = [
    "AttentionCall",
    "AttentionMonitor",
    "LossMonitor",
    "SpikeDetector",
    "Tap",
    "deviation",
    "exact_attention",
    "exact_attention_grad",
    "monitors",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stabilitykit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"stabilitykit.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
