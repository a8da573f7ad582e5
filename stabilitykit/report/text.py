"""Rows of numbers as plain text."""

from typing import Any


def table(rows: list[dict[str, Any]]) -> str:
    """The rows, at least one, below their column names, right-aligned.

    >>> print(table([{"kind": "spike", "peak": 6.25}]))
     kind  peak
    spike  6.25
    """
    columns = list(rows[0])
    cells = [columns] + [[_cell(row[column]) for column in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "..".join(map(_cell, value))
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
