"""Records -> plotly figures as plain dicts; colours that depend on light or dark are the page's."""

import math
from collections.abc import Callable
from typing import Any

from stabilitykit.records import Record
from stabilitykit.report.arms import arms_over_steps, tensor_dots
from stabilitykit.report.curves import Trace, domain, draw_line, frame, hue, y_axis
from stabilitykit.report.heads import heat_map
from stabilitykit.report.marks import BLUE, MUTED, attempt_lines, event_markers, event_spans, limit_lines
from stabilitykit.report.panels import Form, Panel, name_of
from stabilitykit.report.reading import events, is_about, layers, number, short_names, show
from stabilitykit.runlog import Records

Figure = dict[str, Any]
_PEAKED = ("loss/value", "ring/transport")  # what the peak of an event is a value of


def figure(panel: Panel, records: Records) -> Figure | None:
    """The panel's figure, None when the records hold nothing for it."""
    rows = records.of(panel.kind)
    return _DRAW[panel.form](panel, rows, records) if rows else None


def _curve(panel: Panel, rows: list[Record], records: Records) -> Figure | None:
    """One row per key over a shared step axis, events flagged on all, marked on what peaked."""
    keys = [key for key in panel.keys if any(key in row.values for row in rows)]
    if not keys:
        return None
    flagged = _flagged(panel, records)
    flags = {event[at] for event in flagged for at in ("start", "peak_step", "end") if at in event}
    data: list[Trace] = []
    layout = frame(height=150 + 150 * len(keys))
    for place, key in enumerate(keys):
        steps = [row.step for row in rows if key in row.values]
        values = [row.values[key] for row in rows if key in row.values]
        axis = "y" if place == 0 else f"y{place + 1}"
        data += draw_line(steps, values, name_of(key), BLUE, axis, flags)
        if key in _PEAKED and flagged:
            data.append(event_markers(flagged, values))
        layout["yaxis" + axis[1:]] = y_axis(key, values) | {"domain": domain(place, len(keys))}
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
        data += draw_line(steps, values, short[layer], hue(place, len(found)), "y", set())
    data += limit_lines(key, measured)
    layout = frame(height=380) | {"hovermode": "closest"}
    layout["yaxis"] = y_axis(key, [value for points in found.values() for _, value in points])
    layout["shapes"] = event_spans(_flagged(panel, records), rows[-1].step) + attempt_lines(records)
    return {"data": data, "layout": layout}


def _flagged(panel: Panel, records: Records) -> list[dict[str, Any]]:
    """The events of the panel's own kind."""
    return [event for event in events(records) if is_about(event, panel.kind)]


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
    layout = frame(height=90 + 34 * len(keys))
    layout["xaxis"] = {"title": {"text": "% of the run without monitors"}, "rangemode": "tozero"}
    layout["yaxis"] = {"autorange": "reversed", "type": "category", "automargin": True}
    layout |= {"hovermode": "closest", "bargap": 0.35}
    return {"data": [bar], "layout": layout}


def _rank_bars(panel: Panel, rows: list[Record], records: Records) -> Figure | None:
    """Per rank, at the last look, CPU seconds of work and seconds of waiting; its tiles as text."""
    rings = next((row.detail["balance"] for row in reversed(rows) if row.detail.get("balance")), [])
    if not rings:
        return None
    ranks = sorted((rank, i, ring) for ring in rings for i, rank in enumerate(ring["ranks"]))
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [f"rank {rank}" for rank, _, _ in ranks],
            "x": [number(ring[key][i]) for _, i, ring in ranks],
            "customdata": [ring["tiles"][i] for _, i, ring in ranks],
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}: %{{x:.3g}} s {name}, %{{customdata}} tiles<extra></extra>",
        }
        for key, name, colour in (("work_s", "work", BLUE), ("wait_s", "waiting", MUTED))
    ]
    bars[0] |= {"text": [f"{ring['tiles'][i]:,} tiles" for _, i, ring in ranks]}
    layout = frame(height=110 + 34 * len(ranks))
    layout["xaxis"] = {"title": {"text": "seconds, both passes of all layers"}, "rangemode": "tozero"}
    layout["yaxis"] = {"autorange": "reversed", "type": "category", "automargin": True}
    layout |= {"hovermode": "closest", "bargap": 0.35, "barmode": "stack"}
    return {"data": bars, "layout": layout}


def _heat_map(panel: Panel, rows: list[Record], records: Records) -> Figure | None:
    return heat_map(panel.keys, layers(rows))


def _arms(panel: Panel, rows: list[Record], records: Records) -> Figure | None:
    return arms_over_steps(panel.keys, rows, records)


def _tensors(panel: Panel, rows: list[Record], records: Records) -> Figure | None:
    return tensor_dots(panel.keys[0], rows)


_DRAW: dict[Form, Callable[[Panel, list[Record], Records], Figure | None]] = {
    "curve": _curve,
    "layers over time": _layers_over_time,
    "layer x head heat map": _heat_map,
    "arms over steps": _arms,
    "distance per tensor": _tensors,
    "rank bars": _rank_bars,
    "cost bars": _cost_bars,
}
