"""The loss curve of any log with its events, as one HTML file."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from stabilitykit.report.curves import draw_line, frame, y_axis
from stabilitykit.report.marks import BLUE, event_markers, event_spans, plain
from stabilitykit.report.reading import counted, number, show
from stabilitykit.report.shell import card, grid, page, verdict

COLUMNS = ("kind", "start", "onset", "end", "peak", "peak_step", "baseline", "score", "recurs_every")
HELP = (
    "Every event is shaded from the step at which it was raised to the step at which it was over; "
    "a diamond marks its highest loss.",
    "Kinds: a spike passes, a divergence does not come back, a shift is a new level, a transient is a hump "
    "of start-up, nonfinite is NaN or infinity.",
)


def write_losses(
    points: Sequence[tuple[float, float]],
    events: Sequence[dict[str, Any]],
    *,
    names: tuple[str, str],
    rows: int,
    log: Path,
    problems: Sequence[str],
    out: Path,
) -> Path:
    """The path of the HTML file written; `names` are those of the step and the loss, `rows` of the log."""
    drawn: list[dict[str, Any]] = []
    state, sentence = headline(events, rows)
    said = "".join(f"<li class=unknown>{escape(problem)}</li>" for problem in problems)
    curve = card(names[1], loss_curve(points, events, names), HELP, drawn)
    body = (
        verdict(state, sentence, f"<ul>{said}</ul>"),
        f'<section id="loss"><h2>Loss</h2>{curve}{_table(events)}',
        f'<p class="path">{escape(str(log.resolve()))}</p></section>',
    )
    html = page(
        title=log.name,
        eyebrow="Loss events",
        navigation=[("loss", "Loss")],
        body="\n".join(body),
        figures=drawn,
    )
    out.write_text(html, encoding="utf-8")
    return out


def headline(events: Sequence[dict[str, Any]], rows: int) -> tuple[str, str]:
    """The state and the sentence of the verdict.

    >>> headline([{"kind": "spike"}, {"kind": "shift"}, {"kind": "spike"}], 900)
    ('bad', '3 events in 900 rows: 2 spike, 1 shift')
    >>> headline([], 1)
    ('good', 'No event in 1 row')
    """
    if not events:
        return "good", f"No event in {counted(rows, 'row')}"
    kinds = Counter(event["kind"] for event in events)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    state = "unknown" if kinds.keys() == {"transient"} else "bad"
    return state, f"{counted(len(events), 'event')} in {counted(rows, 'row')}: {named}"


def loss_curve(
    points: Sequence[tuple[float, float]], events: Sequence[dict[str, Any]], names: tuple[str, str]
) -> dict[str, Any]:
    """The figure; a log that goes back in its steps is drawn going back."""
    steps, values = [step for step, _ in points], [value for _, value in points]
    flags = {event[at] for event in events for at in ("start", "peak_step", "end")}
    data = draw_line(steps, values, names[1], BLUE, "y", flags)
    if events:
        data.append(event_markers(events, values))
    layout = frame(height=460)
    layout["xaxis"]["title"] = {"text": plain(names[0])}
    layout["yaxis"] = y_axis("loss/value", values) | {"title": {"text": plain(names[1])}}
    layout["shapes"] = event_spans(events, max(steps))
    layout["showlegend"] = False
    return {"data": data, "layout": layout}


def _table(events: Sequence[dict[str, Any]]) -> str:
    if not events:
        return ""
    table = grid(
        [name.replace("_", " ") for name in COLUMNS],
        [[_cell(event[name], name) for name in COLUMNS] for event in events],
    )
    return f"<article><header><h3>Events</h3></header>{table}</article>"


def _cell(value: Any, name: str) -> str:
    if value is None:
        return "open" if name == "end" else ""
    return show(number(value)) if name in ("peak", "baseline", "score") else str(value)
