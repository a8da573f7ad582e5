import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.report.images import HEAT_MAPS, NOT_FINITE, SCALE, UNKNOWN, heads, paint, tensors


def cells_of(pixels: np.ndarray, rows: int, columns: int) -> list[list[tuple[int, ...]]]:
    """The one colour of every cell; a cell of two colours fails."""
    height, width, channels = pixels.shape
    assert (channels, pixels.dtype, height // rows) == (3, np.uint8, width // columns)
    blocks = pixels.reshape(rows, height // rows, columns, width // columns, 3)
    first = blocks[:, :1, :, :1]
    assert (blocks == first).all()
    return [[tuple(map(int, colour)) for colour in row] for row in first[:, 0, :, 0]]


def test_each_anchor_has_its_colour_and_the_middle_is_between() -> None:
    cells = {("a", at): 10.0 ** (at - 2) for at in range(5)} | {("b", 0): 10**-1.5}
    shown = cells_of(paint(cells, -2, 2), 2, 5)
    assert shown[0] == list(SCALE)
    assert shown[1][0] == (64, 42, 112)  # (68 + 59) / 2 rounded to even, (1 + 82) / 2, (84 + 139) / 2
    assert shown[1][1:] == [UNKNOWN] * 4


def test_what_is_beyond_the_ends_and_zero_has_the_ends_colour() -> None:
    shown = cells_of(paint({("a", 0): 0.0, ("a", 1): 1e-30, ("a", 2): 1e30}, -8, 0), 1, 3)
    assert shown == [[SCALE[0], SCALE[0], SCALE[-1]]]


def test_unmeasured_and_not_finite_are_no_colour_of_the_scale() -> None:
    cells = {("a", 0): math.nan, ("a", 3): math.inf, ("b", 1): -math.inf}
    grey, red = UNKNOWN, NOT_FINITE
    assert cells_of(paint(cells, -2, 1), 2, 4) == [[red, grey, grey, red], [grey, red, grey, grey]]
    assert not {grey, red} & set(SCALE)


def test_the_scale_only_grows_lighter() -> None:
    row = paint({("a", at): 10 ** (at / 50) for at in range(51)}, 0, 1)[0, ::20].astype(float)
    light = row @ [0.2126, 0.7152, 0.0722]
    assert len(np.unique(row, axis=0)) > 45
    assert (np.diff(light) >= -0.5).all()


def test_cells_are_enlarged_and_large_models_stay_in_bounds() -> None:
    assert paint({("a", 1): 1.0}, 0, 1).shape == (24, 48, 3)
    large = {(f"h.{layer}", head): 1.0 for layer in range(126) for head in range(128)}
    assert paint(large, 0, 1).shape == (126 * 8, 128 * 8, 3)
    assert paint({("a", 4999): 1.0}, 0, 1).shape == (1, 5000, 3)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.integers(0, 4)), st.floats(allow_subnormal=False), min_size=1
    )
)
def test_every_cell_is_painted_alone(cells: dict[tuple[str, int], float]) -> None:
    rows = list(dict.fromkeys(row for row, _ in cells))
    width = 1 + max(column for _, column in cells)
    shown = cells_of(paint(cells, -2, 1), len(rows), width)
    for at, row in enumerate(rows):
        for column in range(width):
            alone = {(row, column): cells[row, column]} if (row, column) in cells else {}
            expected = cells_of(paint(alone, -2, 1), 1, column + 1)[0][column] if alone else UNKNOWN
            assert shown[at][column] == expected


def test_heads_are_judged_by_the_format_of_their_layer() -> None:
    def layer(dtype: str, *ratios: float) -> dict[str, object]:
        return {"dtype": dtype, "heads": [{"head": i, "roundoff_ratio": r} for i, r in enumerate(ratios)]}

    detail = {"layers": {"a": layer("bfloat16", 3.0, math.inf), "b": layer("float32", 100.0)}}
    assert heads(detail) == {("a", 0): 1.0, ("a", 1): math.inf, ("b", 0): 0.5}
    assert heads({"layers": {"a": layer("float64", 1.0)}}) == {}
    assert heads({"layers": {}}) == {}


def test_tensors_of_one_part_line_up_over_layers_and_arms() -> None:
    names = ["wte", "h.0.w", "h.0.b", "h.1.w", "h.1.b", "head"]
    rows = {name: {"rel_l2": float(at)} for at, name in enumerate(names)}
    cells = tensors({"tensors": {"float32": rows, "seed": {"h.1.b": {"rel_l2": 9.0}}}})
    assert cells == {
        ("float32 ", 0): 0.0,
        ("float32 h.0", 1): 1.0,
        ("float32 h.0", 2): 2.0,
        ("float32 h.1", 1): 3.0,
        ("float32 h.1", 2): 4.0,
        ("float32 ", 3): 5.0,
        ("seed h.1", 2): 9.0,
    }


def test_the_caption_says_where_the_colours_end() -> None:
    attention, weights = HEAT_MAPS["attention"], HEAT_MAPS["weights"]
    assert (attention.low, attention.high) == (-2, 1) and "limit / 100" in attention.caption
    assert "10 x the limit" in attention.caption
    assert f"1e{weights.low:.0f} and below" in weights.caption and 10**weights.high == 1
