"""Heat maps as pixels, for loggers that take images: what a record's `detail` holds beside the numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stabilitykit.catalog import CATALOG

if TYPE_CHECKING:
    from numpy import ndarray

Cells = Mapping[tuple[str, int], float]  # row name, column -> number

# Viridis at five places: darker is lower for every eye, in grey print too.
SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
UNKNOWN, NOT_FINITE = (190, 190, 190), (220, 38, 38)
LARGEST_CELL, LARGEST_SIDE = 24, 1024  # pixels


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One image per record of a kind: its logger key, its cells, and 10 ** low to 10 ** high in colours."""

    key: str
    cells: Callable[[Mapping[str, Any]], dict[tuple[str, int], float]]
    low: float
    high: float
    caption: str


def heads(detail: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """Roundoff ratio over its limit, per layer and measured head; formats without a limit are left out.

    >>> head = {"head": 3, "roundoff_ratio": 6.0}
    >>> heads({"layers": {"h.0": {"dtype": "bfloat16", "heads": [head]}}})
    {('h.0', 3): 2.0}
    """
    cells = {}
    for layer, row in detail["layers"].items():
        limit = CATALOG["attention/roundoff_ratio"].limit(row["dtype"])
        if limit is not None:
            cells |= {(layer, head["head"]): head["roundoff_ratio"] / limit for head in row["heads"]}
    return cells


def tensors(detail: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """Relative L2 distance per tensor: a row per arm and layer, a column per tensor of a layer.

    >>> rows = {"wte": {"rel_l2": 0.5}, "h.0.w": {"rel_l2": 0.1}, "h.1.w": {"rel_l2": 0.2}}
    >>> tensors({"tensors": {"float32": rows}})
    {('float32 ', 0): 0.5, ('float32 h.0', 1): 0.1, ('float32 h.1', 1): 0.2}
    """
    columns: dict[str, int] = {}
    cells = {}
    for arm, rows in detail["tensors"].items():
        for name, numbers in rows.items():
            layer, rest = _split(name)
            cells[f"{arm} {layer}", columns.setdefault(rest, len(columns))] = numbers["rel_l2"]
    return cells


def _split(name: str) -> tuple[str, str]:
    # h.3.attn.weight -> h.3, attn.weight: tensors of one part line up over the layers
    parts = name.split(".")
    end = next((at + 1 for at, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[:end]), ".".join(parts[end:])


HEAT_MAPS: dict[str, HeatMap] = {  # by kind of record
    "attention": HeatMap(
        "attention/heat_map",
        heads,
        -2,
        1,
        "Roundoff ratio, latest of each head: a row per layer, first on top, a column per head. Dark "
        "violet: limit / 100; light green: the limit; yellow: 10 x the limit; grey: not measured, or a "
        "format without a limit; red: not finite.",
    ),
    "weights": HeatMap(
        "weights/heat_map",
        tensors,
        -8,
        0,
        "Relative L2 distance of each tensor: a row per arm and layer, a column per tensor of a layer. Dark "
        "violet: 1e-8 and below; yellow: 1; grey: no such tensor; red: not finite.",
    ),
}


def paint(cells: Cells, low: float, high: float) -> "ndarray":
    """uint8 [H, W, 3]: log10 of each number, from `low` (violet) to `high` (yellow), in square cells.

    Rows stand in the order in which they first come; the last column is the highest there is.
    """
    import numpy as np

    rows = {row: at for at, row in enumerate(dict.fromkeys(row for row, _ in cells))}
    shape = len(rows), 1 + max(column for _, column in cells)
    pixels = np.full((*shape, 3), UNKNOWN, np.uint8)
    where = tuple(np.array([(rows[row], column) for row, column in cells]).T)
    pixels[where] = _colours(np.array(list(cells.values()), float), low, high)
    side = max(1, min(LARGEST_CELL, LARGEST_SIDE // max(shape)))
    return pixels.repeat(side, 0).repeat(side, 1)


def _colours(values: "ndarray", low: float, high: float) -> "ndarray":
    import numpy as np

    finite = np.isfinite(values)
    places = np.log10(np.maximum(np.where(finite, values, 1.0), 10.0**low))
    anchors = np.linspace(low, high, len(SCALE))
    colours = np.stack([np.interp(places, anchors, channel) for channel in zip(*SCALE, strict=True)], -1)
    colours[~finite] = NOT_FINITE
    return colours.round().astype(np.uint8)
