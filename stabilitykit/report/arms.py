"""The weights' figures: each arm's distance over steps beside the noise floor, and tensor by tensor."""

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from statistics import median
from typing import Any, NamedTuple

from stabilitykit.records import Record
from stabilitykit.report.curves import Trace, domain, draw_line, frame, y_axis
from stabilitykit.report.marks import BAD, BLUE, MUTED, attempt_lines, plain
from stabilitykit.report.panels import name_of
from stabilitykit.report.reading import counted, number, short_names, show
from stabilitykit.report.thinning import thin
from stabilitykit.report.weights import arms, floor
from stabilitykit.runlog import Records

_BAND = "rgba(139,141,152,0.28)"
_COLOURS = (BLUE, "#e0861a", "#12a594", "#8e4ec6", "#978365")  # none is the red of what is bad
_TENSORS_SHOWN = 60


class Spread(NamedTuple):
    """The lowest and the highest distance that nothing but rounding made, over the jitter seeds."""

    step: int
    low: float
    high: float


def arms_over_steps(keys: Sequence[str], rows: list[Record], records: Records) -> dict[str, Any] | None:
    """One row per key over a shared step axis: a line per arm, and the noise floor as a band."""
    found = arms(rows)
    keys = [key for key in keys if any(_of(key, arm) in row.values for row in rows for arm in found)]
    if not keys:
        return None
    data: list[Trace] = []
    layout = frame(height=230 + 130 * len(keys))
    for place, key in enumerate(keys):
        name = "y" if place == 0 else f"y{place + 1}"
        traces, axis = _row(key, rows, found, name)
        data += [trace | {"showlegend": place == 0 and trace.get("showlegend", True)} for trace in traces]
        layout["yaxis" + name[1:]] = axis | {"domain": domain(place, len(keys))}
    layout["xaxis"] |= {"anchor": "y" if len(keys) == 1 else f"y{len(keys)}"}
    if rows[0].step == rows[-1].step:
        layout["xaxis"] |= {"dtick": 1, "tickformat": "d", "range": [rows[0].step - 2, rows[0].step + 2]}
    layout["shapes"] = attempt_lines(records)
    return {"data": data, "layout": layout}


def _of(key: str, arm: str) -> str:
    return key.replace("/ARM/", f"/{arm}/")


def _row(
    key: str, rows: list[Record], found: dict[str, str], axis_name: str
) -> tuple[list[Trace], dict[str, Any]]:
    """The traces of one key, the floor below the arms, and their axis."""
    spreads = [_spread(row, key) for row in rows]
    lines = {
        text: [(row.step, row.values[_of(key, arm)]) for row in rows if _of(key, arm) in row.values]
        for arm, text in found.items()
    }
    lines = {text: points for text, points in lines.items() if points}
    edges = [edge for spread in spreads if spread for edge in spread[1:]]
    values = [*edges, *(value for points in lines.values() for _, value in points)]
    positive = [value for value in values if math.isfinite(value) and value > 0]
    in_floors = key.endswith("_over_floor")
    axis = _axis(key, positive, log_from=10 if in_floors else 1)
    bottom = min(positive) / 2 if axis.get("type") == "log" else 0.0
    traces = _band(rows, spreads, bottom, axis_name) if edges else []
    for place, (text, points) in enumerate(lines.items()):
        steps, numbers = [step for step, _ in points], [value for _, value in points]
        colour = _COLOURS[place % len(_COLOURS)]
        drawn = draw_line(steps, numbers, text, colour, axis_name, set())
        drawn += _zeros(points, text, colour, axis_name, bottom)
        traces += [trace | {"legendgroup": plain(text)} for trace in drawn]
    return traces, axis


def _axis(key: str, positive: Sequence[float], *, log_from: float) -> dict[str, Any]:
    """From 0 on when it is not logarithmic; small distances in powers of ten, not in micros."""
    axis = y_axis(key, positive, log_from=log_from)
    if max(positive, default=1.0) < 0.1:
        axis |= {"exponentformat": "power"}
    return axis if axis.get("type") == "log" else axis | {"rangemode": "tozero"}


def _spread(row: Record, key: str) -> Spread | None:
    """The floor of one record in the key's unit; None where none, or none that is finite, was measured."""
    name = key.rpartition("/")[2]
    seeds = floor(row, name.removesuffix("_over_floor"))
    if not seeds or not all(map(math.isfinite, seeds)):
        return None
    unit = median(seeds) if name.endswith("_over_floor") else 1.0
    return Spread(row.step, min(seeds) / unit, max(seeds) / unit) if unit else None


