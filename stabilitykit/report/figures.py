"""Records -> plotly figures as plain dicts; colours that depend on light or dark are the page's."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from stabilitykit.catalog import CATALOG
from stabilitykit.records import Record
from stabilitykit.report.heads import heat_map
from stabilitykit.report.marks import (
    BAD,
    BLUE,
    MUTED,
    attempt_lines,
    event_markers,
    event_spans,
    limit_lines,
    plain,
)
from stabilitykit.report.panels import Form, Panel, name_of
from stabilitykit.report.reading import events, layers, number, short_names, show
from stabilitykit.report.thinning import thin, with_gaps
from stabilitykit.runlog import Records

Figure = dict[str, Any]
Trace = dict[str, Any]


def figure(panel: Panel, records: Records) -> Figure | None:
    """The panel's figure, None when the records hold nothing for it."""
    rows = records.of(panel.kind)
    return _DRAW[panel.form](panel, rows, records) if rows else None


def _curve(panel: Panel, rows: list[Record], records: Records) -> Figure | None:
    """One row per key over a shared step axis, events flagged on all, marked on the first."""
    keys = [key for key in panel.keys if any(key in row.values for row in rows)]
    if not keys:
        return None
    flagged = events(records) if panel.kind == "loss" else []
    flags = {event[at] for event in flagged for at in ("start", "peak_step", "end") if at in event}
    data: list[Trace] = []
    layout = _layout(height=150 + 150 * len(keys))
    for place, key in enumerate(keys):
        steps = [row.step for row in rows if key in row.values]
        values = [row.values[key] for row in rows if key in row.values]
        axis = "y" if place == 0 else f"y{place + 1}"
        data += _line(steps, values, name_of(key), BLUE, axis, flags)
        if place == 0 and flagged:
            data.append(event_markers(flagged, values))
        layout["yaxis" + axis[1:]] = _axis(key, values) | {"domain": _row(place, len(keys))}
    layout["xaxis"] |= {"anchor": "y" if len(keys) == 1 else f"y{len(keys)}"}
    layout["shapes"] = event_spans(flagged, rows[-1].step) + attempt_lines(records)
    layout["showlegend"] = False
    return {"data": data, "layout": layout}


def _layers_over_time(panel: Panel, rows: list[Record], records: Records) -> Figure | None:
    """One line per layer and, where the catalog judges the key, the limit of each format seen."""
    key = panel.keys[0]
    name = key.partition("/")[2]
    measured = layers(rows)
    found = {
        layer: [(step, number(numbers[name])) for step, numbers in points if name in numbers]
        for layer, points in measured.items()
    }
    found = {layer: points for layer, points in found.items() if points}
    if not found:
        return None
    data: list[Trace] = []
    short = short_names(found)
    for place, (layer, points) in enumerate(found.items()):
        steps, values = [step for step, _ in points], [value for _, value in points]
        colour = f"hsl({225 + 165 * place / max(1, len(found) - 1):.0f}, 72%, 61%)"
        data += _line(steps, values, short[layer], colour, "y", set())
    data += limit_lines(key, measured)
    layout = _layout(height=380) | {"hovermode": "closest"}
    layout["yaxis"] = _axis(key, [value for points in found.values() for _, value in points])
    layout["shapes"] = attempt_lines(records)
    return {"data": data, "layout": layout}


def _cost_bars(panel: Panel, rows: list[Record], records: Records) -> Figure | None:
    """One bar per monitor, the total last: cumulative percent of the run without monitors."""
    last = {key: row.values[key] for row in rows for key in panel.keys if key in row.values}
    last = {key: value for key, value in last.items() if math.isfinite(value)}
    if not last:
        return None
    keys = sorted(last, key=lambda key: (key.endswith("/total_percent"), -last[key]))
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": [name_of(key) for key in keys],
        "x": [last[key] for key in keys],
        "text": [f"{show(last[key])} %" for key in keys],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": [MUTED if key.endswith("/total_percent") else BLUE for key in keys]},
        "hovertemplate": "%{y}: %{x:.3g} %<extra></extra>",
    }
    layout = _layout(height=90 + 34 * len(keys))
    layout["xaxis"] = {"title": {"text": "% of the run without monitors"}, "rangemode": "tozero"}
    layout["yaxis"] = {"autorange": "reversed", "type": "category", "automargin": True}
    layout |= {"hovermode": "closest", "bargap": 0.35}
    return {"data": [bar], "layout": layout}


