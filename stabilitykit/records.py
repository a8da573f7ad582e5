"""What a monitor writes: one record per optimizer step and kind."""

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """Numbers of one optimizer step (0-based) and one kind; `attempt` grows by one on every resume."""

    step: int
    attempt: int
    kind: str
    values: dict[str, float] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict; non-finite numbers become "nan", "inf", "-inf" (JSON has no such numbers)."""
        return {
            "step": self.step,
            "attempt": self.attempt,
            "kind": self.kind,
            "values": spell(self.values),
            "detail": spell(self.detail),
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Record":
        """The inverse of `to_json` for `values`; `detail` keeps its spelled-out numbers.

        Raises:
            ValueError: a row that is no record, with what it lacks.
        """
        try:
            values = {key: float(value) for key, value in row["values"].items()}
            return cls(
                int(row["step"]),
                int(row["attempt"]),
                str(row["kind"]),
                values,
                row.get("detail", {}),
            )
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"expected a record with step, attempt, kind, values: {problem!r}") from problem


def spell(value: Any) -> Any:
    """`value` with every non-finite float, at any depth, replaced by its name.

    >>> spell({"a": [1.0, float("-inf")]})
    {'a': [1.0, '-inf']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(key): spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell(item) for item in value]
    return value


def one_line(problem: BaseException) -> str:
    r"""The message with its line breaks folded.

    >>> one_line(ValueError("expected a,\n   got b"))
    'expected a, got b'
    """
    return " ".join(str(problem).split()) or type(problem).__name__
