"""The page of `spikes --plot`: what it says, and a real browser that draws it."""

import math
import re

from chromium import browse, browser, drawn
from stabilitykit.cli import main
from stabilitykit.report.losses import headline, loss_curve
from stabilitykit.report.thinning import Sketch

EVENT = {
    "kind": "spike", "start": 3, "onset": 3, "end": None, "peak": 9.0, "peak_step": 3,
    "baseline": 2.0, "score": 70.0, "recurs_every": None,
}  # fmt: skip


def test_the_figure_marks_the_peak_and_shades_an_open_event_to_the_end():
    figure = loss_curve([(t, 9.0 if t == 3 else 2.0) for t in range(6)], [EVENT], ("tokens", "ce <b>"))
    line, markers = figure["data"]
    assert (line["x"], line["y"][3]) == ([0, 1, 2, 3, 4, 5], 9.0)
    assert (markers["x"], markers["y"]) == ([3], [9.0])
    (shade,) = figure["layout"]["shapes"]
    assert (shade["x0"], shade["x1"]) == (3, 5)
    assert figure["layout"]["xaxis"]["title"]["text"] == "tokens"
    assert figure["layout"]["yaxis"]["title"]["text"] == "ce &lt;b&gt;"


def test_a_hump_of_start_up_is_no_bad_news():
    assert headline([{"kind": "transient"}], 50)[0] == "unknown"
    assert headline([{"kind": "transient"}, {"kind": "spike"}], 50)[0] == "bad"


def test_a_sketch_of_a_long_log_is_small_and_keeps_extremes_and_nan():
    sketch = Sketch(stretches=50)
    rows = [(t, math.nan if t == 777 else 9.0 if t == 4321 else 2.0 + t % 7) for t in range(10_000)]
    assert str(list(sketch.through(rows))) == str(rows)
    points = sketch.points()
    assert len(points) <= 3 * 50
    assert (4321, 9.0) in points
    assert [step for step, value in points if math.isnan(value)] == [777]
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert sketch.rows == 10_000


def written(tmp_path, rows):
    log = tmp_path / "log <i>.csv"
    log.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step, loss in rows))
    return log


@browser
def test_a_browser_draws_the_curve_and_asks_for_nothing(tmp_path, capsys):
    rows = [(t, "nan" if t == 350 else 9.0 if t == 200 else 2 + t % 5 / 10) for t in range(400)]
    page = tmp_path / "out.html"
    assert main(["spikes", str(written(tmp_path, [*rows, *rows[300:]])), "--plot", str(page)]) == 0
    told = capsys.readouterr()
    assert "spike" in told.out
    dom, console, asked = browse(page, tmp_path)
    assert console == []
    assert asked == set()
    assert drawn(dom) == 1
    assert re.search(r"3 events in 500 rows: 2 nonfinite, 1 spike", dom)
    assert "taken as a new attempt" in dom
    assert "log &lt;i&gt;.csv" in dom


@browser
def test_a_clean_log_of_one_row_has_a_page_too(tmp_path, capsys):
    page = tmp_path / "out.html"
    assert main(["spikes", str(written(tmp_path, [(7, 2.5)])), "--plot", str(page)]) == 0
    assert capsys.readouterr().out == "No event in 1 row of loss\n"
    dom, console, asked = browse(page, tmp_path)
    assert (console, asked, drawn(dom)) == ([], set(), 1)
    assert "No event in 1 row" in dom
