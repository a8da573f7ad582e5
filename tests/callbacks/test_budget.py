import pytest

from stabilitykit.callbacks.budget import FOLLOW_UPS, PROBES, SHARE, Budget, Clock, Most, Size

GPT = Most(heads=6, group=1, rows=256, sequences=8, layers=6)


def cost(size, constant=0.0, unit=1e-4):
    """Seconds of a due step on a machine whose every layer costs a constant and its work."""
    return GPT.layers * (constant / size.layers_every + unit * GPT.work(size))


def settled(every, plain, constant=0.0, unit=1e-4, tap=0.0, **named):
    budget, sizes = Budget(every, **named), []
    while not budget.settled:
        for _ in range(FOLLOW_UPS if budget.choices else PROBES):
            for _ in range(3):
                budget.plain(plain)
            budget.due(cost(budget.size, constant, unit), plain + tap)
        figures = budget.figures(GPT)
        assert figures is not None
        budget.choose(figures)
        sizes.append(budget.size)
    return budget, sizes


def test_with_room_everything_is_measured_at_every_due_step():
    budget, _ = settled(100, plain=40.0)
    assert budget.size == Size(6, 256, 8)


@pytest.mark.parametrize("every", [10, 30, 100, 1000])
@pytest.mark.parametrize("constant", [0.0, 0.01])
@pytest.mark.parametrize("tap", [0.0, 0.02])
def test_what_is_chosen_costs_less_than_its_share(every, constant, tap):
    plain = 5.0
    budget, sizes = settled(every, plain, constant, tap=tap)
    assert cost(budget.size, constant) + tap <= SHARE * every * plain
    assert len(sizes) <= 4
    work = [GPT.work(size) for size in sizes]
    assert work == sorted(work)  # the first choice is the most careful one


def test_layers_take_turns_when_even_the_least_sample_of_all_is_too_much():
    budget, _ = settled(10, plain=2.0, unit=1e-4)
    assert (budget.size.heads, budget.size.rows, budget.size.sequences) == (2, 64, 1)
    assert budget.size.layers_every == 3
    assert cost(budget.size) <= SHARE * 10 * 2.0
    over, _ = settled(1, plain=2.0)
    assert over.size.layers_every == GPT.layers


def test_what_is_named_stays():
    budget, _ = settled(100, plain=20.0, rows=32)
    assert budget.size == Size(6, 32, 8)
    budget, _ = settled(100, plain=20.0, heads=[1, 3])
    assert budget.size == Size([1, 3], 256, 8)
    all_named = Budget(100, heads=1, rows=2, sequences=3)
    assert all_named.settled
    assert all_named.size == Size(1, 2, 3)


def test_nothing_is_chosen_before_enough_was_measured():
    budget = Budget(10)
    for number in range(PROBES):
        assert budget.figures(GPT) is None
        budget.plain(1.0)
        budget.due(0.1, 1.0 + 0.02 * number)
    figures = budget.figures(GPT)
    assert figures is not None
    assert (figures.cost, figures.plain) == (0.1, 1.0)
    assert figures.tap == pytest.approx(0.07)
    assert figures.over == pytest.approx(0.17)


def test_when_every_step_is_due_its_rest_is_the_plain_step():
    budget = Budget(1)
    for _ in range(PROBES):
        budget.due(0.1, 2.0)
    figures = budget.figures(GPT)
    assert figures is not None
    assert (figures.plain, figures.tap) == (2.0, 0.0)


def test_a_smaller_sample_exists_down_to_one_row_of_one_head():
    budget, seen = Budget(10, heads=[0, 1, 2], rows=8), []
    for _ in range(5):
        budget.shrink()
        seen.append((budget.size.heads, budget.size.rows))
    assert seen == [([0, 1, 2], 4), ([0, 1, 2], 2), ([0, 1, 2], 1), ([0], 1), ([0], 1)]
    assert budget.settled
    assert Size(2, 64, 4).shrunk() == Size(2, 64, 2)
    assert str(Size(2, 64, 1)) == "2 heads and 64 rows, 1 of the sequences"


def test_state_goes_on_where_it_was():
    budget, _ = settled(100, plain=20.0)
    budget.due(1.0, 2.0)
    again = Budget(100)
    again.load_state_dict(budget.state_dict())
    assert again.state_dict() == budget.state_dict()
    other = Budget(100, rows=16)  # named since
    other.load_state_dict(budget.state_dict())
    assert (other.size.heads, other.size.rows) == (6, 16)


def test_the_clock_takes_from_a_step_what_monitors_took(monkeypatch):
    times = iter([0.0, 10.0, 25.0])
    monkeypatch.setattr("stabilitykit.callbacks.budget.time.perf_counter", lambda: next(times))
    budget, clock = Budget(2), Clock()
    clock.begin(budget, spent=0.0, own=0.0, due=False)
    clock.begin(budget, spent=1.0, own=0.0, due=True)  # 10 s, 1 s of them another monitor's
    clock.begin(budget, spent=6.0, own=4.0, due=False)  # 15 s, 5 s of monitors, 4 s of them this one's
    state = budget.state_dict()
    assert (state["plain"], state["costs"], state["taps"]) == ([9.0], [4.0], [1.0])
