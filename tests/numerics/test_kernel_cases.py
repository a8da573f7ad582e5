"""Attention kernels' public trouble reports, each a small case: what the reference and the numbers say.

Kernels are PyTorch's own on this device; where no such kernel has the fault here, it is planted.
"""

import math
import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_oracle import assert_close, inputs, normal
from stabilitykit.numerics.deviation import deviation, perturb
from stabilitykit.numerics.exact import attention_rows, exact_attention, exact_attention_grad

KERNELS = pytest.mark.parametrize(
    "kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=["flash", "math"]
)
HALF, FULL = torch.bfloat16, torch.float32
# Of out, in units of the format's roundoff: the theory's constant is 1 in 16 bits; in float32 the sums count.
SOUND = {HALF: 2.0, torch.float16: 2.0, FULL: 16.0}


def attend(kernel, q, k, v, **options):
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, **options)


def grads(kernel, q, k, v, g, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attend(kernel, *leaves, **options), leaves, g)


def error(fast, exact):
    return deviation(fast, exact)["error_constant"]


@KERNELS
def test_case_39_bf16_deviation_is_the_formats(kernel):
    """flash-attention#1071: what bf16 loses was read as a bug; and scaling v changes no relative number."""
    wide = inputs(n=128, d=32)[:3]
    for dtype in (HALF, torch.float16):
        q, k, v = (x.to(dtype) for x in wide)
        assert error(attend(kernel, q, k, v), exact_attention(q, k, v)[0]) < SOUND[dtype]
        once, ten = (
            deviation(attend(kernel, q, k, x), exact_attention(q, k, x)[0])["rel_l2"] for x in (v, 10 * v)
        )
        assert ten == pytest.approx(once, rel=0.2)  # 10 v rounds elsewhere; 16 v would give equality


@KERNELS
def test_case_41_deviation_falls_with_precision(kernel):
    """arXiv 2405.02803, Fig. 3: against a float64 golden, monotonically with the mantissa's bits."""
    wide, found = inputs(n=256, d=64)[:3], []
    for dtype in (HALF, torch.float16, FULL, torch.float64):
        tensors = [x.to(dtype) for x in wide]
        found.append(deviation(attend(kernel, *tensors), exact_attention(*tensors)[0])["max_abs"])
    assert all(more > 2 * less for more, less in pairwise(found))


@KERNELS
def test_case_42_one_rule_for_rows_that_see_nothing(kernel):
    """pytorch#103749, #103963, #109517: NaN, zeros or averages; here out 0, lse -inf, gradients 0."""
    q, k, v, g = inputs(n=33, d=16, dtype=FULL)
    keep = torch.ones(33, 33, dtype=torch.bool)
    keep[5] = False
    exact, lse = exact_attention(q, k, v, mask=keep)
    exact_grads = exact_attention_grad(q, k, v, g, mask=keep)
    assert (
        (exact[:, :, 5] == 0).all()
        and (lse[:, :, 5] == -math.inf).all()
        and (exact_grads[0][:, :, 5] == 0).all()
    )
    fast = attend(kernel, q, k, v, attn_mask=keep)
    assert error(fast, exact) < SOUND[FULL]
    fast[:, :, 5] = math.nan  # as older kernels had it: counted, and the other rows keep their number
    numbers = deviation(fast, exact)
    assert (numbers["nonfinite_fast"], numbers["nonfinite_exact"]) == (2 * 16, 0)
    assert not math.isnan(numbers["max_abs"])
    rest = [x[:, :, torch.arange(33) != 5] for x in (fast, exact)]
    assert error(*rest) < SOUND[FULL]


@KERNELS
def test_case_42_the_lowest_finite_number_averages(kernel):
    """pytorch#110213: a row of finfo.min is no row of -inf; kernel and reference average it alike."""
    q, k, v, _ = inputs(n=9, dtype=FULL)
    lowest = torch.zeros(9, 9)
    lowest[5] = torch.finfo(FULL).min
    exact, _ = exact_attention(q, k, v, mask=lowest)
    assert_close(exact[:, :, 5], v.double().mean(2))
    assert error(attend(kernel, q, k, v, attn_mask=lowest), exact) < SOUND[FULL]


