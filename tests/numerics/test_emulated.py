"""The emulated kernel against exact attention, native 16-bit arithmetic and the CPU's own kernel."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.deviation import deviation
from stabilitykit.numerics.emulated import (
    emulated_attention,
    emulated_flash_attention,
    emulated_flash_attention_grad,
    tile_sizes,
)
from stabilitykit.numerics.exact import exact_attention, exact_attention_grad, plain_attention

some = settings(max_examples=25, deadline=None)
VARIANTS = ("fa1", "fa2", "stabilised")
BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64


def inputs(b=1, h=2, h_kv=None, n=9, m=None, d=4, seed=0, draw=torch.randn, dtype=FP64):
    """q, k, v and a grad_out."""
    g = torch.Generator().manual_seed(seed)
    kv = (b, h_kv or h, n if m is None else m, d)
    return [draw(shape, generator=g, dtype=FP64).to(dtype) for shape in ((b, h, n, d), kv, kv, (b, h, n, d))]


def assert_close(got, want, tolerance):
    assert got.shape == want.shape and got.dtype == want.dtype
    finite = want.isfinite()
    assert torch.equal(got[~finite], want[~finite])
    assert (got - want)[finite].abs().max() <= tolerance * want[finite].abs().max()


def worst(got, want):
    """The largest error of each sequence in the batch, averaged over the batch."""
    return (got - want).abs().amax((1, 2, 3)).mean().item()


# --- all float64: exact attention ----------------------------------------------------------------


@some
@given(
    seed=st.integers(0, 999), variant=st.sampled_from(VARIANTS), causal=st.booleans(),
    n=st.integers(1, 70), m=st.integers(1, 70), tile_q=st.integers(1, 80), tile_k=st.integers(1, 80),
    group=st.sampled_from((1, 3)), top=st.sampled_from((0.0, 3.0, 20.0)), beta=st.floats(2, 8),
)  # fmt: skip
def test_float64_throughout_is_exact_attention(seed, variant, causal, n, m, tile_q, tile_k, group, top, beta):
    q, k, v, _ = inputs(h=2 * group, h_kv=2, n=n, m=m, seed=seed)
    q *= top / (q @ k.repeat_interleave(group, 1).mT).abs().max()
    options = {"causal": causal, "scale": 1.0}
    out, lse = emulated_flash_attention(
        q, k, v, state_dtype=FP64, variant=variant, tile_q=tile_q, tile_k=tile_k, beta=beta, **options
    )
    exact = exact_attention(q, k, v, **options)
    assert_close(out, exact[0], 1e-14)
    assert (lse - exact[1]).abs().max() <= 1e-14 * (20 + math.log(70))


OPTIONS = [
    {"causal": True, "align": "bottom_right"},
    {"window": (2, 1)},
    {"softcap": 2.0},
    {"alibi_slopes": torch.tensor([0.5, 0.1])},
    {"mask": torch.arange(7 * 9).view(7, 9) % 3 > 0},
    {"mask": torch.arange(7 * 9).view(7, 9) // 9 != 4},  # row 4 sees nothing
    {"mask": torch.linspace(-2, 2, 9), "causal": True},
    {"rows": torch.tensor([5, 0, 6]), "heads": [1], "causal": True},
    {"cu_seqlens_q": torch.tensor([0, 3, 7]), "cu_seqlens_k": torch.tensor([0, 2, 9])},
    {"dropout_mask": torch.arange(7 * 9).view(7, 9) % 4 > 0, "dropout_p": 0.25},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_option_of_exact_attention(variant, options):
    q, k, v, g = inputs(n=7, m=9)
    g = g[:, : len(options.get("heads", "qk")), : len(options.get("rows", range(7)))]
    tiles = {"state_dtype": FP64, "tile_q": 2, "tile_k": 3, "variant": variant}
    out, lse = emulated_flash_attention(q, k, v, **options, **tiles)
    exact = exact_attention(q, k, v, **options)
    assert_close(out, exact[0], 1e-14)
    assert_close(lse, exact[1], 1e-14)
    for delta in ("out", "probs"):
        grads = emulated_flash_attention_grad(q, k, v, g, delta=delta, **options, **tiles)
        for got, want in zip(grads, exact_attention_grad(q, k, v, g, **options), strict=True):
            assert_close(got, want, 1e-13)


@some
@given(
    seed=st.integers(0, 999), causal=st.booleans(), n=st.integers(1, 40), m=st.integers(1, 40),
    tile_q=st.integers(1, 50), tile_k=st.integers(1, 50), delta=st.sampled_from(("out", "probs")),
)  # fmt: skip
def test_the_float64_backward_is_exact(seed, causal, n, m, tile_q, tile_k, delta):
    q, k, v, g = inputs(h=4, h_kv=2, n=n, m=m, seed=seed)
    grads = emulated_flash_attention_grad(
        q, k, v, g, state_dtype=FP64, causal=causal, tile_q=tile_q, tile_k=tile_k, delta=delta
    )
    # Where dq and dk cancel, what is left of the terms' own rounding: 1e-14 of their size.
    floor = 1e-14 * 2 * (g.norm(dim=-1).max() * v.norm(dim=-1).max()) * max(q.abs().max(), k.abs().max()) * n
    for got, want in zip(grads, exact_attention_grad(q, k, v, g, causal=causal), strict=True):
        assert (got - want).abs().max() <= floor


# --- by hand -------------------------------------------------------------------------------------


def test_an_even_mix_by_hand():
    """Two equal keys: exp(0) = 1 each, 1 + 4 in the accumulator, divided by 2; log(2) + logit."""
    q, k = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 2, 2)
    v = torch.tensor([[[[1.0], [4.0]]]])
    for tile_k in (1, 2):
        out, lse = emulated_flash_attention(q, k, v, tile_k=tile_k, scale=0.5)
        assert out.item() == 2.5
        assert lse.item() == pytest.approx(1 + math.log(2), rel=1e-7)


def test_the_worked_rounding_example_of_2510_04212():
    """P = 1 twice and a small residual of the values' sign push the bfloat16 sum away from zero."""
    residual = -4.703990459442139 + 2.40625 + 2.296875  # what is left to sum, with P = 2^-10
    v = torch.tensor([-2.40625, -2.296875, residual * 2**10], dtype=FP64).view(1, 1, 3, 1)
    q, k = torch.ones(1, 1, 1, 1, dtype=FP64), torch.tensor([0, 0, -10 * math.log(2)], dtype=FP64)
    out, lse = emulated_flash_attention(
        q, k.view(1, 1, 3, 1), v, state_dtype=FP64, accumulator_dtype=7, probs_dtype=20, scale=1.0
    )
    total = 2 + 2**-10
    assert lse.exp().item() == pytest.approx(total)
    # -4.71875 = -151 * 2^-5; its quotient by 2.00098 rounds to the 7 bits of -2.359375.
    assert out.item() == -2.359375
    whole = emulated_flash_attention(q, k.view(1, 1, 3, 1), v, state_dtype=FP64, probs_dtype=20, scale=1.0)[0]
    assert whole.item() * total == pytest.approx(-4.703990459442139, rel=1e-12)


