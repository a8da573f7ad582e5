import json
import math
from typing import Any

import pytest

from stabilitykit.records import Record, spell
from stabilitykit.report.arms import arms_over_steps, tensor_dots
from stabilitykit.report.marks import BAD, BLUE
from stabilitykit.runlog import Records

RAW, FLOORS = "weights/ARM/rel_l2", "weights/ARM/rel_l2_over_floor"


def weights(step: int, floor: list[Any], **arms: float) -> Record:
    values = {f"weights/{arm}/rel_l2": value for arm, value in arms.items()}
    detail = {"floor": {"rel_l2": spell(floor)}, "verdict": dict.fromkeys(arms, "")}
    return Record(step, 1, "weights", values, detail)


def drawn(key: str, *rows: Record) -> dict[str, Any]:
    result = arms_over_steps((key,), list(rows), Records(list(rows)))
    assert result is not None
    json.dumps(result, allow_nan=False)
    return result


def test_an_arm_is_a_line_and_the_floor_a_band_from_its_lowest_to_its_highest_seed() -> None:
    rows = weights(108, [1e-5, 3e-5, 2e-5], float32=5e-5), weights(208, [2e-5, 4e-5, 3e-5], float32=1e-3)
    result = drawn(RAW, *rows)
    band, line = result["data"]
    assert (band["x"], band["y"]) == ([108, 208, 208, 108, 108], [3e-5, 4e-5, 2e-5, 1e-5, 3e-5])
    assert (band["name"], band["fill"]) == ("noise floor (3 jitter seeds)", "toself")
    assert (line["x"], line["y"], line["name"]) == ([108, 208], [5e-5, 1e-3], "float32")
    assert line["line"]["color"] == BLUE
    assert result["layout"]["yaxis"]["type"] == "log"
    assert result["layout"]["yaxis"]["title"] == {"text": "relative L2"}


def test_in_units_of_the_floor_the_band_is_the_seeds_over_their_median() -> None:
    rows = [weights(step, [1e-5, 2e-5, 3e-5]) for step in (108, 208)]
    for row in rows:
        row.values["weights/float32/rel_l2_over_floor"] = 1.25
    result = drawn(FLOORS, *rows)
    band, line = result["data"]
    assert band["y"] == pytest.approx([1.5, 1.5, 0.5, 0.5, 1.5])
    assert line["y"] == [1.25, 1.25]
    assert result["layout"]["yaxis"]["rangemode"] == "tozero"
    assert result["layout"]["yaxis"]["title"] == {"text": "relative L2 over floor (floors)"}


def test_one_record_has_a_band_that_can_be_seen_and_one_tick() -> None:
    result = drawn(RAW, weights(108, [1e-5, 2e-5], float32=5e-5))
    assert result["data"][0]["x"] == [107.5, 108.5, 108.5, 107.5, 107.5]
    assert result["layout"]["xaxis"]["range"] == [106, 110]
    assert result["layout"]["xaxis"]["dtick"] == 1


def test_without_a_floor_there_are_lines_alone() -> None:
    rows = weights(108, [], float32=5e-5), weights(208, [], float32=6e-5)
    assert [trace["name"] for trace in drawn(RAW, *rows)["data"]] == ["float32"]


def test_the_band_is_broken_where_the_floor_is_not_finite() -> None:
    floors = [[1e-5, 2e-5], [1e-5, 2e-5], [math.nan, 2e-5], [1e-5, 2e-5]]
    band = drawn(RAW, *(weights(100 * at, floor, float32=5e-5) for at, floor in enumerate(floors)))["data"][0]
    assert band["x"] == [0, 100, 100, 0, 0, None, 275, 325, 325, 275, 275]


def test_a_distance_of_0_is_a_triangle_at_the_bottom_of_a_logarithmic_axis() -> None:
    rows = weights(108, [1e-5, 0.0], float32=0.0), weights(208, [1e-5, 2e-5], float32=4e-5)
    band, line, zeros = drawn(RAW, *rows)["data"]
    assert (zeros["x"], zeros["y"], zeros["text"]) == ([108], [5e-6], ["0"])
    assert band["y"] == [1e-5, 2e-5, 1e-5, 5e-6, 1e-5]
    assert line["y"] == [0.0, 4e-5]