def _heat_map(panel: Panel, rows: list[Record], records: Records) -> Figure | None:
    return heat_map(panel.keys, layers(rows))


_DRAW: dict[Form, Callable[[Panel, list[Record], Records], Figure | None]] = {
    "curve": _curve,
    "layers over time": _layers_over_time,
    "layer x head heat map": _heat_map,
    "cost bars": _cost_bars,
}


def _line(
    steps: list[int], values: list[float], name: str, colour: str, axis: str, flags: set[int]
) -> list[Trace]:
    """The thinned curve, and crosses at the top where it is not finite."""
    keep = [at for at, step in enumerate(steps) if step in flags]
    x, y = with_gaps(steps, values, keep=keep)
    label = plain(name)
    line: Trace = {
        "type": "scatter",
        # Without markers a lone point between two gaps would not be drawn at all.
        "mode": "lines+markers" if len(x) <= 60 or None in y else "lines",
        "x": x,
        "y": y,
        "name": label,
        "yaxis": axis,
        "line": {"color": colour, "width": 1.6},
        "marker": {"size": 4},
        "hovertemplate": f"{label} " + "%{y:.4g}<extra></extra>",
    }
    bad = [at for at, value in enumerate(values) if not math.isfinite(value)]
    if not bad:
        return [line]
    # Positions as values: of each stretch the first and the last stay.
    bad = [bad[at] for at in thin(bad)]
    top = max((value for value in values if math.isfinite(value)), default=1.0)
    crosses: Trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [steps[at] for at in bad],
        "y": [top] * len(bad),
        "name": f"{label} not finite",
        "yaxis": axis,
        "showlegend": False,
        "marker": {"symbol": "x", "size": 7, "color": BAD},
        "text": [show(values[at]) for at in bad],
        "hovertemplate": f"{label} " + "%{text}<extra></extra>",
    }
    return [line, crosses]


def _row(place: int, count: int) -> list[float]:
    """Domain of one of `count` stacked rows; the first is on top and twice as high."""
    gap = 0.05
    unit = (1 - gap * (count - 1)) / (count + 1)
    top = 1.0 if place == 0 else 1 - 2 * unit - gap - (place - 1) * (unit + gap)
    return [round(max(0.0, top - (2 * unit if place == 0 else unit)), 4), round(top, 4)]


def _axis(key: str, values: Sequence[float]) -> dict[str, Any]:
    """Logarithmic where the catalog judges a ratio, or where the values span over three decades."""
    metric = CATALOG[key]
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    logarithmic = low > 0 and (high > 1000 * low or (metric.threshold and metric.unit == "ratio"))
    title = name_of(key) + (f" ({metric.unit})" if metric.unit not in ("", "ratio") else "")
    axis: dict[str, Any] = {"title": {"text": title}, "automargin": True}
    if logarithmic:
        return axis | {"type": "log", "minorloglabels": "complete"} | _log_ticks(high / low)
    return axis | ({"range": [0, 1.05]} if metric.unit == "share" else {})


def _log_ticks(span: float) -> dict[str, Any]:
    # Within a decade plotly chooses well; over one it would number every digit.
    if span < 10:
        return {}
    return {"dtick": "D2" if span < 1000 else 1}


def _layout(*, height: int) -> dict[str, Any]:
    return {
        "height": height,
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "margin": {"l": 70, "r": 24, "t": 32, "b": 48},
        "xaxis": {"title": {"text": "step"}},
        "legend": {"orientation": "v", "x": 1.01, "y": 1, "xanchor": "left"},
    }
