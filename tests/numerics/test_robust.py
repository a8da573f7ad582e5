"""The rolling window against numpy on the same values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.robust import RollingWindow

numbers = st.floats(-1e6, 1e6).map(lambda value: round(value, 1))  # rounded, so that ties occur


def test_the_oldest_value_leaves_also_when_it_is_a_twin():
    window = RollingWindow(3, [1.0, 5.0, 1.0, 2.0])
    assert list(window.values) == [5.0, 1.0, 2.0]
    assert (len(window), window.median()) == (3, 2.0)


def test_an_even_count_has_the_mean_of_the_middle_two():
    assert RollingWindow(4, [1.0, 2.0, 4.0, 9.0]).median() == 3.0


@settings(max_examples=100, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40), st.integers(1, 12), st.floats(0, 1))
def test_quantiles_are_numpys(values, size, share):
    window = RollingWindow(size, values)
    kept = values[-size:]
    assert list(window.values) == kept
    assert window.median() == pytest.approx(np.median(kept), rel=1e-12, abs=1e-9)
    assert window.quantile(share) == pytest.approx(np.quantile(kept, share), rel=1e-9, abs=1e-9)
    low, middle, high = window.tails(share / 2)
    assert low == pytest.approx(np.quantile(kept, share / 2), rel=1e-9, abs=1e-9)
    assert middle == pytest.approx(np.median(kept), rel=1e-12, abs=1e-9)
    assert high == pytest.approx(np.quantile(kept, 1 - share / 2), rel=1e-9, abs=1e-9)
