import math
from typing import Any

from stabilitykit.report.marks import BAD, event_markers, event_spans, limit_lines, plain

SPIKE: dict[str, Any] = {
    "id": 0,
    "kind": "spike",
    "start": 200,
    "end": 203,
    "peak": 6.1,
    "peak_step": 201,
    "baseline": 2.6,
    "score": 14.0,
    "message": "a <b> & more",
}


def test_an_event_is_marked_at_its_peak_and_says_what_it_is() -> None:
    trace = event_markers([SPIKE], [2.6, 6.1, 7.5])
    assert (trace["x"], trace["y"]) == ([201], [6.1])
    assert trace["text"] == [
        "spike: 6.1 at step 201<br>baseline 2.6, score 14<br>"
        "from step 200, over at 203<br>a &lt;b&gt; &amp; more"
    ]


def test_a_peak_that_is_not_finite_is_marked_at_the_top_of_the_curve() -> None:
    trace = event_markers([{**SPIKE, "peak": "nan", "end": None}], [2.6, math.nan, 3.5])
    assert trace["y"] == [3.5]
    assert "nan at step 201" in trace["text"][0]
    assert "still open" in trace["text"][0]


def test_an_interval_reaches_from_start_to_end_or_to_the_last_step() -> None:
    closed, still_open = event_spans([SPIKE, {**SPIKE, "start": 280, "end": None}], 299)
    assert (closed["x0"], closed["x1"]) == (200, 203)
    assert (still_open["x0"], still_open["x1"]) == (280, 299)
    assert closed["line"] == {"width": 1, "color": BAD}


def test_a_format_without_a_limit_has_no_line() -> None:
    found = {"a": [(9, {"dtype": "float64", "roundoff_ratio": 1.0})]}
    assert limit_lines("attention/roundoff_ratio", found) == []


def test_plain_text_has_no_tags_left() -> None:
    assert plain("<i>a</i>") == "&lt;i&gt;a&lt;/i&gt;"
