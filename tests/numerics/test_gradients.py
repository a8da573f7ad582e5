import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.gradients import GradientWatch, ScaleWatch


def events(watch, series):
    found = [watch.update(step, value) for step, value in enumerate(series)]
    return [(event.kind, event.start, event.end) for event in found if event]


def norms(seed, rows):
    """A norm that falls from 4 to 1 with noise of 20 %, as of a small run."""
    draw = np.random.default_rng(seed).normal(0, 0.2, rows)
    return (np.exp(draw) * (1 + 3 * np.exp(-np.arange(rows) / 50))).tolist()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.floats(1e-6, 1e6))
@example(2979, 1.0)  # the first changes are small by chance
@example(4654, 1.0)  # likewise, but for the floor
@example(11860, 1.0)  # the second norm is twice the first
def test_noise_and_units_raise_nothing(seed, unit):
    assert events(GradientWatch(), [unit * norm for norm in norms(seed, 600)]) == []


def test_a_spike_is_told_in_norms_not_logarithms():
    watch, series = GradientWatch(), norms(1, 400)
    series[300] = 50.0
    found = [event for step, norm in enumerate(series) if (event := watch.update(step, norm))]
    assert [(e.kind, e.start, e.end is None) for e in found] == [
        ("gradient_spike", 300, True),
        ("gradient_spike", 300, False),
    ]
    assert found[0].peak == pytest.approx(50.0)
    assert 0.5 < found[0].baseline < 2


def test_a_slow_rise_of_the_norm_is_no_trouble():
    series = [norm * (1 + step / 300) for step, norm in enumerate(norms(2, 1500))]
    assert events(GradientWatch(), series) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_an_event_from_the_first_row(value):
    assert events(GradientWatch(), [value, *norms(0, 5)])[0] == ("gradient_nonfinite", 0, None)


def test_ten_exact_zeros_are_a_dead_gradient_until_it_is_back():
    series = norms(0, 60)
    series[40:55] = [0.0] * 15
    assert events(GradientWatch(), series) == [("dead_gradient", 49, None), ("dead_gradient", 49, 55)]
    series[40:49], series[49:55] = [0.0] * 9, norms(1, 6)
    assert events(GradientWatch(), series) == []


def test_a_column_of_zeros_is_not_available_and_says_nothing():
    watch = GradientWatch()
    assert events(watch, [0.0] * 100) == []
    assert not watch.available
    assert events(watch, norms(0, 100)) == []
    assert watch.available


def test_a_scaler_that_finds_its_place_and_later_overflows_now_and_then_is_healthy():
    first = [2.0**power for power in range(16, 10, -1)]
    later = [2.0**10] * 490 + [2.0**9, 2.0**8] + [2.0**8] * 500 + [2.0**9] * 100
    assert events(ScaleWatch(), first + later) == []


def test_six_halvings_in_ten_steps_are_an_event_that_ends_when_the_scale_stays():
    scales = [2.0**16] * 100 + [2.0**power for power in (15, 15, 14, 13, 13, 12, 11, 11, 10, 10)]
    found = events(ScaleWatch(), scales + [2.0**10] * 40)
    assert found == [("loss_scale", 105, None), ("loss_scale", 105, 128)]


def test_a_scale_at_its_floor_stays_an_event():
    scales = [2.0**power for power in range(3, -1, -1)] + [1.0] * 100
    assert events(ScaleWatch(), scales) == [("loss_scale", 3, None)]
    assert events(ScaleWatch(), [1.0] * 100) == []  # chosen, not fallen to


@pytest.mark.parametrize(
    ("make", "series"),
    [
        (GradientWatch, [*norms(0, 80), *[0.0] * 14, *norms(1, 40), math.inf, *norms(2, 40)]),
        (ScaleWatch, [2.0**9] * 5 + [2.0**power for power in (8, 7, 6, 5, 4)] + [16.0] * 30),
    ],
)
def test_a_state_is_json_and_goes_on_as_if_never_cut(make, series):
    whole = make()
    expected = [whole.update(step, value) for step, value in enumerate(series)]
    assert any(expected)
    for cut in range(0, len(series), 7):
        first, second = make(), make()
        for step in range(cut):
            first.update(step, series[step])
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [(e.start, e.kind) for e in second.pending] == [(e.start, e.kind) for e in first.pending]
        rest = [second.update(step, series[step]) for step in range(cut, len(series))]
        assert repr(rest) == repr(expected[cut:])  # NaN is not equal to itself
