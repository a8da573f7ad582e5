import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabilitykit.catalog import family
from stabilitykit.observe.attention import NUMBERS, measured, unmeasurable, worst
from stabilitykit.observe.sample import Look, Sample, covered_within
from stabilitykit.observe.tap import Tap

HEALTHY_FLOAT32 = 2e-6  # relative L2 of a float32 kernel over rows of up to 64 keys


def call_of(dtype=torch.float32, heads=4, key_heads=4, length=32, scale=1.0, replace=None, **kwargs):
    q = torch.randn(2, heads, length, 8).mul(scale).to(dtype).requires_grad_()
    k, v = (torch.randn(2, key_heads, length, 8).to(dtype).requires_grad_() for _ in range(2))
    calls = []
    with Tap(nn.Identity(), calls.append, replace=replace):
        out = F.scaled_dot_product_attention(q, k, v, **kwargs)
        out.backward(torch.randn(out.shape).to(dtype))
    return calls[0]


def sample_of(call, heads=2, rows=16, sequences=1):
    return Sample.draw(call, "seed", heads=heads, rows=rows, sequences=sequences)


@pytest.mark.parametrize("kwargs", [{}, {"is_causal": True}, {"scale": 0.5}])
def test_a_healthy_float32_kernel_is_close_in_everything(kwargs):
    call = call_of(**kwargs)
    row = measured(call, sample_of(call))
    assert row["rel_l2"] < HEALTHY_FLOAT32
    assert row["grad_rel_l2"] < HEALTHY_FLOAT32
    assert 0 < row["roundoff_ratio"] < 100
    assert row["nonfinite"] == row["grad_nonfinite"] == 0
    assert 0 < row["entropy"] <= 1
    assert row["backend"] == "flash"
    assert row["dtype"] == "float32"
    assert [head["head"] for head in row["heads"]] == sample_of(call).heads


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (1, 4, 32, 32), (32, 32), (2, 4, 32, 32)])
def test_masks_follow_the_sample(shape):
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    call = call_of(attn_mask=mask)
    assert measured(call, sample_of(call, heads=3))["rel_l2"] < HEALTHY_FLOAT32


def test_grouped_heads_are_compared_with_their_own_keys():
    call = call_of(heads=6, key_heads=2, enable_gqa=True, is_causal=True)
    row = measured(call, sample_of(call, heads=6))
    assert row["rel_l2"] < HEALTHY_FLOAT32
    assert row["grad_rel_l2"] < HEALTHY_FLOAT32


def test_the_largest_logit_and_the_entropy_are_right_by_hand():
    call = call_of(heads=1, key_heads=1, length=4)
    sample = sample_of(call, heads=1, rows=4, sequences=2)
    row = measured(call, sample)
    logits = call.q.double() @ call.k.double().mT / math.sqrt(8)
    p = logits.softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean() / math.log(4)
    assert row["max_logit"] == pytest.approx(logits.max().item())
    assert row["entropy"] == pytest.approx(entropy.item())


def off_by_one(q, k, v, **kwargs):
    shifted = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(-1)
    shifted[0, 0] = True
    return F.scaled_dot_product_attention(q, k, v, attn_mask=shifted)


