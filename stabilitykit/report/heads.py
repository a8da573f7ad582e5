"""The layer x head heat map: the latest and the worst number of every head seen so far."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stabilitykit.catalog import CATALOG
from stabilitykit.report.marks import plain
from stabilitykit.report.panels import name_of
from stabilitykit.report.reading import Layers, number, short_names

# From a hundredth of the limit over the limit itself (amber, two thirds up) to ten times it (red).
_LIMITS = [
    [0, "#3b5bb5"],
    [0.4, "#6ea8d8"],
    [0.52, "#a9d3d9"],
    [0.62, "#e3e3a8"],
    [0.667, "#f2a93b"],
    [1, "#c62a2f"],
]
_PLAIN = [[0, "#31215f"], [0.35, "#3b5fb0"], [0.7, "#37b4a5"], [1, "#f4e76e"]]
_TEXT_UP_TO = 16  # heads in a row, that numbers still fit into their cells


class Cell(NamedTuple):
    """One head's number, the step it was measured at and the format of its layer."""

    value: float
    step: int
    dtype: str


Cells = dict[tuple[str, int], Cell]


def heat_map(keys: Sequence[str], found: Layers) -> dict[str, Any] | None:
    """One trace per key and choice, the first visible; `layout.meta.choices` names them all."""
    data: list[dict[str, Any]] = []
    choices: list[str] = []
    for key in keys:
        for label, better in (("latest", _later), ("worst so far", _worse(key))):
            cells = _cells(found, key.partition("/")[2], better)
            if cells:
                data.append(_trace(key, cells, found) | {"visible": not data})
                choices.append(f"{name_of(key)}, {label}")
    if not data:
        return None
    layout = {
        "height": max(220, 120 + 28 * len(found)),
        "hovermode": "closest",
        "margin": {"l": 70, "r": 24, "t": 34, "b": 48},
        "xaxis": {"title": {"text": "head"}, "type": "category", "showgrid": False},
        "yaxis": {
            "autorange": "reversed",
            "type": "category",
            "automargin": True,
            "showgrid": False,
        },
        "meta": {"choices": choices},
    }
    return {"data": data, "layout": layout}


def _later(new: float, old: float) -> bool:
    return True


def _worse(key: str) -> Callable[[float, float], bool]:
    # Entropy is not judged, but what there is to fear of it is a collapse.
    lowest = key == "attention/entropy" or CATALOG[key].bad == "low"
    return (lambda new, old: new < old) if lowest else (lambda new, old: new > old)


def _cells(found: Layers, name: str, better: Callable[[float, float], bool]) -> Cells:
    cells: Cells = {}
    for layer, points in found.items():
        for step, numbers in points:
            for head in numbers.get("heads", []):
                value, at = number(head.get(name)), (layer, int(head["head"]))
                if not math.isnan(value) and (at not in cells or better(value, cells[at].value)):
                    cells[at] = Cell(value, step, str(numbers.get("dtype", "any")))
    return cells


def _trace(key: str, cells: Cells, found: Layers) -> dict[str, Any]:
    """Judged keys are coloured by log10(value / limit), so that formats compare."""
    heads = range(1 + max(head for _, head in cells))
    rows = [[cells.get((layer, head)) for head in heads] for layer in found]
    short = short_names(found)
    judged = bool(CATALOG[key].threshold)
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": [str(head) for head in heads],
        "y": [plain(short[layer]) for layer in found],
        "z": [[_colour(key, cell) if cell else None for cell in row] for row in rows],
        "text": [[f"{cell.value:.3g}" if cell else "" for cell in row] for row in rows],
        "customdata": [[cell and cell.step for cell in row] for row in rows],
        "texttemplate": "%{text}" if len(heads) <= _TEXT_UP_TO else "",
        "hovertemplate": "%{y} head %{x}: %{text}<br>step %{customdata}<extra></extra>",
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "colorscale": _LIMITS if judged else _PLAIN,
        "colorbar": {"thickness": 12, "outlinewidth": 0},
    }
    if judged:
        trace |= {"zmin": -2, "zmax": 1}
        ticks = ["limit / 100", "limit / 10", "limit", "10 x limit"]
        trace["colorbar"] |= {"tickvals": [-2, -1, 0, 1], "ticktext": ticks}
    return trace


def _colour(key: str, cell: Cell) -> float | None:
    if not math.isfinite(cell.value):
        return 1.0 if CATALOG[key].threshold and cell.value > 0 else None
    if not CATALOG[key].threshold:
        return cell.value
    limit = CATALOG[key].limit(cell.dtype)
    return round(math.log10(max(cell.value / limit, 1e-2)), 4) if limit else None
