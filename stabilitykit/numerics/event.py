"""One trouble of a training loss, as it is reported."""

import math
from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True)
class Event:
    """One trouble: steps are values of the log's step column, `end` is None while it is open.

    `start` is the step at which the detector raised, never backdated; `onset` the estimated first bad
    step; `peak` the highest loss; `baseline` the loss expected without the trouble; `score` the peak's
    robust sigmas above it; `recurs_every` the period in steps of events that come again, else None.
    """

    id: int
    kind: str  # "spike" | "divergence" | "shift" | "nonfinite" | "transient"
    start: float
    onset: float
    end: float | None
    peak: float
    peak_step: float
    baseline: float
    score: float
    recurs_every: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields in order; non-finite numbers become "nan", "inf", "-inf" (JSON has no such numbers)."""
        return {field.name: spell(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> "Event":
        """The inverse of `to_dict`."""
        return cls(**{**row, **{key: float(row[key]) for key in ("peak", "baseline", "score")}})


def spell(value: Any) -> Any:
    """`value`, or the name of a number that JSON does not have: "nan", "inf", "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value
