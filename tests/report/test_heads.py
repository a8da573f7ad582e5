import math
from typing import Any

import pytest

from stabilitykit.report.heads import heat_map

RATIO = "attention/roundoff_ratio"


def row(*heads: tuple[int, Any], dtype: str = "bfloat16", name: str = "roundoff_ratio") -> Any:
    return {"dtype": dtype, "heads": [{"head": head, name: value} for head, value in heads]}


def shown(found: Any, key: str = RATIO) -> list[list[list[str]]]:
    result = heat_map([key], found)
    assert result is not None
    return [trace["text"] for trace in result["data"]]


def test_the_latest_and_the_worst_of_every_head_seen_so_far() -> None:
    found = {
        "m.0": [(9, row((0, 2.0), (2, 1.5))), (19, row((0, 1.0)))],
        "m.1": [(9, row((1, 1.2))), (19, row((1, 1.4))), (29, row((1, 1.3)))],
    }
    latest, worst = shown(found)
    assert latest == [["1", "", "1.5"], ["", "1.3", ""]]
    assert worst == [["2", "", "1.5"], ["", "1.4", ""]]
    result = heat_map([RATIO], found)
    assert result is not None
    assert result["layout"]["meta"] == {"choices": ["roundoff ratio, latest", "roundoff ratio, worst so far"]}
    assert [trace["visible"] for trace in result["data"]] == [True, False]
    assert result["data"][0]["customdata"] == [[19, None, 9], [None, 29, None]]
    assert result["data"][0]["y"] == ["m.0", "m.1"]


def test_the_worst_entropy_is_the_lowest() -> None:
    found = {"m": [(9, row((0, 0.2), name="entropy")), (19, row((0, 0.9), name="entropy"))]}
    assert shown(found, "attention/entropy") == [[["0.9"]], [["0.2"]]]


def test_colour_is_the_logarithm_of_the_share_of_the_formats_own_limit() -> None:
    found = {"a": [(9, row((0, 3.0)))], "b": [(9, row((0, 20.0), dtype="float32"))]}
    result = heat_map([RATIO], found)
    assert result is not None
    assert result["data"][0]["z"] == [[0.0], [-1.0]]


@pytest.mark.parametrize(("value", "colour"), [("inf", 1.0), (0.0, -2.0)])
def test_extremes_have_the_colours_of_the_ends(value: Any, colour: float) -> None:
    result = heat_map([RATIO], {"a": [(9, row((0, value)))]})
    assert result is not None
    assert result["data"][0]["z"] == [[colour]]


def test_a_head_that_could_not_be_measured_is_an_empty_cell_and_none_is_no_map() -> None:
    assert heat_map([RATIO], {"a": [(9, row((0, "nan")))]}) is None
    assert shown({"a": [(9, row((0, math.nan), (1, 1.0)))]})[0] == [["", "1"]]
    assert heat_map([RATIO], {}) is None


def test_numbers_stand_in_the_cells_only_while_they_fit() -> None:
    few = heat_map([RATIO], {"a": [(9, row((15, 1.0)))]})
    many = heat_map([RATIO], {"a": [(9, row((16, 1.0)))]})
    assert few is not None
    assert many is not None
    assert few["data"][0]["texttemplate"] == "%{text}"
    assert many["data"][0]["texttemplate"] == ""
