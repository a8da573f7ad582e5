import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist

from stabilitykit.bench.wasserstein import sharded
from stabilitykit.numerics import parts
from stabilitykit.numerics.parts import wasserstein_sharded, wasserstein_streamed
from stabilitykit.numerics.wasserstein import wasserstein

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def draw(seed, size, dtype, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.fixture
def alone():
    """A group of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pairs():
    """Equal and unequal sizes, every dtype, a part without values, values that crowd in one bin."""
    sizes = [(1000, 1000), (1000, 777), (5, 3000), (1, 1)]
    kinds = [(a, b) for a in DTYPES for b in DTYPES]
    found = [
        (draw(i, n, a), draw(i + 50, m, b, 1.3))
        for i, ((n, m), (a, b)) in enumerate((size, kind) for size in sizes for kind in kinds)
    ]
    return [
        *found,
        (torch.full((500,), 1.0), torch.full((300,), 1.0 + 2**-20)),
        (torch.zeros(7), -draw(99, 9, torch.float32).abs()),
    ]


def split(tensor, world, seed):
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, len(tensor) + 1, (world - 1,), generator=generator).sort().values.tolist()
    return [tensor[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(tensor)], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "p"), [(2, 1), (3, 2)])
def test_sharded_is_whole(world, p):
    shards = [(split(a, world, 1), split(b, world, 2)) for a, b in pairs()]
    expected = [wasserstein(a, b, p) for a, b in pairs()]
    assert sharded(world, shards, p) == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_what_one_rank_holds_is_refused_on_all_of_them():
    bad = [[torch.tensor([1.0, math.nan]), torch.ones(3)], [torch.ones(2), torch.ones(3)]]
    with pytest.raises(Exception, match="got 1 non-finite of 5 in a"):
        sharded(2, [(bad[0], bad[1])])


@pytest.mark.parametrize("p", [1, 2])
def test_one_rank_is_whole(alone, p):
    for a, b in pairs():
        assert wasserstein_sharded(a, b, p=p) == pytest.approx(wasserstein(a, b, p), rel=1e-12)


def test_bad_parts_are_named(alone):
    with pytest.raises(ValueError, match="got 2 non-finite of 3 in b"):
        wasserstein_sharded(torch.ones(3), torch.tensor([1.0, math.inf, math.nan]))
    with pytest.raises(ValueError, match=r"got none \(empty\) in a"):
        wasserstein_sharded(torch.ones(0), torch.ones(3))
    with pytest.raises(ValueError, match="expected 1 <= p < inf, got 0"):
        wasserstein_sharded(torch.ones(1), torch.ones(3), p=0)
    with pytest.raises(ValueError, match="got torch.int8 in a"):
        wasserstein_sharded(torch.ones(1).to(torch.int8), torch.ones(3))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**6),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2, 10, 1000]),
    st.sampled_from([1, 2]),
)
def test_streamed_is_whole(seed, n, m, first, second, in_memory, p):
    a, b = draw(seed, n, first), draw(seed + 1, m, second, 1.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "IN_MEMORY", in_memory)
        found = wasserstein_streamed(lambda: a.split(7), lambda: b.split(11), p)
    assert found == pytest.approx(wasserstein(a, b, p), rel=1e-12)


def test_streams_that_are_empty_or_not_finite_are_named():
    with pytest.raises(ValueError, match=r"got none \(empty\) in b"):
        wasserstein_streamed(lambda: [torch.ones(2)], lambda: [])
    with pytest.raises(ValueError, match="got 1 non-finite of 2 in a"):
        wasserstein_streamed(lambda: [torch.tensor([1.0, math.nan])], lambda: [torch.ones(2)])