def test_tile_sizes_of_flash_attention_1():
    assert tile_sizes(65536, 64) == (64, 256)
    assert tile_sizes(98304, 64) == (64, 384)
    assert tile_sizes(1000, 64) == (4, 4)  # 3.9 rounded up
    with pytest.raises(ValueError, match="sram and head_dim must be >= 1, got 0 and 64"):
        tile_sizes(0, 64)


def test_dtypes_of_the_results():
    for dtype in (BF16, FP16, torch.float32):
        out, lse = emulated_flash_attention(*inputs(dtype=dtype)[:3])
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        grads = emulated_flash_attention_grad(*inputs(dtype=dtype))
        assert {x.dtype for x in grads} == {dtype}
    out, lse = emulated_flash_attention(*inputs(dtype=BF16)[:3], output_dtype=9)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    out, lse = emulated_flash_attention(*inputs(dtype=BF16)[:3], sum_dtype=30, output_dtype="tf32")
    assert (out.dtype, lse.dtype) == (FP64, FP64)


def test_inputs_are_rounded_once_to_their_own_precision():
    q, k, v, g = inputs(n=30)
    low = [x.to(BF16) for x in (q, k, v, g)]
    for got, want in zip(
        emulated_flash_attention(q, k, v, input_dtype=BF16), emulated_flash_attention(*low[:3]), strict=True
    ):
        assert torch.equal(got, want)
    above_a_tie = torch.full((1, 1, 1, 1), 1 + 2**-8 + 2**-40, dtype=FP64)  # and a tie in float32
    assert emulated_flash_attention(*[above_a_tie] * 3, input_dtype=BF16)[0].item() == 1 + 2**-7
    grads = emulated_flash_attention_grad(q, k, v, g, input_dtype=BF16)
    assert all(map(torch.equal, grads, emulated_flash_attention_grad(*low)))


