"""What all figures over steps are made of: lines with gaps and crosses, stacked rows, axes, the frame."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from stabilitykit.catalog import metric_of
from stabilitykit.report.marks import BAD, plain
from stabilitykit.report.panels import name_of
from stabilitykit.report.reading import show
from stabilitykit.report.thinning import thin, with_gaps

Trace = dict[str, Any]


def hue(place: int, count: int) -> str:
    """The colour of the line at `place` of `count`, from blue for the first to orange for the last.

    >>> hue(0, 1), hue(3, 4)
    ('hsl(225, 72%, 61%)', 'hsl(390, 72%, 61%)')
    """
    return f"hsl({225 + 165 * place / max(1, count - 1):.0f}, 72%, 61%)"


def draw_line(
    steps: Sequence[float],
    values: Sequence[float],
    name: str,
    colour: str,
    axis: str,
    flags: Collection[float],
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
        "marker": {"size": 4 if len(x) > 10 else 7},
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


def domain(place: int, count: int) -> list[float]:
    """Domain of one of `count` stacked rows; the first is on top and twice as high."""
    gap = 0.05
    unit = (1 - gap * (count - 1)) / (count + 1)
    top = 1.0 if place == 0 else 1 - 2 * unit - gap - (place - 1) * (unit + gap)
    return [round(max(0.0, top - (2 * unit if place == 0 else unit)), 4), round(top, 4)]


def y_axis(key: str, values: Sequence[float], *, log_from: float = 1000) -> dict[str, Any]:
    """Logarithmic where the catalog judges a ratio, or where the values span a factor over `log_from`."""
    metric = metric_of(key)
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    logarithmic = low > 0 and (high > log_from * low or (metric.threshold and metric.unit == "ratio"))
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


def frame(*, height: int) -> dict[str, Any]:
    """The layout of a figure over steps; its axes and shapes are still to come."""
    return {
        "height": height,
        "hovermode": "x unified",
        "hoversubplots": "axis",
        "margin": {"l": 70, "r": 24, "t": 32, "b": 48},
        "xaxis": {"title": {"text": "step"}},
        "legend": {"orientation": "v", "x": 1.01, "y": 1, "xanchor": "left"},
    }