@KERNELS
def test_case_44_the_reference_leaves_the_users_gradients_alone(kernel):
    """brevitas#1591: NaN gradients though the NaN was masked afterwards."""
    q, k, v, g = inputs(n=9, dtype=FULL)
    keep = torch.ones(9, 9, dtype=torch.bool).tril()
    keep[5] = False
    alone = grads(kernel, q, k, v, g, attn_mask=keep)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(kernel, *leaves, attn_mask=keep)
    exact, _ = exact_attention(*leaves, mask=keep)
    shadow = exact_attention_grad(*leaves, g, mask=keep)
    out.backward(g)
    assert not exact.requires_grad
    assert all(torch.equal(leaf.grad, want) for leaf, want in zip(leaves, alone, strict=True))
    assert all(x.isfinite().all() for x in (*alone, *shadow))


def test_case_46_huge_logits_are_the_kernels_overflow():
    """pytorch#121558: q = k = 133120 in bf16 gave NaN in the kernel; the largest logit names the head."""
    q = torch.full((1, 2, 4, 8), 133120.0, dtype=HALF)
    q[:, 0] = 1
    rows = attention_rows(q, q, normal(1, 2, 4, 8, dtype=HALF))
    assert rows.out.isfinite().all()
    assert rows.max_logit.tolist()[0] == pytest.approx([8**0.5, 133120.0**2 * 8**0.5])


@KERNELS
def test_case_46_an_overflow_is_counted(kernel):
    """pytorch#121558, with logits beyond float32, which these kernels cannot hold either."""
    q, v = torch.full((1, 1, 4, 8), 1e20), normal(1, 1, 4, 8, dtype=FULL)
    numbers = deviation(attend(kernel, q, q, v), exact_attention(q, q, v)[0])
    assert (numbers["nonfinite_fast"], numbers["nonfinite_exact"]) == (32, 0)
    assert numbers["error_constant"] == math.inf


@KERNELS
def test_case_47_masks_that_overflow_when_added(kernel):
    """flash-attention#442: finfo.min plus a negative score is -inf to the kernel; float64 holds it."""
    q, k = torch.full((1, 1, 3, 8), 2e18), torch.full((1, 1, 3, 8), -2e18)
    k *= torch.tensor([1.0, 2.0, 3.0])[:, None]
    v, lowest = normal(1, 1, 3, 8, dtype=FULL), torch.full((3, 3), torch.finfo(FULL).min)
    exact, lse = exact_attention(q, k, v, mask=lowest)
    assert_close(exact, v[:, :, :1].double().expand_as(exact))  # the least negative score still wins
    assert lse.isfinite().all()
    assert error(attend(kernel, q, k, v, attn_mask=lowest), exact) > 1e3  # reported, no crash


@KERNELS
def test_case_49_true_keeps_and_zero_keeps(kernel):
    """pytorch#170415, transformers#38094: the polarity of masks."""
    q, k, v, _ = inputs(n=7, m=9, dtype=FULL)
    keep = normal(7, 9, seed=5) > -0.3
    added = torch.zeros(7, 9).masked_fill(~keep, -math.inf)
    by_bool, by_float = (exact_attention(q, k, v, mask=mask)[0] for mask in (keep, added))
    assert torch.equal(by_bool, by_float)
    inverted, _ = exact_attention(q, k, v, mask=~keep)
    for fast in (attend(kernel, q, k, v, attn_mask=mask) for mask in (keep, added)):
        assert error(fast, by_bool) < SOUND[FULL] < 1e3 < error(fast, inverted)


@KERNELS
def test_case_49_a_mask_of_ones_and_zeros_is_added_and_warned_about_once(kernel):
    """transformers#38094: a float mask of 0 and 1 was most likely meant as a bool one."""
    q, k, v, _ = inputs(n=7, m=9, dtype=FULL)
    mask = (normal(7, 9, seed=5) > -0.3).float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        exact = [exact_attention(q, k, v, mask=mask)[0] for _ in range(3)][-1]
    assert ["only 0 and 1" in str(warning.message) for warning in caught] == [True]
    assert error(attend(kernel, q, k, v, attn_mask=mask), exact) < SOUND[FULL]