# --- against torch's own bfloat16, where every operation rounds ----------------------------------


def native(q, k, v, *, variant, tile_k, causal):
    """The tile loop in plain bfloat16 tensors, one row of tiles at a time."""
    scale, rows = q.shape[-1] ** -0.5, torch.arange(q.shape[-2])[:, None]
    m = torch.full((*q.shape[:3], 1), -math.inf, dtype=q.dtype)
    total, acc = torch.zeros_like(m), torch.zeros_like(q)
    for start in range(0, k.shape[-2], tile_k):
        k_tile, v_tile = k[..., start : start + tile_k, :], v[..., start : start + tile_k, :]
        s = q @ k_tile.mT * scale
        if causal:
            s = s.masked_fill(rows < start + torch.arange(k_tile.shape[-2]), -math.inf)
        top = s.amax(-1, keepdim=True)
        seen = top > -math.inf
        if variant == "fa1":
            p = torch.exp(s - top.where(seen, 0))
            new_m = torch.maximum(m, top)
            decay, gain = torch.exp(m - new_m), torch.exp(top - new_m)
            old = total * decay
            new_total = old + p.sum(-1, keepdim=True) * gain
            new_acc = (old * acc + gain * (p @ v_tile)) / new_total
        else:
            if variant == "stabilised":
                ties = seen & ((s == top).sum(-1, keepdim=True) > 1)
                top = torch.where(ties & (top > 0), 2 * top, torch.where(ties, 0, top))
            new_m = torch.maximum(m, top)
            p, decay = torch.exp(s - new_m), torch.exp(m - new_m)
            # A fused sum: exact in float32, then rounded.
            new_total = ((total * decay).float() + p.float().sum(-1, keepdim=True)).to(q.dtype)
            new_acc = ((acc * decay).float() + p.float() @ v_tile.float()).to(q.dtype)
        m, total, acc = (
            torch.where(seen, new, x) for new, x in ((new_m, m), (new_total, total), (new_acc, acc))
        )
    return (acc if variant == "fa1" else acc / total), (m + total.float().log()).squeeze(-1)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_low_precision_state_is_native_low_precision(variant, causal, dtype):
    q, k, v, _ = inputs(n=50, d=16, dtype=dtype)
    k[:, :, 1::2] = k[:, :, ::2]  # repeated maxima
    kernel = {"variant": variant, "tile_k": 12, "causal": causal}
    got = emulated_flash_attention(q, k, v, state_dtype=dtype, **kernel)
    want = native(q, k, v, **kernel)
    # Both add products up in float32, each in its own order: a rounding in thousands falls otherwise.
    assert (got[0] != want[0]).double().mean() <= 1e-3
    assert torch.equal(got[1], want[1].to(dtype).float())


# --- against the CPU's flash kernel --------------------------------------------------------------

SHAPES = [(2, 128, 32, False), (1, 256, 64, True), (2, 100, 80, True), (1, 512, 64, False)]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("draw", [torch.randn, torch.rand])
@pytest.mark.parametrize(("h", "n", "d", "causal"), SHAPES)
def test_its_error_is_that_of_a_real_kernel(h, n, d, causal, draw, dtype):
    """Within 15 % over 20 seeds: float32 state, 16-bit probabilities."""
    q, k, v, _ = inputs(b=20, h=h, n=n, d=d, draw=draw, dtype=dtype)
    real = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    exact, _ = exact_attention(q, k, v, causal=causal)
    emulated, _ = emulated_flash_attention(q, k, v, causal=causal)
    assert worst(emulated, exact) == pytest.approx(worst(real, exact), rel=0.15)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_its_gradients_err_as_a_real_kernel_s(dtype):
    """dq within 15 %. The CPU kernel adds dv up in 16 bits, 64 rows at a time: so do the knobs."""
    q, k, v, g = inputs(b=20, h=1, n=256, d=64, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    real = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, is_causal=True), leaves, g)
    exact = exact_attention_grad(q, k, v, g, causal=True)
    wide = emulated_flash_attention_grad(q, k, v, g, causal=True)
    narrow = emulated_flash_attention_grad(q, k, v, g, causal=True, accumulator_dtype=dtype)
    assert worst(wide[0], exact[0]) == pytest.approx(worst(real[0], exact[0]), rel=0.15)
    assert worst(narrow[2], exact[2]) == pytest.approx(worst(real[2], exact[2]), rel=0.15)
    assert worst(wide[2], exact[2]) < 0.7 * worst(real[2], exact[2])


