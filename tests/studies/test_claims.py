import math

import pytest

from stabilitykit.studies.claims import Claim, Study, claim


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
