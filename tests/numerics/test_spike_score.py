import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.spike_score import LEAST, SpikeScore


def plainly(series, window):
    """The definition, by numpy, with nothing kept between values."""
    far = []
    for at, value in enumerate(series):
        before = [v for v in series[:at] if math.isfinite(v)][-window:]
        known = len(before) >= LEAST
        off = abs(value - np.mean(before)) if known else 0.0
        far.append(not math.isfinite(value) or (known and off > 0 and off >= 7 * np.std(before)))
    return [100 * sum(far[max(0, at + 1 - window) : at + 1]) / min(at + 1, window) for at in range(len(far))]


def noisy(seed, rows, spikes):
    series = 2.5 + np.random.default_rng(seed).normal(0, 0.05, rows)
    for place, size in spikes:
        series[place % rows] += size
    return series.tolist()


SPIKES = st.lists(st.tuples(st.integers(0, 399), st.sampled_from([5.0, -3.0, 0.2, math.inf])), max_size=6)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 99), SPIKES, st.sampled_from([120, 1000]))
def test_it_is_the_definition(seed, spikes, window):
    series = noisy(seed, 400, spikes)
    score = SpikeScore(window)
    assert [score.update(value) for value in series] == pytest.approx(plainly(series, window))


def test_one_spike_among_a_thousand_is_a_tenth_of_a_percent_until_it_has_left():
    score = SpikeScore()
    series = noisy(0, 3000, [(1500, 4.0)])
    told = [score.update(value) for value in series]
    assert set(told[:1500]) == {0.0}
    assert set(told[1500:2500]) == {0.1}
    assert set(told[2500:]) == {0.0}


def test_a_flat_series_has_no_spikes_and_one_step_off_it_is_one():
    score = SpikeScore()
    assert [score.update(2.0) for _ in range(200)][-1] == 0.0
    assert score.update(2.0 + 1e-9) == pytest.approx(100 / 201)


def test_its_state_is_json_and_goes_on_as_if_never_cut():
    series = noisy(3, 1500, [(1100, 3.0), (1300, math.nan)])
    whole, first, second = SpikeScore(), SpikeScore(), SpikeScore()
    expected = [whole.update(value) for value in series]
    for value in series[:1200]:
        first.update(value)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.update(value) for value in series[1200:]] == expected[1200:]