# --- laws ----------------------------------------------------------------------------------------

precisions = st.sampled_from((BF16, FP16, torch.float32, "tf32", 3, 7))
kernels = st.fixed_dictionaries(
    {
        "variant": st.sampled_from(VARIANTS), "state_dtype": precisions, "probs_dtype": precisions,
        "accumulator_dtype": precisions, "sum_dtype": precisions, "causal": st.booleans(),
        "tile_k": st.integers(1, 30),
    }
)  # fmt: skip


@some
@given(kernel=kernels, tile_q=st.integers(1, 50), seed=st.integers(0, 99))
def test_the_forward_does_not_depend_on_tile_q(kernel, tile_q, seed):
    q, k, v, _ = inputs(n=25, seed=seed, dtype=BF16)
    one, two = (emulated_flash_attention(q, k, v, tile_q=t, **kernel) for t in (tile_q, 25))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


@some
@given(kernel=kernels, seed=st.integers(0, 99))
def test_a_row_does_not_depend_on_the_others(kernel, seed):
    """Nor on where the tiles' edges fall for them. Few input bits: the products are exact in float64."""
    q, k, v, _ = inputs(n=25, seed=seed)
    kernel = {**kernel, "input_dtype": 4, "output_dtype": FP64}
    whole, _ = emulated_flash_attention(q, k, v, **kernel)
    rows = torch.randperm(25, generator=torch.Generator().manual_seed(seed))[:11]
    part, _ = emulated_flash_attention(q, k, v, rows=rows, **kernel)
    assert torch.equal(part, whole[:, :, rows])


@some
@given(kernel=kernels, power=st.integers(-4, 4), seed=st.integers(0, 99))
def test_v_times_a_power_of_two_is_out_times_it(kernel, power, seed):
    # Not float16: its subnormals have no power of two to spare.
    for name in ("state_dtype", "probs_dtype", "accumulator_dtype"):
        kernel[name] = BF16 if kernel[name] == FP16 else kernel[name]
    q, k, v, _ = inputs(n=25, seed=seed, dtype=BF16)
    out, lse = emulated_flash_attention(q, k, v, **kernel)
    scaled, same = emulated_flash_attention(q, k, v * 2.0**power, **kernel)
    assert torch.equal(scaled, out * 2.0**power)
    assert torch.equal(same, lse)


@some
@given(kernel=kernels, seed=st.integers(0, 99))
def test_seven_mantissa_bits_are_bfloat16(kernel, seed):
    q, k, v, g = inputs(n=25, seed=seed, dtype=BF16)
    named = {key: 7 if value == BF16 else value for key, value in kernel.items()}
    for emulated, tensors in (
        (emulated_flash_attention, (q, k, v)),
        (emulated_flash_attention_grad, (q, k, v, g)),
    ):
        one = emulated(*tensors, **kernel, output_dtype=BF16)
        two = emulated(*tensors, **named, output_dtype=7)
        assert all(torch.equal(x.float(), y) for x, y in zip(one, two, strict=True))


@some
@given(seed=st.integers(0, 99), variant=st.sampled_from(VARIANTS), n=st.integers(1, 40))
def test_one_tile_is_the_plain_softmax(seed, variant, n):
    q, k, v, _ = inputs(n=n, seed=seed, dtype=torch.float32)
    out, lse = emulated_flash_attention(q, k, v, tile_k=64, variant=variant, scale=1.0)
    logits = q @ k.mT
    torch.testing.assert_close(out, torch.softmax(logits, -1) @ v, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-6, atol=1e-6)


def test_the_error_falls_with_the_mantissa_bits():
    """Is Flash Attention Stable?, Fig. 3: about twofold per bit."""
    q, k, v, _ = inputs(n=256, d=16, draw=torch.rand, dtype=torch.float32)
    exact, _ = exact_attention(q, k, v)
    bits = range(4, 22, 3)
    errors = [
        (emulated_flash_attention(q, k, v, variant="fa1", state_dtype=b, probs_dtype=b)[0] - exact)
        .abs()
        .max()
        for b in bits
    ]
    for coarse, fine in pairwise(errors):
        assert 3 < coarse / fine < 20


