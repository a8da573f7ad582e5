import json
from pathlib import Path
from typing import Any

import pytest

from chromium import browse, browser, drawn
from stabilitykit.report.study import bars, claim_lines, lines, write_study

HOSTILE = "</script><b id=planted>x</b>"


def study(holds: bool) -> dict[str, Any]:
    claim = {"claim": HOSTILE, "source": "a paper", "expected": ">= 3", "measured": 5.5}
    rows = [{"experiment": "length", "n": 128, "ratio": 3.1, "state": None}]
    return {
        "study": "deviation",
        "claims": [{**claim, "interval": [4.0, 7.0], "holds": holds}],
        "results": [*rows, {"experiment": "kernel", "ratio": float("nan")}],
        "words": "First.\n\nSecond.",
    }


FIGURES = {
    "Error against length": lines({"low": [(128, 3.0), (256, 4.0)], "high": [(128, 0.9)]}, "N", "ratio"),
    "Kernels": bars({"flash": 0.9, "math": float("inf")}, "roundoffs"),
}


def test_a_claims_row_says_what_was_expected_and_measured() -> None:
    row = claim_lines(study(True)["claims"])[0]
    assert row[1:] == [">= 3", "5.5", "4 to 7", "holds", "a paper"]
    assert claim_lines(study(False)["claims"])[0][4] == "does not hold"


def test_lines_leave_out_what_has_no_logarithm_and_bars_what_is_not_finite() -> None:
    drawn = lines({"a": [(1, 0.0), (2, 1.0), (3, float("nan"))]}, "N", "ratio")
    assert drawn["data"][0]["x"] == [2]
    assert FIGURES["Kernels"]["data"][0]["y"] == ["flash"]


def test_the_numbers_stand_beside_the_page_and_are_the_same(tmp_path: Path) -> None:
    path = write_study(tmp_path / "out", study(True), FIGURES)
    beside = json.loads((tmp_path / "out" / "deviation.json").read_text())
    assert path == tmp_path / "out" / "deviation.html"
    assert beside["claims"] == study(True)["claims"]
    assert beside["results"][1]["ratio"] == "nan"


@pytest.mark.parametrize(("holds", "headline"), [(True, "all 1 claims hold"), (False, "0 of 1 claims hold")])
def test_the_headline_counts_claims(tmp_path: Path, holds: bool, headline: str) -> None:
    assert headline in write_study(tmp_path, study(holds), FIGURES).read_text()


def test_what_is_undecided_is_no_claim_that_holds(tmp_path: Path) -> None:
    two = study(True)
    two["claims"].append({**two["claims"][0], "holds": "indistinguishable"})
    assert "1 of 2 claims hold, 1 are undecided" in write_study(tmp_path, two, FIGURES).read_text()


@browser
def test_the_page_draws_in_a_real_browser_without_a_word_or_a_request(tmp_path: Path) -> None:
    dom, console, asked = browse(write_study(tmp_path, study(True), FIGURES), tmp_path)
    assert console == []
    assert asked == set()
    assert drawn(dom) == 2
    assert "<b id=planted>" not in dom