def test_case_51_inputs_are_read_by_their_real_strides():
    """pytorch#112577, #187506: a contiguous copy before the kernel would hide that it misreads strides."""
    copies = inputs(n=33, d=8, dtype=FULL)
    strided = [x.mT.contiguous().mT for x in copies]
    strides = [x.stride() for x in strided]
    assert all(x.stride(-1) != 1 for x in strided)
    exact, exact_grads = exact_attention(*strided[:3])[0], exact_attention_grad(*strided)
    assert_close(exact, exact_attention(*copies[:3])[0])
    for got, want in zip(exact_grads, exact_attention_grad(*copies), strict=True):
        assert_close(got, want)
    sound = [error(F.scaled_dot_product_attention(*x[:3]), exact) for x in (strided, copies)]
    assert sound[0] == pytest.approx(sound[1], rel=1)
    misread = [x.as_strided(x.shape, c.stride()) for x, c in zip(strided, copies, strict=True)]
    assert error(F.scaled_dot_product_attention(*misread[:3]), exact) > 1e3
    assert [x.stride() for x in strided] == strides
    assert all(torch.equal(x, copy) for x, copy in zip(strided, copies, strict=True))


def test_case_52_stride_0_keys_and_the_head_that_deviates():
    """pytorch#191937: expanded k and v of length 33 went wrong, by values that random copies do not show."""
    q, k, v, g = inputs(h=4, h_kv=1, n=33, d=8, dtype=FULL)
    many_k, many_v = k.expand(1, 4, 33, 8), v.expand(1, 4, 33, 8)
    exact, _ = exact_attention(q, many_k, many_v)
    assert_close(exact, exact_attention(q, k, v)[0])
    each, shared = exact_attention_grad(q, many_k, many_v, g), exact_attention_grad(q, k, v, g)
    for got, want in zip(each, (shared[0], *shared[1:]), strict=True):
        assert_close(got.sum(1, keepdim=True) if want.shape[1] == 1 else got, want)
    fast = F.scaled_dot_product_attention(q, many_k, many_v)
    assert error(fast, exact) < SOUND[FULL]
    fast[:, 2] = F.scaled_dot_product_attention(q[:, 2:3], k[:, :, :32], v[:, :, :32])[:, 0]
    found = [error(fast[:, head], exact[:, head]) for head in range(4)]
    assert [value > 1e3 for value in found] == [False, False, True, False]


@KERNELS
def test_case_54_a_gradient_may_be_wrong_where_the_output_is_right(kernel):
    """pytorch#103462: gradients at cosine 0.45 behind an equal forward; each has its own roundoff."""
    q, k, v, g = inputs(n=64, d=16, dtype=HALF)
    wide, generator = [x.double() for x in (q, k, v, g)], torch.Generator().manual_seed(0)
    moved = exact_attention_grad(*(perturb(x, HALF, generator) for x in wide), causal=True)
    exact, fast = exact_attention_grad(*wide, causal=True), list(grads(kernel, q, k, v, g, is_causal=True))

    def ratios():
        rows = zip(fast, exact, moved, strict=True)
        return [deviation(x, y, perturbed=z)["roundoff_ratio"] for x, y, z in rows]

    assert all(ratio < 3 for ratio in ratios())
    fast[1] = fast[1] + 2 * fast[1].std() * normal(*k.shape, seed=7, dtype=HALF)
    assert deviation(fast[1], exact[1])["cosine"] == pytest.approx(0.45, abs=0.1)
    assert [ratio < 3 for ratio in ratios()] == [True, False, True]


@KERNELS
@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 16), (5, 2, 16), (2, 5, 1)])
def test_case_56_tiny_shapes_have_finite_gradients(kernel, n, m, d):
    """flash-attention#334, #443, #1052: NaN in dq only, for one token or more queries than keys."""
    q, k, v, g = inputs(n=n, m=m, d=d, sd=3.0, dtype=FULL)
    keep = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    exact = exact_attention_grad(q, k, v, g, causal=True, align="bottom_right")
    fast = list(grads(kernel, q, k, v, g, attn_mask=keep))

    def counts():
        return [deviation(x, y)["nonfinite_fast"] for x, y in zip(fast, exact, strict=True)]

    assert all(x.isfinite().all() for x in exact)
    assert counts() == [0, 0, 0]
    fast[0] = fast[0] * math.nan
    assert counts() == [q.numel(), 0, 0]


