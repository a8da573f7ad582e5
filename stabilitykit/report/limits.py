"""The judged numbers of attention, of one rank or across ranks, against the limits of the catalog."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from stabilitykit.catalog import CATALOG, family
from stabilitykit.report.panels import name_of
from stabilitykit.report.reading import Layers, number, show

RATIOS = ("attention/roundoff_ratio", "attention/grad_roundoff_ratio")
RING = tuple(metric.key for metric in family("ring") if metric.threshold)
COUNTS = ("attention/nonfinite", "attention/grad_nonfinite")


class Reading(NamedTuple):
    """One judged number of one layer's row of `numbers`; from `share` 1 on it is bad."""

    key: str
    layer: str
    step: int
    limit: float
    dtype: str
    numbers: dict[str, Any]

    @property
    def value(self) -> float:
        """The number itself."""
        return number(self.numbers[_name(self.key)])

    @property
    def share(self) -> float:
        """Value over limit."""
        return self.value / self.limit

    @property
    def what(self) -> str:
        """The number's name."""
        return f"output {name_of(self.key)}" if _name(self.key) == "roundoff_ratio" else name_of(self.key)

    @property
    def place(self) -> str:
        """The layer, the worst of its heads, and the rank where several trained together."""
        heads = [(number(head.get(_name(self.key))), head) for head in self.numbers.get("heads", [])]
        heads = [(value, head["head"]) for value, head in heads if not math.isnan(value)]
        rank = self.numbers.get("rank") if heads else None  # what is of no head is of all ranks
        return (
            self.layer
            + (f" head {max(heads)[1]}" if heads else "")
            + ("" if rank is None else f" on rank {rank}")
        )

    def __str__(self) -> str:
        of = "" if self.dtype == "any" else f" for {self.dtype}"
        return f"{self.what} {show(self.value)} (limit {self.limit:g}{of}) in {self.place}"


def readings(found: Layers, key: str) -> list[Reading]:
    """Every number of a judged key, against the limit of its layer's format."""
    metric, result = CATALOG[key], []
    for layer, points in found.items():
        for step, numbers in points:
            dtype = str(numbers.get("dtype", "any"))
            limit = metric.limit(dtype)
            if _name(key) in numbers and limit is not None:
                named = dtype if dtype in metric.threshold else "any"
                result.append(Reading(key, layer, step, limit, named, numbers))
    return result


def worst_reading(found: Layers, keys: Sequence[str] = RATIOS) -> Reading | None:
    """The number nearest to, or farthest above, its limit; None when nothing could be judged."""
    ratios = [reading for key in keys for reading in readings(found, key)]
    return max((r for r in ratios if not math.isnan(r.value)), key=lambda r: r.share, default=None)


def _name(key: str) -> str:
    return key.partition("/")[2]
