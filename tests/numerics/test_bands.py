import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.bands import RELEARN, WINDOW, Bands, Scale

LOG = Scale()


def fed(values, scale=LOG, bands=None):
    """The steps at which a signal of these values is outside."""
    bands = bands or Bands()
    return [step for step, value in enumerate(values) if bands.update(step, {"x": value}, {"x": scale})]


def noisy(count, noise=0.1, seed=0, slope=0.0):
    draw = random.Random(seed)
    return [math.exp(slope * step + noise * draw.gauss(0, 1)) for step in range(count)]


def test_a_jump_is_outside_with_its_size_and_since_when():
    bands = Bands()
    fed(noisy(100), bands=bands)
    first = bands.update(100, {"x": 30.0}, {"x": LOG})["x"]
    later = bands.update(103, {"x": 40.0}, {"x": LOG})["x"]
    assert (first.value, first.since, later.since) == (30.0, 100, 100)
    assert first.usual == pytest.approx(1.0, rel=0.1)
    assert first.sigmas == pytest.approx(math.log(30) / 0.1, rel=0.4)


def test_values_outside_do_not_widen_the_band():
    series = noisy(100) + [30.0] * 20 + noisy(5, seed=1) + [30.0]
    assert fed(series) == [*range(100, 120), 125]


def test_a_new_level_is_usual_in_the_end():
    assert fed(noisy(100) + [30.0] * (RELEARN + 20)) == list(range(100, 100 + RELEARN))


@pytest.mark.parametrize("slope", [0.0, 0.05, -0.05])
@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_noise_and_a_steady_course_are_not_outside(noise, slope):
    assert fed(noisy(2000, noise, slope=slope), Scale(low=True)) == []


def test_an_opening_warm_up_is_not_outside():
    assert fed([1e-4 * (step + 1) for step in range(50)] + [5e-3] * 100, Scale(low=True)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_outside_from_the_first_value_and_not_learnt(value):
    assert fed([value, *noisy(40), value]) == [0, 41]


def test_sides_and_zeros():
    assert fed([*noisy(50), 0.001]) == []
    assert fed([*noisy(50), 0.001], Scale(low=True)) == [50]
    assert fed([*noisy(50), 0.0, 0.0]) == []
    assert fed([0.5] * 40 + [0.4, 0.3], Scale("linear", low=True, floor=0.02)) == [41]
    assert fed([-5.0] * 40 + [-400.0], Scale("asinh", low=True)) == [40]


def test_three_halvings_of_a_loss_scale_are_outside_two_are_not():
    scale = Scale(high=False, low=True, floor=3 * math.log(2) / 8 * 0.999)
    assert fed([65536.0] * 30 + [32768.0, 16384.0, 8192.0, 4096.0], scale) == [32, 33]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(0.1, 100) | st.just(math.inf), min_size=1, max_size=90), st.integers(0, 90))
def test_a_band_survives_json_bit_for_bit(values, cut):
    whole, first, second = Bands(), Bands(), Bands()
    told = [whole.update(step, {"x": value}, {"x": LOG}) for step, value in enumerate(values)]
    for step, value in enumerate(values[:cut]):
        first.update(step, {"x": value}, {"x": LOG})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [second.update(cut + i, {"x": value}, {"x": LOG}) for i, value in enumerate(values[cut:])]
    assert repr(rest) == repr(told[cut:])  # NaN is not equal to itself
    assert len(whole.state_dict()["x"]["off"]) <= WINDOW
