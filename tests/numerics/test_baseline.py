"""What is expected of the next loss: by hand, and against plain numpy on the whole past."""

import json
import random

import numpy as np
import pytest

from stabilitykit.numerics.baseline import Baseline


def learnt(losses, window=128, floor=1e-3):
    course = Baseline(window, floor)
    for loss in losses:
        course.learn(loss)
    return course


def test_before_the_noise_is_known_it_is_a_twentieth_of_the_level():
    assert Baseline(128, 1e-3).level is None
    assert learnt([4.0]).expect(9.0) == (4.0, pytest.approx(0.2))
    assert learnt([0.1]).expect(9.0) == (0.1, pytest.approx(0.05))
    # ... or as large as the changes seen say: residuals 2 and 1 about the levels 4 and 5.
    assert learnt([4.0, 6.0, 4.0]).expect(9.0) == (4.0, pytest.approx(0.45 * 2))


def test_level_and_noise_are_numpys_over_the_last_rows():
    generator = random.Random(0)
    losses = [3 + 2 / (1 + i / 50) + generator.gauss(0, 0.05) for i in range(300)]
    levels = [np.median(losses[max(0, i - 8) : i]) for i in range(1, 301)]
    residuals = [losses[i] - levels[i - 1] for i in range(1, 300)][-64:]
    low, lag, high = np.quantile(residuals, [0.1, 0.5, 0.9])
    sigma = min((high - low) / 2, 1.5 * (high - lag)) / 1.2816 * (1 + 8 / 64)
    assert learnt(losses, window=64).expect(0.0) == (
        pytest.approx(levels[-1] + lag),
        pytest.approx(sigma),
    )


def test_the_noise_has_floors():
    constant = [2.0] * 50
    assert learnt(constant).expect(2.0) == (2.0, pytest.approx(0.002 * 2))
    assert learnt([0.01] * 50).expect(0.0)[1] == 1e-3
    # Rounded to one decimal, and most rows alike: half a step.
    rounded = [2.0] * 40 + [2.1] + [2.0] * 40
    assert learnt(rounded).expect(2.0)[1] == pytest.approx(0.05)


def test_a_descent_in_the_window_is_not_noise():
    generator = random.Random(0)
    falling = [5 - 0.1 * min(i, 20) + generator.gauss(0, 0.02) for i in range(80)]
    assert learnt(falling).expect(3.0)[1] < 0.05


def test_the_slow_mean_rises_over_its_lowest():
    course = learnt([2.0] * 100)
    assert (course.slow, course.lowest, course.rise) == (2.0, 2.0, 0.0)
    for _ in range(32):
        course.learn(3.0)
    assert course.rise == pytest.approx(1 - (31 / 32) ** 32)
    course.restart([5.0])
    assert (course.level, course.slow, course.rise) == (5.0, 5.0, 0.0)


def test_the_state_survives_json():
    course, other = learnt([2 + i % 7 / 10 for i in range(200)]), Baseline(128, 1e-3)
    other.load_state_dict(json.loads(json.dumps(course.state_dict())))
    for loss in (2.0, 2.5, 1.0):
        assert other.expect(loss) == course.expect(loss)
        course.learn(loss)
        other.learn(loss)
    assert other.state_dict() == course.state_dict()
