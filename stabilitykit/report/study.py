"""The page of a study: its claims, its figures, its rows; and the figures studies are drawn with."""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from stabilitykit.records import spell
from stabilitykit.report.curves import frame, hue
from stabilitykit.report.marks import BLUE
from stabilitykit.report.reading import show
from stabilitykit.report.shell import card, grid, page, verdict

Figure = dict[str, Any]
_WORDS = {True: "holds", False: "does not hold"}


def write_study(folder: Path, study: dict[str, Any], figures: Mapping[str, Figure]) -> Path:
    """The path of the HTML page; the same numbers stand beside it in `NAME.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = study["study"]
    text = json.dumps(spell(study), indent=1, allow_nan=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    path = folder / f"{name}.html"
    path.write_text(_html(study, figures), encoding="utf-8")
    return path


def _html(study: dict[str, Any], figures: Mapping[str, Figure]) -> str:
    failed = [claim for claim in study["claims"] if claim["holds"] is False]
    drawn: list[Figure] = []
    cards = "".join(card(title, figure, (), drawn) for title, figure in figures.items())
    paragraphs = "".join(f"<p>{escape(part)}</p>" for part in study["words"].split("\n\n"))
    body = (
        verdict("bad" if failed else "good", _summary(study["claims"]), paragraphs),
        f'<section id="claims"><h2>Claims</h2>{grid(CLAIM_COLUMNS, claim_lines(study["claims"]))}</section>',
        f'<section id="figures-drawn"><h2>Figures</h2>{cards}</section>',
        f'<section id="numbers"><h2>Numbers</h2>{_tables(study["results"])}</section>',
    )
    navigation = [("claims", "Claims"), ("figures-drawn", "Figures"), ("numbers", "Numbers")]
    title = f"Study: {study['study']}"
    return page(title=title, eyebrow="Study", navigation=navigation, body="\n".join(body), figures=drawn)


def _summary(claims: Sequence[dict[str, Any]]) -> str:
    """How many claims hold, in words."""
    verdicts = [claim["holds"] for claim in claims]
    held, undecided = verdicts.count(True), verdicts.count("indistinguishable")
    if held == len(verdicts):
        return f"all {held} claims hold"
    return f"{held} of {len(verdicts)} claims hold" + (f", {undecided} are undecided" if undecided else "")


CLAIM_COLUMNS = ("claim", "expected", "measured", "range", "verdict", "source")


def claim_lines(claims: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The cells of the claims' table, as CLAIM_COLUMNS."""
    return [
        [
            claim["claim"],
            claim["expected"],
            show(claim["measured"]),
            " to ".join(show(value) for value in claim["interval"]),
            _WORDS.get(claim["holds"], str(claim["holds"])),
            claim["source"],
        ]
        for claim in claims
    ]


def _tables(rows: Sequence[dict[str, Any]]) -> str:
    """One folded table per experiment."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["experiment"], []).append(row)
    parts = []
    for name, group in groups.items():
        columns = list(dict.fromkeys(key for row in group for key in row if key != "experiment"))
        lines = [[_cell(row.get(column)) for column in columns] for row in group]
        summary = f"<summary>{escape(name)} ({len(group)} rows)</summary>"
        parts.append(f"<details>{summary}{grid(columns, lines)}</details>")
    return "".join(parts)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return show(value)
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "" if value is None else str(value)


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, *, log_x: bool = True
) -> Figure:
    """A line per name over (x, y) points, on logarithmic axes; points that have no logarithm are left out."""
    data: list[dict[str, Any]] = []
    for place, (name, points) in enumerate(series.items()):
        kept = [(a, b) for a, b in points if math.isfinite(b) and b > 0]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [a for a, _ in kept],
                "y": [b for _, b in kept],
                "name": name,
                "line": {"color": hue(place, len(series)), "width": 1.6},
                "hovertemplate": f"{name} " + "%{y:.4g}<extra></extra>",
            }
        )
    layout = frame(height=380)
    layout["xaxis"] = {"title": {"text": x}} | ({"type": "log", "dtick": "D2"} if log_x else {})
    layout["yaxis"] = {"title": {"text": y}, "type": "log", "automargin": True, "exponentformat": "power"}
    return {"data": data, "layout": layout}


def bars(values: Mapping[str, float], x: str) -> Figure:
    """One horizontal bar per name."""
    kept = {name: value for name, value in values.items() if math.isfinite(value)}
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": list(kept),
        "x": list(kept.values()),
        "text": [show(value) for value in kept.values()],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": BLUE},
        "hovertemplate": "%{y}: %{x:.4g}<extra></extra>",
    }
    layout = frame(height=90 + 26 * len(kept))
    layout["xaxis"] = {"title": {"text": x}, "rangemode": "tozero"}
    layout["yaxis"] = {"autorange": "reversed", "type": "category", "automargin": True}
    return {"data": [bar], "layout": layout | {"hovermode": "closest", "bargap": 0.35}}
