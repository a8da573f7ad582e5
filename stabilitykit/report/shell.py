"""The frame of every page: one HTML file, its style, script, plotly and figures inside, no request."""

import json
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

_HERE = Path(__file__).parent


def page(
    *,
    title: str,
    eyebrow: str,
    navigation: Iterable[tuple[str, str]],
    body: str,
    figures: list[dict[str, Any]],
) -> str:
    """The whole file; `navigation` holds (anchor, text), `figures` what its cards show, in order."""
    return Template(_asset("assets/page.html")).substitute(
        title=escape(title),
        eyebrow=f"{escape(eyebrow)}, written {time.strftime('%Y-%m-%d %H:%M')}",
        navigation="".join(f'<a href="#{anchor}">{escape(text)}</a>' for anchor, text in navigation),
        body=body,
        style=_asset("assets/page.css"),
        script=_asset("assets/page.js"),
        plotly=_asset("vendor/plotly-cartesian.min.js").replace("</script", "<\\/script"),
        figures=_script_json(figures),
    )


def card(title: str, figure: dict[str, Any], help: Sequence[str], figures: list[dict[str, Any]]) -> str:
    """The place of one figure, with `help` folded below it; `figure` is appended to `figures`."""
    figures.append(figure)
    height, title = figure["layout"]["height"], escape(title)
    plot = f'<div class="plot" role="img" aria-label="{title}" style="height:{height}px"></div>'
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in help)
    summary = f"<details><summary>What it says</summary>{said}</details>" if said else ""
    return f"<article><header><h3>{title}</h3></header>{plot}{summary}</article>"


def verdict(state: str, sentence: str, more: str = "") -> str:
    """The box below the title: a sentence coloured by `state` (good, bad, ...) and HTML under it."""
    return f'<div class="verdict {state}">\n<h2>{escape(sentence)}</h2>\n{more}\n</div>'


def rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Table rows of a name and a text each."""
    return "".join(
        f"<tr><th scope=row>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in pairs
    )


def grid(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with one head row, in a frame that scrolls sideways when it is too wide."""
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return (
        f"<div class=scroll><table class=events><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
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