def test_low_state_errs_more_the_more_tiles_there_are_and_float32_state_does_not():
    q, k, v, _ = inputs(h=1, n=512, d=64, draw=torch.rand, dtype=BF16)
    exact, _ = exact_attention(q, k, v)
    base = (plain_attention(q, k, v) - exact).abs().max()

    def ratio(**kernel):
        return ((emulated_flash_attention(q, k, v, **kernel)[0] - exact).abs().max() / base).item()

    low = [ratio(variant="fa1", state_dtype=BF16, tile_k=t) for t in (8, 32, 128, 512)]
    assert low == sorted(low, reverse=True) and low[0] > 5 * low[-1]
    assert all(ratio(tile_k=t) < 1 for t in (8, 64, 512))


# --- repeated maxima: arXiv 2510.04212 -----------------------------------------------------------


def repeated(rep, seed, n=512, d=64):
    """Every row `rep` equal maxima between 1 and 9, all else 15 below; V about -1.5 +- 0.4.

    q holds the scores themselves, k is the identity.
    """
    g = torch.Generator().manual_seed(seed)
    top = (1 + 8 * torch.rand(n, 1, generator=g)).bfloat16()
    at = torch.rand(n, n, generator=g).argsort(-1)[:, :rep]
    scores = (top - 15).repeat(1, n).scatter_(1, at, top.expand(n, rep))
    v = -1.5 + 0.4 * torch.randn(n, d, generator=g)
    return scores[None, None], torch.eye(n, dtype=BF16)[None, None], v.to(BF16)[None, None]


@pytest.mark.parametrize(("rep", "bias"), [(2, 0.2), (3, 0.12), (4, 0.08)])
def test_repeated_maxima_bias_the_output_and_the_stabilised_max_does_not(rep, bias):
    q, k, v = repeated(rep, seed=0)
    exact, _ = exact_attention(q, k, v, scale=1.0)
    kernel = {"scale": 1.0, "tile_k": 512, "accumulator_dtype": BF16}
    for sign in (1, -1):  # away from zero, whatever the sign of v
        plain = emulated_flash_attention(q, k, sign * v, **kernel)[0]
        fixed = emulated_flash_attention(q, k, sign * v, variant="stabilised", **kernel)[0]
        assert deviation(plain, sign * exact)["sign_bias"] > bias
        assert abs(deviation(fixed, sign * exact)["sign_bias"]) < bias / 8
        # The bias of delta = rowsum(dO * O), which drives the failure, falls with it.
        assert (plain - sign * exact).sum(-1).mean().abs() > 8 * (fixed - sign * exact).sum(-1).mean().abs()


def test_one_maximum_or_values_around_zero_have_no_bias():
    for rep, shift in ((1, 0.0), (2, 1.5)):
        q, k, v = repeated(rep, seed=0)
        v = (v + shift).to(BF16)
        out, _ = emulated_flash_attention(q, k, v, scale=1.0, tile_k=512, accumulator_dtype=BF16)
        assert abs(deviation(out, exact_attention(q, k, v, scale=1.0)[0])["sign_bias"]) < 0.02


def test_delta_from_the_probabilities_escapes_the_rounding_of_out():
    """With values of one sign, dq is far nearer; dv does not use delta at all."""
    q, k, v, g = inputs(h=2, n=256, d=32, draw=torch.rand, dtype=BF16)
    exact = exact_attention_grad(q, k, v, g)
    out, probs = (emulated_flash_attention_grad(q, k, v, g, delta=delta) for delta in ("out", "probs"))
    assert worst(probs[0], exact[0]) < 0.25 * worst(out[0], exact[0])
    assert torch.equal(probs[2], out[2])


# --- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [BF16, FP64])
def test_tiles_that_a_row_sees_nothing_of_leave_it_alone(variant, dtype):
    """Rows 1 and 2 in one tile of keys; key 5 alone for row 3; nothing at all for row 0."""
    q, k, v, g = inputs(n=4, m=6, dtype=dtype)
    keep = torch.zeros(4, 6, dtype=torch.bool)
    keep[1, 0] = keep[2, 2] = keep[3, 5] = True
    kernel = {"variant": variant, "tile_k": 2, "tile_q": 2, "mask": keep, "state_dtype": dtype}
    out, lse = emulated_flash_attention(q, k, v, **kernel)
    assert torch.equal(out[:, :, 1:], v[:, :, [0, 2, 5]])
    assert (out[:, :, 0] == 0).all() and (lse[:, :, 0] == -math.inf).all()
    dq, dk, dv = emulated_flash_attention_grad(q, k, v, g, **kernel)
    assert torch.equal(dv[:, :, [0, 2, 5]], g[:, :, 1:])
    assert (dq[:, :, 0] == 0).all() and dq.isfinite().all() and dk.isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_keys_and_no_queries(variant):
    q, k, v, g = inputs(n=3, m=0)
    out, lse = emulated_flash_attention(q, k, v, variant=variant)
    assert (out == 0).all() and (lse == -math.inf).all()
    dq, dk, _ = emulated_flash_attention_grad(q, k, v, g, variant=variant)
    assert (dq == 0).all() and dk.shape == k.shape
    assert emulated_flash_attention(*inputs(n=0, m=3)[:3], variant=variant)[0].shape == (1, 2, 0, 4)


