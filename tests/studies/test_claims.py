import math
import statistics
from typing import Any

import pytest
from scipy import stats

from stabilitykit.studies.claims import Claim, Study, claim, comparison


def test_a_claim_holds_when_every_seed_lies_in_the_band_and_reports_median_and_range() -> None:
    found = claim("ten times", "a paper", [7.0, 12.0, 9.0], low=5, high=15)
    assert found == Claim("ten times", "a paper", "in [5, 15]", 9.0, (7.0, 12.0), True)


@pytest.mark.parametrize("values", [[7.0, 16.0], [4.9], [math.nan], [6.0, math.nan, 7.0], [math.inf]])
def test_one_seed_outside_the_band_is_enough(values: list[float]) -> None:
    assert claim("ten times", "a paper", values, low=5, high=15).holds is False


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(3, math.inf, ">= 3"), (-math.inf, 1, "<= 1"), (0, 0, "exactly 0"), (-0.05, 0.05, "in [-0.05, 0.05]")],
)
def test_the_band_in_words(low: float, high: float, words: str) -> None:
    assert claim("a", "b", [0.0], low=low, high=high).expected == words


def test_the_document_has_the_contracts_fields() -> None:
    document = Study("x", [claim("a", "b", [1.0])], [{"experiment": "e", "n": 1}]).to_json()
    assert set(document["claims"][0]) == {"claim", "source", "expected", "measured", "interval", "holds"}
    assert document["results"] == [{"experiment": "e", "n": 1}]
    assert document["claims"][0]["interval"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("ratios", "above", "holds"),
    [
        ([0.5, 0.52, 0.48], False, True),
        ([0.5, 0.52, 0.48], True, False),
        ([2.0, 2.1, 1.9], True, True),
        ([0.9, 1.2, 1.0], False, "indistinguishable"),
        ([0.5, 0.52, 5.0], False, "indistinguishable"),
        ([0.5], False, "indistinguishable"),
        ([1.0, 1.0], False, "indistinguishable"),
        ([0.5, math.nan], False, False),
        ([0.5, 0.0], False, False),
        ([0.5, math.inf], False, False),
    ],
)
def test_a_comparison_holds_when_the_seeds_leave_no_doubt(
    ratios: list[float], above: bool, holds: Any
) -> None:
    assert comparison("a", "b", ratios, above=above).holds == holds


def test_the_interval_of_a_comparison_is_students_on_the_logarithms() -> None:
    found = comparison("a", "b", [0.5, 0.6, 0.8])
    logs = [math.log(x) for x in (0.5, 0.6, 0.8)]
    low, high = stats.t.interval(0.95, 2, loc=statistics.mean(logs), scale=stats.sem(logs))
    assert found.measured == pytest.approx((0.5 * 0.6 * 0.8) ** (1 / 3))
    assert found.interval == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
    assert found.expected == "below 1 (95 % over seeds)"
    assert comparison("a", "b", [0.5]).interval == (0.0, math.inf)
