"""Events of whole logs, and periods: by hand, on chance, and on a published run with epochs."""

import random
from pathlib import Path

from stabilitykit.numerics.history import find_events, period

DATA = Path(__file__).parents[1] / "data"


def rows_of(name):
    lines = (DATA / name).read_text().splitlines()[1:]
    return [(int(line.split(",")[0]), float(line.split(",")[1])) for line in lines]


def noisy(steps, spikes=(), seed=0):
    generator = random.Random(seed)
    return [(t, 3.0 + generator.gauss(0, 0.05) + (t in spikes)) for t in range(steps)]


def test_the_same_batch_every_epoch_is_said_so():
    events = find_events(noisy(3000, spikes=(400, 1000, 1600, 1777, 2200)))
    assert [event.start for event in events] == [400, 1000, 1600, 1777, 2200]
    assert [event.recurs_every for event in events] == [600, 600, 600, None, 600]


def test_two_events_or_uneven_ones_do_not_recur():
    assert all(event.recurs_every is None for event in find_events(noisy(2000, spikes=(400, 1000))))
    uneven = find_events(noisy(3000, spikes=(400, 1000, 1700, 2600)))
    assert len(uneven) == 4
    assert all(event.recurs_every is None for event in uneven)


def test_events_strewn_at_random_rarely_show_a_period():
    generator = random.Random(0)
    found = [period(sorted(generator.sample(range(20_000), 40)), 1) for _ in range(200)]
    assert sum(every is not None for every in found) <= 8  # 2 % of 200, and its Poisson spread


def test_a_published_run_repeats_its_bad_batches_every_epoch():
    events = find_events(rows_of("speedrun_2.csv"))
    every = {event.start: event.recurs_every for event in events}
    assert {1825, 4105, 3330, 5610} <= every.keys()
    assert set(every.values()) == {2280}


def test_a_log_without_rows_or_with_one_has_no_events():
    assert find_events([]) == []
    assert find_events([(0, 3.0)]) == []


def test_open_events_are_in_their_present_state():
    rows = [*noisy(300), *((t, 7.0) for t in range(300, 340))]
    (event,) = find_events(rows)
    assert (event.kind, event.start, event.end) == ("divergence", 300, None)