def test_what_a_kernel_would_lose_is_nan_and_not_silent():
    q, k, v, _ = inputs(n=8, dtype=FP16)
    q[0, 0, 0], k[0, 0, 0] = 200.0, 200.0  # a score of 80000 overflows float16
    assert emulated_flash_attention(q, k, v, score_dtype=FP16)[0][0, 0, 0].isnan().all()
    assert emulated_flash_attention(q, k, v)[0].isfinite().all()
    tied = torch.full((1, 1, 2, 1), 10.0)  # beta 8: exp(100 - 800) is 0 in float32
    out, lse = emulated_flash_attention(tied, tied, tied, scale=1.0, variant="stabilised", beta=8.0)
    assert out.isnan().all() and lse.isnan().all()


def test_neither_autograd_nor_autocast_reaches_it():
    q, k, v, _ = inputs(n=20, dtype=torch.float32)
    want = emulated_flash_attention(q, k, v)[0]
    with torch.autocast("cpu", dtype=BF16):
        out = emulated_flash_attention(q.requires_grad_(), k, v)[0]
    assert torch.equal(out, want) and not out.requires_grad


def test_it_trains_a_live_model():
    q, k, v, g = inputs(h=4, h_kv=2, n=20, dtype=BF16)
    kernel = {"causal": True, "tile_k": 8, "delta": "probs"}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = emulated_attention(*leaves, **kernel)
    out.backward(g)
    assert torch.equal(out.detach(), emulated_flash_attention(q, k, v, **kernel)[0])
    grads = emulated_flash_attention_grad(q, k, v, g, **kernel)
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, grads, strict=True))


def test_gradcheck():
    q, k, v, _ = (x.requires_grad_() for x in inputs(h=2, h_kv=1, n=5, d=3))
    assert torch.autograd.gradcheck(
        lambda *x: emulated_attention(*x, state_dtype=FP64, causal=True, tile_k=2), (q, k, v)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "fa3"}, r"variant must be one of \('fa1', 'fa2', 'stabilised'\), got 'fa3'"),
        ({"tile_k": 0}, "tile_k must be an int >= 1, got 0"),
        ({"tile_q": -3}, "tile_q must be an int >= 1, got -3"),
        ({"tile_q": 2.5}, "tile_q must be an int >= 1, got 2.5"),
        ({"beta": 1.5}, r"beta must lie in \[2, 8\], got 1.5"),
        ({"beta": math.nan}, r"beta must lie in \[2, 8\], got nan"),
        ({"delta": "dp"}, "delta must be 'out' or 'probs', got 'dp'"),
        ({"probs_dtype": "bf16"}, "got 'bf16'"),
        ({"input_dtype": torch.int8}, "got torch.int8"),
        ({"state_dtype": -1}, "got -1"),
        ({"window": (-2, 0)}, r"window must be \(left, right\)"),
    ],
)
def test_bad_options_are_named_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        emulated_flash_attention_grad(*inputs(), **options)
    assert "\n" not in str(error.value)


def test_bad_tensors_are_named():
    q, k, v, g = inputs()
    with pytest.raises(ValueError, match="one dtype, got torch.float64, torch.float32"):
        emulated_flash_attention(q, k.float(), v)
    with pytest.raises(ValueError, match="equal heads and length"):
        emulated_flash_attention(q, k, v[:, :, :2])
    with pytest.raises(ValueError, match="one head_dim"):
        emulated_flash_attention(q[..., :2], k, v)
    with pytest.raises(ValueError, match=r"grad_out must have the shape of out, \(1, 2, 9, 4\)"):
        emulated_flash_attention_grad(q, k, v, g[:, :, :3])
    with pytest.raises(ValueError, match="floating torch.dtype.* got torch.int64"):
        emulated_flash_attention(q.long(), k.long(), v.long())
