"""Two checkpoints compared, as one HTML file: a heat map of layers by tensors."""

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from stabilitykit.report.marks import plain
from stabilitykit.report.reading import show
from stabilitykit.report.shell import card, page, verdict

QUANTITIES = {"rel_l2": "relative L2", "w1": "W1", "max_abs": "largest difference"}
_LAYER = re.compile(r"(.*?\.\d+)\.(.*)")  # up to the first number in the name
_COLOURS = [[0, "#31215f"], [0.35, "#3b5fb0"], [0.7, "#37b4a5"], [1, "#f4e76e"]]

Rows = Sequence[dict[str, Any]]


def write_comparison(rows: Rows, a: Path, b: Path, notes: Sequence[str], out: Path) -> Path:
    """The path of the HTML file written; `rows` are those of `compared`, the last for all weights."""
    found = distance_map(rows[:-1])
    whole = rows[-1]
    differ = whole["max_abs"] != 0
    told = f"relative L2 {show(whole['rel_l2'])}, W1 {show(whole['w1'])}, largest {show(whole['max_abs'])}"
    drawn: list[dict[str, Any]] = []
    said = "".join(f"<li class=unknown>{escape(note)}</li>" for note in notes)
    headline = f"The weights differ: {told}" if differ else "The weights are the same"
    body = (
        verdict("unknown" if differ else "good", headline, f"<ul>{said}</ul>"),
        f'<section id="map"><h2>Weights</h2>{card("By layer, log10", found, (), drawn)}',
        f'<p class="path">{escape(f"{a.resolve()}, {b.resolve()}")}</p></section>',
    )
    html = page(
        title=f"{a.name} and {b.name}",
        eyebrow="Comparison",
        navigation=[("map", "Weights")],
        body="\n".join(body),
        figures=drawn,
    )
    out.write_text(html, encoding="utf-8")
    return out


def distance_map(rows: Rows) -> dict[str, Any]:
    """One trace per quantity, the first visible, coloured by log10; what is 0 or not finite has no colour."""
    places = {row["tensor"]: _place(row["tensor"]) for row in rows}
    layers = sorted({layer for layer, _ in places.values()}, key=_by_number)
    tensors = sorted({tensor for _, tensor in places.values()})
    at = {places[row["tensor"]]: row for row in rows}
    data = []
    for quantity in QUANTITIES:
        cells = [[at[layer, t][quantity] if (layer, t) in at else None for t in tensors] for layer in layers]
        data.append(
            {
                "type": "heatmap",
                "x": [plain(tensor) for tensor in tensors],
                "y": [plain(layer) for layer in layers],
                "z": [[_colour(value) for value in line] for line in cells],
                "text": [["" if value is None else show(value) for value in line] for line in cells],
                "texttemplate": "%{text}" if len(tensors) <= 16 else "",
                "hovertemplate": "%{y} %{x}: %{text}<extra></extra>",
                "xgap": 2,
                "ygap": 2,
                "colorscale": _COLOURS,
                "colorbar": {"thickness": 12, "outlinewidth": 0},
                "visible": not data,
            }
        )
    axis = {"type": "category", "automargin": True, "showgrid": False}
    layout = {
        "height": max(220, 160 + 28 * len(layers)),
        "hovermode": "closest",
        "margin": {"l": 70, "r": 24, "t": 34, "b": 48},
        "xaxis": axis,
        "yaxis": axis | {"autorange": "reversed"},
        "meta": {"choices": list(QUANTITIES.values())},
    }
    return {"data": data, "layout": layout}


def _place(name: str) -> tuple[str, str]:
    found = _LAYER.fullmatch(name)
    return (found[1], found[2]) if found else ("outside", name)


def _by_number(layer: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in layer.split(".")]


def _colour(value: float | None) -> float | None:
    return round(math.log10(value), 4) if value is not None and 0 < value < math.inf else None
