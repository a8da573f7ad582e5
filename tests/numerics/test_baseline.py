"""What is expected of the next loss: by hand, and against plain numpy on the whole past."""

import json
import math
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
    assert (course.slow.value, course.slow.lowest, course.slow.rise) == (2.0, 2.0, 0.0)
    for _ in range(32):
        course.learn(3.0)
    assert course.slow.rise == pytest.approx(1 - (31 / 32) ** 32)
    course.restart([5.0])
    assert (course.level, course.slow.value, course.slow.rise) == (5.0, 5.0, 0.0)


def test_a_mean_sixteen_times_slower_has_its_lowest_once_its_memory_is_full():
    course = learnt([2.0] * 511 + [3.0])
    assert course.slower.rise == pytest.approx(1 / 512)
    assert learnt([3.0] * 100 + [2.0]).slower.rise == 0.0


def test_a_descent_is_taken_to_go_on_as_a_power_law():
    course = learnt([10 - 0.001 * t for t in range(2000)])
    assert course.fall(1) == pytest.approx(0.001, rel=0.01)
    assert course.fall(500) == pytest.approx(2 * math.log(1.25), rel=0.01)
    assert course.fall(5000) == course.fall(1000)
    assert learnt([2 + 0.001 * t for t in range(2000)]).fall(500) == 0.0
    assert learnt([2.0] * 50).fall(500) == 0.0


def test_persistence_is_one_for_white_noise_and_grows_when_the_log_is_smoothed():
    generator = random.Random(0)
    white = [2 + generator.gauss(0, 0.1) for _ in range(2000)]
    assert learnt(white).persistence < 1.2
    smooth = [white[0]]
    for loss in white:
        smooth.append(0.9 * smooth[-1] + 0.1 * loss)
    # AR(1) of 0.9: changes over eight rows beside those over one.
    expected = ((1 - 0.9**8) / (1 - 0.9)) ** 1.5
    assert learnt(smooth).persistence == pytest.approx(expected, rel=0.3)


def test_a_value_written_finely_that_comes_again_is_held():
    course = learnt([2.125, 2.12345])
    assert course.repeats(2.12345)
    assert not course.repeats(2.125)
    assert not learnt([2.12]).repeats(2.12)


def test_the_state_survives_json():
    course, other = learnt([2 + i % 7 / 10 for i in range(200)]), Baseline(128, 1e-3)
    other.load_state_dict(json.loads(json.dumps(course.state_dict())))
    for loss in (2.0, 2.5, 1.0):
        assert other.expect(loss) == course.expect(loss)
        course.learn(loss)
        other.learn(loss)
    assert other.state_dict() == course.state_dict()
