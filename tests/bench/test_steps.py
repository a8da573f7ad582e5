from stabilitykit.bench.steps import row, seconds_of_steps


def test_a_row_by_hand():
    found = row("name", [4.0, 1.0, 2.0], "s", 4.0)
    assert (found["value"], found["ratio"], found["interval"]) == (2.0, 0.5, [1.0, 4.0])
    assert row("name", [1.0, 2.0, 3.0, 4.0, 5.0], "s", 1.0)["interval"] == [1.5, 4.5]
    assert [row("name", [value], "", 0.0)["ratio"] for value in (0.0, 1.0)] == [1.0, 0.0]


def test_every_step_is_timed_and_none_twice():
    tiny = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch_size": 1}
    assert len(seconds := seconds_of_steps(tiny, "32-true", [], steps=3)) == 3
    assert all(second > 0 for second in seconds)