def wrong_scale_in_head_2(q, k, v, **kwargs):
    factor = torch.ones(4, 1, 1, dtype=q.dtype)
    factor[2] = 1.5
    return F.scaled_dot_product_attention(q * factor, k, v, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_planted_kernel_faults_stand_out(dtype):
    healthy = call_of(dtype, is_causal=True)
    faulty = call_of(dtype, is_causal=True, replace=off_by_one)
    every = {"heads": 4, "rows": 32, "sequences": 2}
    good, bad = (measured(call, sample_of(call, **every)) for call in (healthy, faulty))
    assert bad["roundoff_ratio"] > 20 * good["roundoff_ratio"]
    assert bad["grad_roundoff_ratio"] > 10 * good["grad_roundoff_ratio"]


def test_the_faulty_head_is_named():
    call = call_of(is_causal=True, replace=wrong_scale_in_head_2)
    heads = measured(call, sample_of(call, heads=4))["heads"]
    assert max(heads, key=lambda head: head["roundoff_ratio"])["head"] == 2


def test_a_nan_of_the_kernel_is_counted_and_not_hidden():
    def broken(q, k, v, **kwargs):
        out = F.scaled_dot_product_attention(q, k, v, **kwargs)
        return torch.where(torch.arange(8) == 3, torch.nan, out)

    call = call_of(replace=broken)
    row = measured(call, sample_of(call, rows=16))
    assert row["nonfinite"] == 2 * 16
    assert row["rel_l2"] == math.inf


def test_dropout_is_compared_where_its_mask_is_known_and_is_a_reason_where_not():
    call = call_of(dropout_p=0.1)
    row = measured(call, sample_of(call))
    assert row["rel_l2"] < HEALTHY_FLOAT32
    assert row["grad_rel_l2"] < HEALTHY_FLOAT32
    del call.kwargs["dropout_mask"]
    assert unmeasurable(call) == "dropout 0.1 in the kernel, its mask is not known"


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_dk_of_one_key_head_is_found_at_whichever_head_it_is(rows, dtype):
    call = call_of(dtype, heads=6, key_heads=2, enable_gqa=True, is_causal=True)
    assert call.dk is not None
    call.dk[:, 1] *= 1.1
    size = {"heads": 6, "rows": rows, "sequences": 1}
    found = {}
    for number in range(covered_within(call, 6, rows)):
        row = measured(call, Sample.draw(call, "s", **size, look=Look(number)))
        found |= {h["head"]: h["dk_roundoff_ratio"] for h in row["heads"] if "dk_roundoff_ratio" in h}
    assert set(found) == {0, 3}
    assert found[3] > 8 * found[0]
    assert row["roundoff_ratio"] < 100


def test_what_is_not_sampled_is_not_looked_at():
    call = call_of(is_causal=True)
    sample = sample_of(call)
    other = next(head for head in range(4) if head not in sample.heads)
    before = measured(call, sample)
    for tensor in (call.out, call.dq, call.dk, call.dv):
        assert tensor is not None
        tensor[:, other] = 77.0
    assert measured(call, sample) == before


def test_watching_draws_no_random_number():
    call = call_of()
    before = torch.get_rng_state()
    measured(call, sample_of(call))
    assert torch.equal(before, torch.get_rng_state())


def test_numbers_are_the_keys_of_the_catalog():
    assert {f"attention/{name}" for name in NUMBERS} == {metric.key for metric in family("attention")}


def test_worst_knows_which_way_is_bad():
    rows = [
        {"rel_l2": 1.0, "entropy": 0.5, "sign_bias": -3.0, "nonfinite": 1.0, "dtype": "x"},
        {"rel_l2": 2.0, "entropy": 0.2, "sign_bias": 1.0, "nonfinite": 2.0},
    ]
    assert worst(rows) == {"rel_l2": 2.0, "entropy": 0.2, "sign_bias": -3.0, "nonfinite": 3.0}
    assert math.isnan(worst([{"a": 1.0}, {"a": math.nan}])["a"])


def test_a_healthy_16_bit_kernel_is_near_one_where_keys_and_values_share_a_mean():
    # As in any trained model: the rounding of the stored out, coherent over the keys, reaches dq by delta.
    q = torch.randn(1, 2, 128, 16).mul(0.3).bfloat16().requires_grad_()
    k, v = (torch.randn(1, 2, 128, 16).mul(0.1).add(2).bfloat16().requires_grad_() for _ in range(2))
    calls = []
    with Tap(nn.Identity(), calls.append):
        out = F.scaled_dot_product_attention(q, k, v)
        out.backward(torch.randn(out.shape).bfloat16())
    for head in measured(calls[0], sample_of(calls[0], heads=2, rows=128))["heads"]:
        assert 0.2 < head["roundoff_ratio"] < 3
        assert 0.2 < head["dq_roundoff_ratio"] < 3
