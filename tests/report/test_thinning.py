import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.report.thinning import thin, with_gaps

NAN = math.nan
curves = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([NAN, math.inf]), min_size=1, max_size=300)


def test_a_short_curve_stays_as_it_is() -> None:
    assert thin([3.0, 1.0, 2.0], 3) == [0, 1, 2]


def test_of_each_stretch_the_lowest_and_the_highest_stay() -> None:
    #                 ends 0 and 11; stretches 0-5 and 6-11
    values = [5, 5, 9, 5, 1, 5, 5, 7, 5, 5, -2, 5]
    assert thin(values, 4) == [0, 2, 4, 7, 10, 11]


def test_flagged_positions_stay() -> None:
    values = [0.0] * 100
    assert 57 in thin(values, 4, keep=[57])
    assert 57 not in thin(values, 4)


def test_a_long_curve_becomes_about_as_long_as_asked() -> None:
    values = [math.sin(at * 1.7) for at in range(50_000)]
    assert 1_900 <= len(thin(values)) <= 2_002


@settings(max_examples=60, deadline=None)
@given(values=curves, limit=st.integers(2, 60))
def test_extremes_ends_and_order_survive(values: list[float], limit: int) -> None:
    kept = thin(values, limit)
    finite = [value for value in values if math.isfinite(value)]
    shown = [values[at] for at in kept if math.isfinite(values[at])]
    assert kept == sorted(set(kept))
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    if finite:
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_a_gap_is_a_none() -> None:
    assert with_gaps([4, 5, 6, 7], [1.0, NAN, math.inf, 2.0]) == (
        [4, 5, 6, 7],
        [1.0, None, None, 2.0],
    )


@settings(max_examples=60, deadline=None)
@given(values=curves, limit=st.integers(2, 60))
def test_no_line_is_drawn_across_a_value_that_is_not_finite(values: list[float], limit: int) -> None:
    x, y = with_gaps(list(range(len(values))), values, limit)
    drawn = list(zip(x, y, strict=True))
    for (left, a), (right, b) in pairwise(drawn):
        if a is not None and b is not None:
            assert all(math.isfinite(value) for value in values[left : right + 1])
