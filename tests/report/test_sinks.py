import math
from typing import Any

import pytest

from stabilitykit.report.sinks import Sinks


class Kept:
    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((metrics, step))


class Greedy(Kept):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        metrics["epoch"] = 0.0
        super().log_metrics(metrics, step)


class Down:
    calls = 0

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls += 1
        raise OSError("disk full")


def test_every_logger_gets_one_dict_per_step() -> None:
    first, second = Kept(), Kept()
    sinks = Sinks([first, second])
    sinks.log({"loss/value": 2.0, "loss/score": 0.1}, 7)
    assert first.rows == second.rows == [({"loss/value": 2.0, "loss/score": 0.1}, 7)]


def test_numbers_that_are_not_finite_pass_as_they_are() -> None:
    logger = Kept()
    Sinks([logger]).log({"a": math.nan, "b": -math.inf}, 0)
    values, _ = logger.rows[0]
    assert math.isnan(values["a"])
    assert values["b"] == -math.inf


def test_a_logger_that_fails_is_said_once_and_dropped_while_the_others_go_on() -> None:
    down, kept = Down(), Kept()
    sinks = Sinks([down, kept])
    with pytest.warns(UserWarning, match=r"Down failed at step 3 .*OSError\('disk full'\)") as said:
        sinks.log({"a": 1.0}, 3)
    assert len(said) == 1
    sinks.log({"a": 2.0}, 4)  # a second warning would be an error here
    assert down.calls == 1
    assert [step for _, step in kept.rows] == [3, 4]


def test_what_a_logger_adds_reaches_neither_the_caller_nor_the_next_logger() -> None:
    values, kept = {"a": 1.0}, Kept()
    Sinks([Greedy(), kept]).log(values, 0)
    assert values == {"a": 1.0}
    assert kept.rows == [({"a": 1.0}, 0)]
