"""Bad input of the ring: refused in one line, on every rank, before anything is sent; and ranks that die."""

import re

import pytest
import torch

from ranks import Ranks, ranks
from ring_cases import attend_many, differ, stop_in_mid_ring, whole
from stabilitykit.parallel.ring import ring_attention


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"n": 16}, r"rank 0: q \[1, 2, 8, 8\].*rank 1: q \[1, 2, 16, 8\]"),
        ({"h_kv": 1}, r"rank 1: .*k \[1, 1, 8, 8\]"),
        ({"dtype": torch.float32}, "rank 0: .*float64.*rank 1: .*float32"),
        ({"layout": "zigzag"}, "layout='striped'.*layout='zigzag'"),
        ({"causal": False}, "causal=True.*causal=False"),
        ({"scale": 0.5}, "scale=0.5"),
        ({"window": (3, 0)}, r"window=\(3, 0\)"),
        ({"mask": torch.ones(1, 8, dtype=torch.bool)}, "no labels.*rank 1: .*with labels"),
        ({"grad": False}, "gradient True.*gradient False"),
        (
            {"layout": "ring"},
            "rank 1: refused: layout must be one of contiguous, striped, zigzag, got 'ring'",
        ),
        ({"n": 7, "layout": "zigzag"}, "rank 1: refused: zigzag over 2 ranks needs a length that 4 divides"),
        ({"dropout_p": 0.1}, "rank 1: refused: ring_attention has no dropout, got dropout_p 0.1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_ranks_that_disagree_are_named_and_nothing_is_sent(what, says):
    for said, sent, seconds in ranks(2).run(differ, odd=1, what=what):
        assert sent == 0 and seconds < 10
        assert said.startswith("the ranks of a ring must agree on their inputs, got rank 0: ")
        assert re.search(says, said), said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dropout_p": 0.1}, "ring_attention has no dropout, got dropout_p 0.1"),
        ({"tile": 0}, "tile must be >= 1, got 0"),
        ({"window": (3,)}, r"window must be \(left, right\), each >= -1, got \(3,\)"),
        ({"mask": torch.ones(8, 8, dtype=torch.bool)}, r"mask must be \(1, 8\), got \(8, 8\)"),
        ({"mask": torch.ones(1, 8)}, "mask must be bool, got torch.float32"),
        ({"documents": torch.zeros(1, 7)}, r"documents must be \(1, 8\), got \(1, 7\)"),
        ({"documents": torch.full((1, 8), -1)}, "documents must be integers >= 0"),
        ({"documents": torch.zeros(1, 8)}, "documents must be integers >= 0, got torch.float32"),
        ({"layout": "ring"}, "layout must be one of contiguous, striped, zigzag, got 'ring'"),
        ({"kernel": "flash"}, "kernel must be 'fused' or 'exact', got 'flash'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_supported_is_refused_in_one_line(options, says):
    with pytest.raises(ValueError, match=says) as caught:
        ring_attention(*whole(n=8)[:3], **options)
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_are_refused():
    q, k, v, _ = whole(n=8)
    with pytest.raises(ValueError, match="q and k must have the same tokens, got 8 and 7"):
        ring_attention(q, k[:, :, :7], v[:, :, :7])
    with pytest.raises(ValueError, match="q, k and v must have one dtype"):
        ring_attention(q, k.float(), v)


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_a_rank_whose_tokens_are_all_masked_gives_zeros_there(layout):
    """Megatron #1764: no NaN in out or gradients."""
    at = {"contiguous": [0, 1, 2, 3], "striped": [0, 2, 4, 6], "zigzag": [0, 1, 6, 7]}[layout]
    mask = torch.ones(1, 8, dtype=torch.bool)
    mask[:, at] = False
    case = {"layout": layout, "draw": {"n": 8}, "mask": mask.tolist()}
    first, second = (rank[0] for rank in ranks(2).run(attend_many, cases=[case]))
    for x in (*first, *second):
        assert torch.from_numpy(x).isfinite().all()
    assert all((x == 0).all() for x in first[2:]) and (second[0] != 0).any()


@pytest.mark.parametrize("silent", [False, True], ids=["dead", "silent"])
def test_case_18_the_others_stop_when_a_rank_does(silent):
    """lucidrains PR #9, nccl #479: an error within the group's timeout, never a hang."""
    three = Ranks(3, timeout_s=3)
    try:
        found = three.outcomes(stop_in_mid_ring, odd=1, silent=silent, within_s=20)
    finally:
        three.close()
    for rank in (0, 2):
        said, seconds = found[rank]
        assert said.startswith(f"ring attention stopped on rank {rank} of 3: no word from another")
        assert "\n" not in said.split("(")[0] and seconds < 15


def test_a_rank_that_joined_no_group_is_told(monkeypatch):
    x = torch.zeros(1, 1, 2, 4)
    assert ring_attention(x, x, x).shape == x.shape  # one process: nothing to say
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    with pytest.warns(UserWarning, match="WORLD_SIZE is 2: torch.distributed.init_process_group was not"):
        ring_attention(x, x, x)