def test_nothing_but_zeros_needs_no_logarithm() -> None:
    result = drawn(RAW, weights(108, [0.0, 0.0], float32=0.0))
    assert "type" not in result["layout"]["yaxis"]
    assert result["data"][1]["y"] == [0.0]


def test_a_distance_that_is_no_number_is_a_cross() -> None:
    rows = weights(108, [], float32=4e-5), weights(208, [], float32=math.nan)
    line, crosses = drawn(RAW, *rows)["data"]
    assert line["y"] == [4e-5, None]
    assert (crosses["x"], crosses["y"], crosses["text"]) == ([208], [4e-5], ["nan"])


def test_arms_are_named_as_the_user_wrote_them_each_in_a_colour_once_in_the_legend() -> None:
    values = {"weights/a_b/rel_l2": 1.0, "weights/a_b/w1": 1.0, "weights/c/rel_l2": 2.0}
    row = Record(9, 1, "weights", values, {"verdict": {"a<=b": "", "c": ""}})
    result = arms_over_steps((RAW, "weights/ARM/w1"), [row], Records([row]))
    assert result is not None
    shown = [(trace["name"], trace["yaxis"], trace["showlegend"]) for trace in result["data"]]
    assert shown == [("a&lt;=b", "y", True), ("c", "y", True), ("a&lt;=b", "y2", False)]
    assert len({trace["line"]["color"] for trace in result["data"][:2]}) == 2


def test_nothing_measured_is_no_figure() -> None:
    row = Record(9, 1, "weights", {"weights/float32/w1": 1.0})
    assert arms_over_steps((RAW,), [row], Records([row])) is None
    assert tensor_dots(RAW, [row]) is None


def tensors(step: int, **arms: dict[str, Any]) -> Record:
    detail = {arm: {name: {"rel_l2": v} for name, v in of.items()} for arm, of in arms.items()}
    return Record(step, 1, "weights", {}, {"tensors": spell(detail)})


def test_every_tensor_of_the_latest_record_is_a_dot_in_the_models_order() -> None:
    first = tensors(9, float32={"m.a": 1.0})
    last = tensors(
        19, float32={"m.a": 1e-5, "m.b": 0.0, "m.c": math.nan, "m.d": 4e-3}, bfloat16={"m.a": 2e-5}
    )
    result = tensor_dots(RAW, [first, last])
    assert result is not None
    json.dumps(result, allow_nan=False)
    dots, other = result["data"]
    assert dots["y"] == ["a", "b", "c", "d"]
    assert dots["x"] == [1e-5, 5e-6, 4e-3, 4e-3]
    assert dots["text"] == ["", "0", "nan", ""]
    assert dots["marker"]["symbol"] == ["circle", "triangle-left-open", "x", "circle"]
    assert dots["marker"]["color"] == [BLUE, BLUE, BAD, BLUE]
    assert (dots["visible"], other["visible"]) == (True, False)
    assert result["layout"]["meta"] == {"choices": ["float32", "bfloat16"]}
    assert result["layout"]["xaxis"]["title"] == {"text": "relative L2 at step 19"}


def test_of_many_tensors_the_largest_and_those_that_are_no_number_are_shown() -> None:
    of = {f"t.{at}": math.nan if at == 3 else float(at) for at in range(100)}
    result = tensor_dots(RAW, [tensors(9, float32=of)])
    assert result is not None
    assert result["data"][0]["y"] == ["t.3", *(f"t.{at}" for at in range(41, 100))]
    title = "relative L2 at step 9, the 60 largest of 100 tensors"
    assert result["layout"]["xaxis"]["title"] == {"text": title}


def test_tensors_that_did_not_move_at_all() -> None:
    result = tensor_dots(RAW, [tensors(9, same={"a": 0.0, "b": 0.0})])
    assert result is not None
    assert result["data"][0]["x"] == [0.0, 0.0]
    assert "type" not in result["layout"]["xaxis"]
