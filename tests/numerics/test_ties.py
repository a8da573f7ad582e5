import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.ties import row_ties


def scores_to_qk(scores, dtype):
    """q, k whose products are these scores, exactly."""
    q = torch.eye(scores.shape[-2], dtype=dtype).expand(*scores.shape[:-2], -1, -1)
    return q, scores.to(dtype).mT.contiguous()


def test_by_hand():
    scores = torch.tensor([[[[3.0, 3.0, 1.0], [3.0, 1.0, 1.0], [300.0, 1.0, 0.0], [1.0, 1.0, 1.0]]]])
    q, k = scores_to_qk(scores, torch.float32)
    ties = row_ties(q, k, k, scale=1.0)
    assert ties.repeated_max.tolist() == [[2 / 4]]
    assert ties.probability_one.tolist() == [[1 / 4]]


def test_rows_of_one_key_are_left_out():
    q = torch.ones(1, 1, 3, 2)
    ties = row_ties(q, q, q, causal=True)
    assert ties.repeated_max.item() == 1.0  # rows 1 and 2; row 0 sees itself only
    assert ties.probability_one.item() == 0.0
    assert math.isnan(row_ties(q, q, q, window=(0, 0)).repeated_max.item())


def test_the_format_makes_the_ties():
    scores = torch.tensor([[[[1.0, 1.0 + 2**-9, 0.0]]]])
    for dtype, share in ((torch.float32, 0.0), (torch.bfloat16, 1.0)):
        q, k = torch.ones(1, 1, 1, 2), torch.stack([scores.view(1, 1, 3), scores.view(1, 1, 3)], -1) / 2
        assert row_ties(q.to(dtype), k.to(dtype), k.to(dtype), scale=1.0).repeated_max.item() == share


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from([torch.bfloat16, torch.float16]))
def test_a_plain_loop_counts_the_same(seed, dtype):
    draw = torch.Generator().manual_seed(seed)
    q, k = (torch.randint(-3, 4, (2, 4, 9, 4), generator=draw).to(dtype) for _ in range(2))
    ties = row_ties(q, k, k, causal=True, scale=4.0, heads=[1, 3], rows=torch.tensor([0, 4, 8]))
    for b in range(2):
        for i, head in enumerate((1, 3)):
            repeated = ones = 0
            for row in (4, 8):  # row 0 sees one key
                s = [(q[b, head, row].float() @ k[b, head, j].float()) * 4 for j in range(row + 1)]
                s = torch.stack(s).to(dtype)
                repeated += int((s == s.max()).sum() > 1)
                ones += int((torch.softmax(s.float(), 0).to(dtype) == 1).any())
            assert ties.repeated_max[b, i].item() == repeated / 2
            assert ties.probability_one[b, i].item() == ones / 2


def test_hidden_keys_are_no_ties():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[1.0], [2.0], [2.0], [3.0]]]])
    keep = torch.tensor([[True, True, False, False]])
    assert row_ties(q, k, k, mask=keep).repeated_max.item() == 0
    lowest = torch.zeros(1, 4).masked_fill(~keep, torch.finfo(torch.float32).min)
    assert row_ties(q, k, k, mask=lowest).repeated_max.item() == 0
    assert row_ties(q, k, k).repeated_max.item() == 0
    assert row_ties(q, k, k, mask=torch.tensor([[True, True, True, False]])).repeated_max.item() == 1


def test_options_are_checked():
    q = torch.ones(1, 1, 2, 1)
    with pytest.raises(ValueError, match="rows must lie in"):
        row_ties(q, q, q, rows=torch.tensor([5]))
