import math

import pytest
import torch

from stabilitykit.numerics.bins import BINS, between, counted, edges, nonfinite

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_rise_and_every_value_lies_at_or_beyond_its_own(dtype):
    finite = edges(dtype)[torch.isfinite(edges(dtype))]
    assert len(edges(dtype)) == BINS
    assert bool((finite.diff() >= 0).all())
    values = torch.randn(3000, dtype=torch.float64).to(dtype)
    counts = counted(values)
    assert counts.sum() == 3000
    for at in counts.nonzero().flatten().tolist():
        held = between(values, at, at)
        assert len(held) == counts[at]
        assert bool((held.abs() >= edges(dtype)[at].abs()).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_split_the_values(dtype):
    values = torch.tensor([-2.0, -0.0, 0.0, 1e-5, 3.0], dtype=dtype)
    assert between(values, 0, BINS // 2 - 1).tolist() == [-2.0, -0.0]
    assert between(values, BINS // 2, BINS - 1).tolist() == values[2:].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_counted(dtype):
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0, torch.finfo(dtype).max], dtype=dtype)
    assert nonfinite(counted(values), dtype) == 3
