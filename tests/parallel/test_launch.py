import operator

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from ring_cases import said_by
from stabilitykit.parallel.launch import on_ranks


def test_answers_come_in_order_of_rank_and_hold_tensors():
    found = on_ranks(2, said_by, 5)
    assert [(rank, world, plus) for rank, world, plus, _ in found] == [(0, 2, 5), (1, 2, 5)]
    assert all(torch.equal(summed, torch.tensor([1])) for *_, summed in found)


def test_what_a_rank_raises_is_raised():
    with pytest.raises(ProcessRaisedException, match="takes|expected 2 arguments"):
        on_ranks(1, operator.neg)


def test_no_rank_is_refused():
    with pytest.raises(ValueError, match="expected at least 1 rank, got 0"):
        on_ranks(0, said_by)
