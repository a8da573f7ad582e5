"""Exact attention of sampled rows over the keys of all ranks."""

import pytest

from ranks import ranks
from ring_cases import rows_off
from stabilitykit.parallel.layout import LAYOUTS

DOCUMENTS = [[0] * 7 + [1] * 17, [0] * 20 + [1] * 4]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": (4, -1)},
        {"window": (2, 3), "causal": False},
        {"documents": DOCUMENTS},
    ],
    ids=["causal", "all", "window", "both_sides", "documents"],
)
def test_each_rank_gets_its_rows_exactly_and_may_ask_for_none(layout, options):
    none, *found = ranks(3).run(rows_off, layout=layout, draw={"n": 24, "b": 2, "h_kv": 1}, **options)
    assert none == [[2, 2, 0, 8]] * 2
    for out_off, dq_off in found:
        assert max(out_off) < 1e-14 and max(dq_off) < 1e-14
