import json
import math
from typing import Any

from stabilitykit.records import Record
from stabilitykit.report.figures import figure
from stabilitykit.report.marks import BAD, BLUE, MUTED
from stabilitykit.report.panels import PANELS, Panel
from stabilitykit.runlog import Records

LOSS = Panel("Loss", "loss", ("loss/value",), "curve")
LAYERS = Panel("Layers", "attention", ("attention/roundoff_ratio",), "layers over time")
COST = PANELS[-1]


def loss(step: int, value: float, attempt: int = 1, **more: float) -> Record:
    return Record(step, attempt, "loss", {"loss/value": value, **more})


def attention(step: int, **layers: dict[str, Any]) -> Record:
    return Record(step, 1, "attention", {}, {"layers": layers})


def drawn(panel: Panel, *rows: Record) -> dict[str, Any]:
    result = figure(panel, Records(list(rows)))
    assert result is not None
    json.dumps(result, allow_nan=False)
    return result


def test_a_loss_curve_has_exactly_these_contents() -> None:
    result = drawn(LOSS, loss(0, 3.0), loss(1, 2.5))
    assert result["data"] == [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": [0, 1],
            "y": [3.0, 2.5],
            "name": "loss",
            "yaxis": "y",
            "line": {"color": BLUE, "width": 1.6},
            "marker": {"size": 7},
            "hovertemplate": "loss %{y:.4g}<extra></extra>",
        }
    ]
    layout = result["layout"]
    assert layout["xaxis"] == {"title": {"text": "step"}, "anchor": "y"}
    assert layout["yaxis"]["title"] == {"text": "loss (nats)"}
    assert layout["yaxis"]["domain"] == [0.0, 1.0]
    assert layout["shapes"] == []


def test_each_key_has_its_row_and_rows_do_not_overlap() -> None:
    row = loss(0, 1.0, **{"loss/grad_norm": 2.0, "loss/score": 0.5})
    result = drawn(PANELS[0], row)
    assert [trace["yaxis"] for trace in result["data"]] == ["y", "y2", "y3"]
    domains = [result["layout"][name]["domain"] for name in ("yaxis3", "yaxis2", "yaxis")]
    edges = [edge for domain in domains for edge in domain]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (0.0, 1.0)


def test_a_peak_of_the_loss_is_marked_on_the_loss_only() -> None:
    event: dict[str, Any] = {
        "monitor": "LossMonitor",
        "kind": "spike",
        "start": 1,
        "peak": 9.0,
        "peak_step": 1,
        "end": 1,
    }
    rows = [loss(step, 2.0, 1, **{"loss/spike_score": 0.0}) for step in (0, 1)]
    curves = []
    for key in ("loss/value", "loss/spike_score"):
        panel = Panel(key, "loss", (key,), "curve")
        curves.append(
            [trace["name"] for trace in drawn(panel, *rows, Record(1, 1, "event", {}, event))["data"]]
        )
    assert curves == [["loss", "events"], ["spike score"]]


def test_what_is_not_finite_is_a_gap_and_a_cross_at_the_top() -> None:
    line, crosses = drawn(LOSS, loss(0, 3.0), loss(1, math.nan), loss(2, 4.0))["data"]
    assert line["y"] == [3.0, None, 4.0]
    assert (crosses["x"], crosses["y"], crosses["text"]) == ([1], [4.0], ["nan"])
    assert crosses["marker"] == {"symbol": "x", "size": 7, "color": BAD}


def test_a_curve_that_is_never_finite_is_all_crosses() -> None:
    line, crosses = drawn(LOSS, loss(0, math.nan), loss(1, math.inf))["data"]
    assert line["y"] == [None, None]
    assert (crosses["x"], crosses["y"], crosses["text"]) == ([0, 1], [1.0, 1.0], ["nan", "inf"])


def test_a_long_curve_keeps_its_extremes_and_its_flagged_steps() -> None:
    rows = [loss(step, 2.0 + step % 7 / 10) for step in range(50_000)]
    rows[31_111] = loss(31_111, 9.0)
    # 40_003 is no extreme of its stretch: only the flag keeps it.
    event = {"id": 0, "kind": "shift", "start": 40_003, "end": None, "peak": 2.3, "peak_step": 40_003}
    line = drawn(LOSS, *rows, Record(40_003, 1, "event", {}, event))["data"][0]
    assert len(line["x"]) <= 2_005
    assert 9.0 in line["y"]
    assert 40_003 in line["x"]
    assert line["mode"] == "lines"


def test_a_resume_is_a_faint_line_at_its_first_step() -> None:
    shapes = drawn(LOSS, loss(0, 1.0), loss(1, 1.0, 2), loss(2, 1.0, 2))["layout"]["shapes"]
    assert [(s["type"], s["x0"], s["x1"], s["line"]["color"]) for s in shapes] == [("line", 1, 1, MUTED)]
    assert shapes[0]["label"]["text"] == "attempt 2"


def test_each_layer_is_a_line_and_each_format_has_its_limit() -> None:
    rows = [
        attention(
            step,
            **{
                "m.0.attn": {"dtype": "bfloat16", "roundoff_ratio": 1.0 + step},
                "m.1.attn": {"dtype": "float32", "roundoff_ratio": "inf"},
            },
        )
        for step in (9, 19)
    ]
    result = drawn(LAYERS, *rows)
    names = [trace["name"] for trace in result["data"]]
    assert names == ["m.0", "m.1", "m.1 not finite", "limit 3 (bfloat16)", "limit 200 (float32)"]
    first, second, crosses, bfloat16, float32 = result["data"]
    assert (first["x"], first["y"]) == ([9, 19], [10.0, 20.0])
    assert second["y"] == [None, None]
    assert crosses["text"] == ["inf", "inf"]
    assert (bfloat16["x"], bfloat16["y"], float32["y"]) == ([9, 19], [3.0, 3.0], [200.0, 200.0])
    assert result["layout"]["yaxis"]["type"] == "log"


def test_a_zero_is_not_lost_on_a_logarithmic_axis() -> None:
    rows = [attention(s, a={"dtype": "float32", "roundoff_ratio": v}) for s, v in ((0, 0.0), (1, 1))]
    assert "type" not in drawn(LAYERS, *rows)["layout"]["yaxis"]


def test_a_quantity_that_is_not_judged_has_no_limit() -> None:
    panel = Panel("Entropy", "attention", ("attention/entropy",), "layers over time")
    result = drawn(panel, attention(9, a={"dtype": "bfloat16", "entropy": 0.5}))
    assert [trace["name"] for trace in result["data"]] == ["a"]
    assert result["layout"]["yaxis"]["range"] == [0, 1.05]


def test_cost_is_the_last_record_with_the_total_at_the_end() -> None:
    def cost(step: int, total: float) -> Record:
        values = {"overhead/total_percent": total, "overhead/loss_percent": 0.25}
        return Record(step, 1, "overhead", values)

    (bar,) = drawn(COST, cost(9, 8.0), cost(19, 4.25))["data"]
    assert (bar["y"], bar["x"], bar["text"]) == (["loss", "total"], [0.25, 4.25], ["0.25 %", "4.25 %"])
    assert bar["marker"]["color"] == [BLUE, MUTED]


def test_nothing_to_show_is_no_figure() -> None:
    empty = attention(9)
    assert [figure(panel, Records([empty])) for panel in PANELS] == [None] * len(PANELS)
    assert figure(LOSS, Records([Record(0, 1, "loss", {})])) is None
    assert figure(COST, Records([Record(0, 1, "overhead", {"overhead/x": math.nan})])) is None
