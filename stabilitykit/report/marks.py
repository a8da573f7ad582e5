"""What is drawn over a curve: flagged events, attempts, limits."""

import html
import math
from collections.abc import Sequence
from typing import Any

from stabilitykit.catalog import CATALOG
from stabilitykit.report.reading import Layers, number, show
from stabilitykit.runlog import Records

BAD, MUTED, BLUE = "#e5484d", "#8b8d98", "#3e7bfa"


def event_markers(flagged: Sequence[dict[str, Any]], values: Sequence[float]) -> dict[str, Any]:
    """A diamond at each event's peak; at the top of the curve when the peak is not finite."""
    top = max((value for value in values if math.isfinite(value)), default=1.0)
    peaks = [number(event.get("peak")) for event in flagged]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [event.get("peak_step", event["start"]) for event in flagged],
        "y": [peak if math.isfinite(peak) else top for peak in peaks],
        "name": "events",
        "yaxis": "y",
        "marker": {
            "symbol": "diamond",
            "size": 11,
            "color": BAD,
            "line": {"width": 1.5, "color": "white"},
        },
        "text": [_event_text(event) for event in flagged],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _event_text(event: dict[str, Any]) -> str:
    end = event.get("end")
    peak, baseline, score = (show(number(event.get(k))) for k in ("peak", "baseline", "score"))
    lines = [
        f"{event.get('kind', 'event')}: {peak} at step {event.get('peak_step')}",
        f"baseline {baseline}, score {score}",
        f"from step {event['start']}, " + ("still open" if end is None else f"over at {end}"),
        str(event.get("message") or ""),
    ]
    return "<br>".join(plain(line) for line in lines if line)


def event_spans(flagged: Sequence[dict[str, Any]], last: float) -> list[dict[str, Any]]:
    """A shaded interval per event, up to step `last` for one still open."""

    def span(event: dict[str, Any]) -> dict[str, Any]:
        end = last if event.get("end") is None else event["end"]
        # The edge keeps a one-step event visible in a run of 50,000 steps.
        return {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": event["start"],
            "x1": end,
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "fillcolor": BAD,
            "opacity": 0.16,
            "line": {"width": 1, "color": BAD},
        }

    return [span(event) for event in flagged]


def attempt_lines(records: Records) -> list[dict[str, Any]]:
    """A faint dotted line at the first step of every attempt after the first."""
    first: dict[int, int] = {}
    for row in records.rows:
        first.setdefault(row.attempt, row.step)
    return [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": step,
            "x1": step,
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "line": {"width": 1, "dash": "dot", "color": MUTED},
            "label": {
                "text": f"attempt {number}",
                "textposition": "end",
                "textangle": 0,
                "font": {"size": 10, "color": MUTED},
            },
        }
        for number, step in sorted(first.items())[1:]
    ]


def limit_lines(key: str, found: Layers) -> list[dict[str, Any]]:
    """A dashed line at the key's limit for every format seen; none where it is not judged."""
    formats = {str(numbers.get("dtype", "any")) for points in found.values() for _, numbers in points}
    steps = [step for points in found.values() for step, _ in points]
    limits = {dtype: CATALOG[key].limit(dtype) for dtype in sorted(formats)}
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [min(steps), max(steps)],
            "y": [limit, limit],
            "name": f"limit {limit:g}" + ("" if dtype == "any" else f" ({plain(dtype)})"),
            "line": {"color": BAD, "width": 1.4, "dash": "dash"},
            "hoverinfo": "skip",
        }
        for dtype, limit in limits.items()
        if limit is not None
    ]


def plain(text: str) -> str:
    """`text` so that plotly, which reads HTML tags in names and hover texts, shows it as it is."""
    return html.escape(text, quote=False)
