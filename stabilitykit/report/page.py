"""The report of one run: one HTML file that asks the network for nothing, or plain text."""

import json
import textwrap
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from stabilitykit.report.figures import figure
from stabilitykit.report.panels import PANELS, SECTIONS, Panel
from stabilitykit.report.reading import events, number, show
from stabilitykit.report.summary import table
from stabilitykit.report.verdict import findings, headline
from stabilitykit.runlog import RECORDS, Records, find_folder, read_meta, read_records

_HERE = Path(__file__).parent
_PROBLEMS_SHOWN = 5


def write_report(run: Path, out: Path | None = None) -> Path:
    """The path of the HTML file written, by default `report.html` in the folder of the records.

    Raises:
        ValueError: no run folder at `run`, or one without a readable record.
    """
    folder, records = _read(run)
    out = folder / "report.html" if out is None else out
    out.write_text(_html(folder, records), encoding="utf-8")
    return out


def text_report(run: Path) -> str:
    """The verdict and the table as plain text, at most 80 columns wide but for long names.

    Raises:
        ValueError: no run folder at `run`, or one without a readable record.
    """
    records = _read(run)[1]
    found = findings(records)
    lines = [headline(found)[1], ""]
    for finding in found:
        lines.append(_wrapped(finding.text, "- ", "  "))
    lines.append("")
    for label, text in table(records):
        lines.append(_wrapped(text, f"{label:<14}", " " * 14))
    lines += [_wrapped(problem, "! ", "  ") for problem in _problems(records)]
    return "\n".join(lines)


def _wrapped(text: str, first: str, later: str) -> str:
    return textwrap.fill(text, 80, initial_indent=first, subsequent_indent=later, break_long_words=False)


def _read(run: Path) -> tuple[Path, Records]:
    folder = find_folder(run)
    records = read_records(folder)
    if not records.rows:
        skipped = len(records.problems)
        raise ValueError(
            f"expected records in {folder / RECORDS}, got none that can be read ({skipped} skipped)"
        )
    return folder, records


def _problems(records: Records) -> list[str]:
    more = len(records.problems) - _PROBLEMS_SHOWN
    shown = records.problems[:_PROBLEMS_SHOWN]
    return [*shown, f"and {more:,} more"] if more > 0 else shown


def _html(folder: Path, records: Records) -> str:
    found = findings(records)
    state, sentence = headline(found)
    figures: list[dict[str, Any]] = []
    sections = "".join(_sections(records, figures))
    meta = read_meta(folder)
    items = "".join(f'<li class="{f.state}">{escape(f.text)}</li>' for f in found)
    return filled(
        figures,
        title=escape(_run_name(folder)),
        headline=escape(sentence),
        state=state,
        findings=items,
        table=_rows(table(records)),
        problems=_problem_list(records),
        sections=sections,
        navigation="".join(_navigation(records)),
        facts="".join(_facts(meta)),
        folder=escape(str(folder.resolve())),
    )


def filled(figures: list[dict[str, Any]], **parts: str) -> str:
    """The page with its parts, which are HTML, and with all that its figures need to be drawn."""
    return Template(_asset("assets/page.html")).substitute(
        parts,
        written=time.strftime("%Y-%m-%d %H:%M"),
        style=_asset("assets/page.css"),
        script=_asset("assets/page.js"),
        plotly=_asset("vendor/plotly-cartesian.min.js").replace("</script", "<\\/script"),
        figures=_script_json(figures),
    )


def _script_json(value: Any) -> str:
    r"""JSON that cannot end the script element it stands in: only "<" could.

    >>> _script_json(["</script>"])
    '["\\u003c/script>"]'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _run_name(folder: Path) -> str:
    """The run's folder and the one it is in, as `lightning_logs/version_3`."""
    return "/".join(folder.resolve().parent.parts[-2:]).lstrip("/") or folder.name


def _navigation(records: Records) -> Iterator[str]:
    for kind, title in SECTIONS.items():
        if records.of(kind):
            yield f'<a href="#{kind}">{title}</a>'


def _sections(records: Records, figures: list[dict[str, Any]]) -> Iterator[str]:
    """The sections' HTML; every figure drawn in them is appended to `figures`."""
    for kind, title in SECTIONS.items():
        drawn = [(panel, figure(panel, records)) for panel in PANELS if panel.kind == kind]
        cards = [_card(panel, found, figures) for panel, found in drawn if found]
        if kind == "loss":
            cards += _event_table(records)
        if cards:
            yield f'<section id="{kind}"><h2>{title}</h2>{"".join(cards)}</section>'


def _card(panel: Panel, found: dict[str, Any], figures: list[dict[str, Any]]) -> str:
    figures.append(found)
    height, title = found["layout"]["height"], escape(panel.title)
    plot = f'<div class="plot" role="img" aria-label="{title}" style="height:{height}px"></div>'
    summary = f"<details><summary>What it says</summary>{_help(panel)}</details>"
    return f"<article><header><h3>{title}</h3></header>{plot}{summary}</article>"


def _help(panel: Panel) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in panel.help)


def _event_table(records: Records) -> list[str]:
    flagged = events(records)
    if not flagged:
        return []
    columns = ("kind", "start", "onset", "end", "peak", "peak_step", "baseline", "score", "message")
    head = "".join(f"<th scope=col>{name.replace('_', ' ')}</th>" for name in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell(event, name))}</td>" for name in columns) + "</tr>"
        for event in flagged
    )
    return [
        "<article><header><h3>Flagged events</h3></header><div class=scroll><table class=events>"
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></article>"
    ]


def _cell(event: dict[str, Any], name: str) -> str:
    value = event.get(name)
    if value is None:
        return "open" if name == "end" else ""
    return show(number(value)) if name in ("peak", "baseline", "score") else str(value)


def _problem_list(records: Records) -> str:
    items = "".join(f"<li>{escape(problem)}</li>" for problem in _problems(records))
    return f'<h2>Not readable</h2><ul class="problems">{items}</ul>' if items else ""


def _rows(pairs: list[tuple[str, str]]) -> str:
    return "".join(
        f"<tr><th scope=row>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in pairs
    )


def _facts(meta: dict[str, Any]) -> Iterator[str]:
    """One foldable table per part of `meta.json`, nested names joined by dots."""
    for name, part in meta.items():
        rows = _rows(list(_flat(part)))
        head = f"<summary>{escape(name)}</summary>"
        yield f"<details>{head}<table class=facts>{rows}</table></details>"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value, 1):
            yield from _flat(item, f"{name}.{place}" if name else str(place))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)