def test_case_56_packed_sequences_with_fewer_keys_than_queries():
    """flash-attention#443: variable lengths, some rows of which see nothing when aligned bottom right."""
    q, k, v, g = inputs(n=7, m=4, d=16, sd=3.0)
    packed = {"cu_seqlens_q": torch.tensor([0, 5, 7]), "cu_seqlens_k": torch.tensor([0, 2, 4])}
    dq, dk, dv = exact_attention_grad(q, k, v, g, causal=True, align="bottom_right", **packed)
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert (dq[:, :, :3] == 0).all()


@KERNELS
def test_case_57_windows_are_inclusive(kernel):
    """flash-attention#1133, transformers#39408, vllm#9679: (w, 0) keeps w + 1 keys; (n - 1, 0) is causal."""
    q, k, v, _ = inputs(n=9, dtype=FULL)
    _, lse = exact_attention(*(torch.zeros(1, 1, 9, 4) for _ in range(3)), window=(3, 0))
    assert lse.exp().round().flatten().tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]
    whole, causal = exact_attention(q, k, v, window=(8, 0))[0], exact_attention(q, k, v, causal=True)[0]
    assert torch.equal(whole, causal)
    ahead = torch.arange(9) - torch.arange(9)[:, None]
    fast = attend(kernel, q, k, v, attn_mask=(ahead <= 0) & (ahead >= -3))
    found = [error(fast, exact_attention(q, k, v, window=(w, 0))[0]) for w in (2, 3, 4)]
    assert [value < SOUND[FULL] for value in found] == [False, True, False]


def test_case_59_dropout_is_compared_under_the_kernels_own_mask():
    """A design case: two different masks would be a large, false deviation; the RNG is left alone."""
    q, k, v, _ = inputs(n=33, d=16, dtype=FULL)
    torch.manual_seed(3)
    fast = attend(SDPBackend.MATH, q, k, v, dropout_p=0.3)
    torch.manual_seed(3)
    kept, state = F.dropout(torch.ones(1, 2, 33, 33), 0.3) > 0, torch.get_rng_state()
    exact, _ = exact_attention(q, k, v, dropout_mask=kept, dropout_p=0.3)
    assert error(fast, exact) < SOUND[FULL]
    assert error(fast, exact_attention(q, k, v)[0]) > 1e3
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError, match=r"dropout_p 0\.3 needs the dropout_mask the kernel used"):
        exact_attention(q, k, v, dropout_p=0.3)


@KERNELS
@pytest.mark.parametrize("n", range(62, 67))
def test_case_61_lengths_beside_a_multiple_of_the_tile(kernel, n):
    """torch-spyre#4331: only lengths that were multiples of 64 were right."""
    for dtype in (HALF, FULL):
        q, k, v, _ = inputs(h=1, n=n, d=16, dtype=dtype)
        fast = attend(kernel, q, k, v, is_causal=True)
        assert error(fast, exact_attention(q, k, v, causal=True)[0]) < SOUND[dtype]


@KERNELS
def test_case_62_a_value_of_one_comes_back_as_one(kernel):
    """flash-attention#2721: numerator in bf16, row sum in float32: a bias that the absolute error hides."""
    q, k, v, _ = inputs(n=300, d=16, dtype=HALF)
    exact, _ = exact_attention(q, k, torch.ones_like(v), causal=True)
    assert (exact - 1).abs().max() < 1e-14
    numbers = deviation(attend(kernel, q, k, torch.ones_like(v), is_causal=True), exact)
    assert (numbers["max_abs"], abs(numbers["sign_bias"])) < (2**-7, 0.05)
    # Planted: the numerator's probabilities cut to bf16, the row sum left in float32.
    weights = torch.softmax((q.float() @ k.float().mT) / 4, -1)
    cut = (weights.view(torch.int32) & -65536).view(FULL)
    biased = cut @ torch.ones_like(v).float() / weights.sum(-1, keepdim=True)
    assert deviation(biased, torch.ones_like(exact), dtype=HALF)["sign_bias"] < -0.1
