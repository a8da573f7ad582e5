"""Who owns which token, and that neither order nor padding changes what is learned."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.parallel.layout import (
    IGNORED,
    LAYOUTS,
    next_tokens,
    pad,
    padded_length,
    positions,
    runs,
    shard,
    shard_batch,
    unshard,
)

few = settings(max_examples=60, deadline=None)


def test_the_papers_toy_of_16_tokens_on_4_devices():
    """arXiv 2311.09431, figures 2 and 3."""
    assert [positions(16, d, 4, "contiguous").tolist() for d in (0, 3)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert [positions(16, d, 4, "striped").tolist() for d in (0, 1)] == [[0, 4, 8, 12], [1, 5, 9, 13]]
    assert [positions(16, d, 4, "zigzag").tolist() for d in (0, 3)] == [[0, 1, 14, 15], [6, 7, 8, 9]]


@few
@given(
    layout=st.sampled_from(LAYOUTS), world=st.integers(1, 6), length=st.integers(1, 50), dim=st.integers(0, 2)
)
def test_unshard_undoes_shard(layout, world, length, dim):
    shape = [2, 3, 2]
    shape[dim] = length
    x = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    padded = pad(x, world, layout, dim, -1)
    parts = [shard(padded, rank, world, layout, dim) for rank in range(world)]
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(unshard(parts, layout, dim).narrow(dim, 0, length), x)
    assert (unshard(parts, layout, dim).narrow(dim, length, padded.shape[dim] - length) == -1).all()


@few
@given(layout=st.sampled_from(LAYOUTS), world=st.integers(1, 6), length=st.integers(1, 50))
def test_positions_are_what_shard_takes_and_each_has_one_owner(layout, world, length):
    length = padded_length(length, world, layout)
    taken = [shard(torch.arange(length), rank, world, layout, 0) for rank in range(world)]
    assert all(torch.equal(taken[rank], positions(length, rank, world, layout)) for rank in range(world))
    assert sorted(torch.cat(taken).tolist()) == list(range(length))


@pytest.mark.parametrize(("length", "world", "layout", "padded"), [
    (2999, 4, "contiguous", 3000), (31, 2, "striped", 32), (3000, 4, "zigzag", 3000), (2, 4, "striped", 4),
    (2, 4, "zigzag", 8), (8, 4, "zigzag", 8),
])  # fmt: skip
def test_padding_is_the_least_that_serves(length, world, layout, padded):
    assert padded_length(length, world, layout) == padded
    assert pad(torch.zeros(1, length), world, layout, 1).shape == (1, padded)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ((31, 0, 2, "striped"), "a length that 2 divides, got 31; pad.* 32"),
        ((6, 0, 2, "zigzag"), "a length that 4 divides, got 6; pad.* 8"),
        ((3, 0, 4, "contiguous"), "a length that 4 divides, got 3; pad.* 4"),
        ((8, 2, 2, "zigzag"), "rank must lie in 0..1, got 2"),
        ((8, 0, 0, "zigzag"), "world must be >= 1, got 0"),
        ((8, 0, 2, "ring"), "contiguous, striped, zigzag, got 'ring'"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(bad, says):
    with pytest.raises(ValueError, match=says):
        runs(*bad)


def test_parts_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"one length, got \[2, 3\]"):
        unshard([torch.zeros(2), torch.zeros(3)], "striped", 0)


def test_gradients_pass_through_shard():
    x = torch.arange(8.0).requires_grad_()
    shard(x, 1, 2, "zigzag", 0).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_case_14_labels_are_shifted_before_sharding(layout, world):
    """transformers PR #36607, torchtitan #4544: the boundary tokens keep their targets."""
    tokens = torch.randint(0, 11, (2, 13), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 5 + [1] * 8, [0] * 12 + [1]])
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets = next_tokens(tokens, documents)
    whole = F.cross_entropy(table[tokens].flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for rank in range(world):
        part = shard_batch(tokens, targets, rank, world, layout, documents=documents)
        logits = table[part.tokens].flatten(0, 1)
        total += F.cross_entropy(logits, part.targets.flatten(), ignore_index=IGNORED, reduction="sum")
        count += int((part.targets != IGNORED).sum())
        assert part.tokens.shape == part.targets.shape == part.positions.shape == part.mask.shape
        real = part.mask
        assert torch.equal(tokens.gather(1, part.positions.clamp(max=12))[real], part.tokens[real])
        assert part.documents is not None and (part.targets[~real] == IGNORED).all()
    assert count == int((targets != IGNORED).sum()) == 2 * 13 - 4
    assert total.item() / count == pytest.approx(whole.item(), rel=1e-14)