def _band(rows: list[Record], spreads: list[Spread | None], bottom: float, axis: str) -> list[Trace]:
    """One polygon per stretch of records with a floor; a lone record's is as wide as half a step between."""
    reach = min((b.step - a.step for a, b in pairwise(rows) if b.step > a.step), default=2) / 4
    x: list[float | None] = []
    y: list[float | None] = []
    for measured, stretch in groupby(spreads, key=lambda spread: spread is not None):
        if not measured:
            continue
        edge = [spread for spread in stretch if spread]
        kept = sorted({*thin([s.low for s in edge]), *thin([s.high for s in edge])})
        edge = [edge[at] for at in kept]
        if len(edge) == 1:
            edge = [edge[0]._replace(step=edge[0].step + side * reach) for side in (-1, 1)]
        outline = [(s.step, s.high) for s in edge] + [(s.step, s.low) for s in reversed(edge)]
        outline.append(outline[0])
        gap = [None] if x else []
        x += [*gap, *(step for step, _ in outline)]
        y += [*gap, *(max(value, bottom) for _, value in outline)]
    seeds = max(len(floor(row, "rel_l2")) for row in rows)
    band: Trace = {
        "type": "scatter",
        "mode": "lines",
        "fill": "toself",
        "x": x,
        "y": y,
        "name": f"noise floor ({counted(seeds, 'jitter seed')})",
        "yaxis": axis,
        "legendgroup": "floor",
        "fillcolor": _BAND,
        "line": {"color": MUTED, "width": 1},
        "hoverinfo": "skip",
    }
    return [band]


def _zeros(points: list[tuple[int, float]], text: str, colour: str, axis: str, bottom: float) -> list[Trace]:
    """Triangles at the bottom of a logarithmic axis, which has no 0."""
    steps = [step for step, value in points if value == 0]
    if not steps or not bottom:
        return []
    label = plain(text)
    return [
        {
            "type": "scatter",
            "mode": "markers+text",
            "x": steps,
            "y": [bottom] * len(steps),
            "name": f"{label} exactly 0",
            "yaxis": axis,
            "showlegend": False,
            "marker": {"symbol": "triangle-down-open", "size": 9, "color": colour},
            "text": ["0"] * len(steps),
            "textposition": "top center",
            "hovertemplate": f"{label} exactly 0<extra></extra>",
        }
    ]


def tensor_dots(key: str, rows: list[Record]) -> dict[str, Any] | None:
    """One dot per tensor of the latest record in the model's order; `layout.meta.choices` names the arms."""
    rows = [row for row in rows if row.detail.get("tensors")]
    if not rows:
        return None
    name, last = key.rpartition("/")[2], rows[-1]
    found = {
        arm: _largest({tensor: number(numbers.get(name)) for tensor, numbers in tensors.items()})
        for arm, tensors in last.detail["tensors"].items()
    }
    positive = [v for tensors in found.values() for v in tensors.values() if math.isfinite(v) and v > 0]
    count = max(len(tensors) for tensors in found.values())
    total = max(len(tensors) for tensors in last.detail["tensors"].values())
    of = f", the {count} largest of {total:,} tensors" if count < total else ""
    layout = frame(height=110 + 18 * count) | {"hovermode": "closest", "showlegend": False}
    layout["xaxis"] = _axis(key, positive, log_from=1)
    layout["xaxis"]["title"] = {"text": f"{name_of(key)} at step {last.step}{of}"}
    layout["yaxis"] = {"autorange": "reversed", "type": "category", "automargin": True}
    layout["meta"] = {"choices": list(found)}
    ends = (min(positive, default=0.0) / 2, max(positive, default=1.0))
    data = [_dots(tensors, ends) | {"visible": at == 0} for at, tensors in enumerate(found.values())]
    return {"data": data, "layout": layout}


def _largest(tensors: dict[str, float]) -> dict[str, float]:
    """At most so many that a reader can look through them; what is no number comes before all others."""
    order = sorted(tensors, key=lambda tensor: -tensors[tensor] if tensors[tensor] >= 0 else -math.inf)
    kept = set(order[:_TENSORS_SHOWN])
    return {tensor: value for tensor, value in tensors.items() if tensor in kept}


def _dots(tensors: dict[str, float], ends: tuple[float, float]) -> Trace:
    """0 is a triangle at the low end, what is not finite a cross at the high end, both with their text."""
    values = list(tensors.values())
    finite = [math.isfinite(value) for value in values]
    short = short_names(tensors)
    return {
        "type": "scatter",
        "mode": "markers+text",
        "x": [(v or ends[0]) if ok else ends[1] for v, ok in zip(values, finite, strict=True)],
        "y": [plain(short[tensor]) for tensor in tensors],
        "marker": {
            "size": 8,
            "color": [BLUE if ok else BAD for ok in finite],
            "symbol": [
                ("circle" if v else "triangle-left-open") if ok else "x"
                for v, ok in zip(values, finite, strict=True)
            ],
        },
        "text": ["" if ok and v else show(v) for v, ok in zip(values, finite, strict=True)],
        "textposition": "middle right",
        "customdata": [show(v) for v in values],
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
    }
