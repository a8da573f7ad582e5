import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.precursors import (
    SAMPLE,
    corrected,
    each,
    largest,
    log_z,
    norms,
    outlier,
    rms,
    sample,
    sampled,
    small_shares,
)


def unbiased(moment, beta2, step):
    return corrected(moment, torch.tensor([beta2]), torch.tensor([step]), [len(moment)])


def test_rms_of_a_fresh_and_of_a_zeroed_moment_by_hand():
    grad = torch.full((4,), 1e-3)
    fresh = unbiased(0.001 * grad**2, 0.999, 1.0)
    assert rms(grad, fresh, 1e-8, [4]).item() == pytest.approx(1.0, rel=1e-3)
    # Zeroed after 283 steps, the correction of the 284th is far too small for it.
    zeroed = unbiased(0.001 * grad**2, 0.999, 284.0)
    assert rms(grad, zeroed, 1e-8, [4]).item() == pytest.approx(math.sqrt((1 - 0.999**284) / 0.001), rel=1e-3)
    assert rms(grad, torch.zeros(4), 1e-8, [4]).item() == pytest.approx(1e5)


@settings(deadline=None, max_examples=25)
@given(st.floats(1e-3, 1e3), st.integers(0, 99))
def test_rms_does_not_see_the_scale_of_the_loss(factor, seed):
    draw = torch.Generator().manual_seed(seed)
    grad, moment = torch.randn(50, generator=draw), torch.rand(50, generator=draw) + 0.01
    scaled = rms(grad * factor, moment * factor**2, 1e-12, [50])
    assert scaled.item() == pytest.approx(rms(grad, moment, 1e-12, [50]).item(), rel=1e-4)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 99))
def test_a_whole_list_is_as_each_alone(sizes, seed):
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(size, generator=draw) for size in sizes]
    assert norms(tensors).tolist() == pytest.approx([t.norm().item() for t in tensors])
    assert largest(tensors).tolist() == [max([0.0, *t.abs().tolist()]) for t in tensors]
    grads, moments = torch.cat(tensors), torch.rand(sum(sizes), generator=draw)
    eps, beta2 = (torch.rand(len(sizes), generator=draw) * 0.9 + 0.05 for _ in range(2))
    steps = torch.randint(1, 9, (len(sizes),), generator=draw)
    eps_each = each(eps, sizes)
    found = zip(
        rms(grads, corrected(moments, beta2, steps, sizes), eps_each, sizes).tolist(),
        small_shares(grads, eps_each, sizes).tolist(),
        strict=True,
    )
    for i, (one_rms, share) in enumerate(found):
        v = moments.split(sizes)[i] / (1 - beta2[i] ** steps[i])
        wanted = (tensors[i] ** 2 / v.clamp_min(eps[i] ** 2)).sum() / max(sizes[i], 1)
        assert one_rms == pytest.approx(wanted.sqrt().item(), rel=1e-5)
        large = (tensors[i].abs() >= eps[i]).sum().item() / max(sizes[i], 1)
        assert share == pytest.approx(1 - large, abs=1e-6)


def test_norms_of_16_bits_are_summed_in_32():
    ones = torch.ones(100_000, dtype=torch.bfloat16)
    assert norms([ones])[0].item() == pytest.approx(math.sqrt(100_000))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_lost(bad):
    grad = torch.tensor([1.0, bad])
    assert not math.isfinite(largest([grad])[0].item())
    assert not math.isfinite(norms([grad])[0].item())
    if math.isnan(bad):
        assert math.isnan(small_shares(grad, 1e-8, [2]).item())


def test_an_empty_part_of_a_sharded_tensor_counts_nothing():
    nothing = torch.zeros(0, 4)
    numbers = sample([nothing])
    found = (
        norms([nothing]),
        largest([nothing]),
        small_shares(numbers, 1.0, [0]),
        rms(numbers, numbers, 1.0, [0]),
    )
    assert [value.item() for value in found] == [0.0, 0.0, 1.0, 0.0]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 700), st.integers(1, 300))
def test_a_sample_is_small_and_sees_every_column(rows, width):
    numbers = sample([torch.arange(width).repeat(rows, 1)], most=512)
    assert 0 < len(numbers) <= 512
    assert sampled(torch.arange(width).repeat(rows, 1), most=512) == len(numbers)
    if len(numbers) >= width:
        assert len(numbers.unique()) == width


def test_small_tensors_are_taken_whole_and_as_copies():
    tensors = [torch.randn(SAMPLE // 64, 64), torch.randn(64, 3).T]
    numbers = sample(tensors)
    assert torch.equal(numbers, torch.cat([tensor.flatten() for tensor in tensors]))
    before = numbers.clone()
    tensors[0].zero_()
    assert torch.equal(numbers, before)


def test_log_z_moves_with_the_logits():
    logits = torch.randn(2, 5, 7)
    assert log_z(logits - 3).item() == pytest.approx(log_z(logits).item() - 3, abs=1e-5)


def test_an_outlier_does_not_move_its_yardstick():
    hidden = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    usual = outlier(hidden).item()
    hidden[3, 7] = 1000.0
    assert 4 < usual < 8
    assert outlier(hidden).item() > 1000
