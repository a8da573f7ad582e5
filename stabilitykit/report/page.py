"""The report of one run: one HTML file that asks the network for nothing, or plain text."""

import json
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from stabilitykit.report.figures import figure
from stabilitykit.report.movers import COLUMNS, first_movers, told
from stabilitykit.report.panels import PANELS, SECTIONS
from stabilitykit.report.reading import events, is_about, number, show
from stabilitykit.report.shell import card, grid, rows, verdict
from stabilitykit.report.shell import page as shell
from stabilitykit.report.summary import table
from stabilitykit.report.verdict import findings, headline
from stabilitykit.runlog import RECORDS, Records, find_folder, read_meta, read_records

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
    sentences = [told(records, event) for event in events(records) if is_about(event, "loss")]
    lines += [_wrapped(sentence, "- ", "  ") for sentence in sentences if sentence]
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
    items = "".join(f'<li class="{f.state}">{escape(f.text)}</li>' for f in found)
    facts, path = "".join(_facts(read_meta(folder))), escape(str(folder.resolve()))
    body = (
        verdict(state, sentence, f"<ul>{items}</ul>"),
        f'<table class="summary">{rows(table(records))}</table>',
        _problem_list(records),
        sections,
        f'<section id="facts"><h2>Run facts</h2>{facts}<p class="path">{path}</p></section>',
    )
    return shell(
        title=_run_name(folder),
        eyebrow="Run report",
        navigation=[*_navigation(records), ("facts", "Run facts")],
        body="\n".join(body),
        figures=figures,
    )


def _run_name(folder: Path) -> str:
    """The run's folder and the one it is in, as `lightning_logs/version_3`."""
    return "/".join(folder.resolve().parent.parts[-2:]).lstrip("/") or folder.name


def _navigation(records: Records) -> Iterator[tuple[str, str]]:
    return ((kind, title) for kind, title in SECTIONS.items() if records.of(kind))


def _sections(records: Records, figures: list[dict[str, Any]]) -> Iterator[str]:
    """The sections' HTML; every figure drawn in them is appended to `figures`."""
    for kind, title in SECTIONS.items():
        drawn = [(panel, figure(panel, records)) for panel in PANELS if panel.kind == kind]
        cards = [card(panel.title, found, panel.help, figures) for panel, found in drawn if found]
        if kind == "loss":
            cards += [*_event_table(records), *_mover_tables(records)]
        if cards:
            yield f'<section id="{kind}"><h2>{title}</h2>{"".join(cards)}</section>'


def _event_table(records: Records) -> list[str]:
    flagged = events(records)
    if not flagged:
        return []
    columns = ("kind", "start", "onset", "end", "peak", "peak_step", "baseline", "score", "message")
    lines = [[_cell(event, name) for name in columns] for event in flagged]
    table = grid([name.replace("_", " ") for name in columns], lines)
    return [f"<article><header><h3>Flagged events</h3></header>{table}</article>"]


def _mover_tables(records: Records) -> Iterator[str]:
    """Per loss event, the signals that had left their own band by then, the first ones first."""
    for event in events(records):
        sentence = told(records, event) if is_about(event, "loss") else ""
        if sentence:
            movers = first_movers(records, event)
            table = grid(COLUMNS, [mover.cells for mover in movers]) if movers else ""
            title = escape(f"First movers, {event['kind']} at step {event['start']}")
            yield f"<article><header><h3>{title}</h3></header><p>{escape(sentence)}</p>{table}</article>"


def _cell(event: dict[str, Any], name: str) -> str:
    value = event.get(name)
    if value is None:
        return "open" if name == "end" else ""
    return show(number(value)) if name in ("peak", "baseline", "score") else str(value)


def _problem_list(records: Records) -> str:
    items = "".join(f"<li>{escape(problem)}</li>" for problem in _problems(records))
    return f'<h2>Not readable</h2><ul class="problems">{items}</ul>' if items else ""


def _facts(meta: dict[str, Any]) -> Iterator[str]:
    """One foldable table per part of `meta.json`, nested names joined by dots."""
    for name, part in meta.items():
        head = f"<summary>{escape(name)}</summary>"
        yield f"<details>{head}<table class=facts>{rows(_flat(part))}</table></details>"


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value, 1):
            yield from _flat(item, f"{name}.{place}" if name else str(place))
    else:
        yield name, value if isinstance(value, str) else json.dumps(value)
