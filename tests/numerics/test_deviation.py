"""Deviation by hand, by its laws, and on real kernels."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.deviation import by_quartile, deviation, perturb, unit_roundoff
from stabilitykit.numerics.exact import exact_attention, exact_attention_grad, plain_attention

BASE = ["max_abs", "mean_abs", "rmse", "rel_l2", "error_constant", "cosine", "sign_bias"]
COUNTS = ["nonfinite_fast", "nonfinite_exact"]
some = settings(max_examples=30, deadline=None)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_each_number_by_hand():
    exact = torch.tensor([[4.0, -2.0], [0.0, 1.0]], dtype=torch.float64)
    fast = torch.tensor([[4.5, -2.5], [0.5, 0.5]], dtype=torch.float64)
    low = exact + torch.tensor([[0.0, 0.25], [-1.0, 0.5]])
    got = deviation(fast, exact, low, exact + 2, dtype=torch.bfloat16)
    assert got.keys() == {*BASE, *COUNTS, "error_vs_baseline", "roundoff_ratio"}
    assert all(type(value) is float for value in got.values())
    assert got["max_abs"] == got["mean_abs"] == got["rmse"] == 0.5
    assert got["rel_l2"] == pytest.approx(1 / math.sqrt(21))
    assert got["cosine"] == pytest.approx(23.5 / math.sqrt(21 * 27))
    assert got["error_constant"] == 0.5 / (2**-8 * 4)
    x = exact.bfloat16()
    atol = 2 * (x + 0.3 - 0.3 - x).abs().max().item()
    assert got["error_vs_baseline"] == pytest.approx(0.5 / (1 + atol))
    assert got["roundoff_ratio"] == 0.25
    # ulps of bfloat16 at 4, 2 and 1: 2^-5, 2^-6, 2^-7; the first two errors point away from zero.
    assert got["sign_bias"] == pytest.approx((0.5 * 2**5 + 0.5 * 2**6 - 0.5 * 2**7) / 3)
    assert (got["nonfinite_fast"], got["nonfinite_exact"]) == (0.0, 0.0)


def test_absent_arguments_leave_their_keys_out():
    assert list(deviation(torch.ones(2), torch.ones(2))) == [*BASE[:5], *BASE[5:], *COUNTS]


def test_zero_denominators():
    zero, one = torch.zeros(3), torch.ones(3)
    same = deviation(zero, zero, zero, zero)
    assert {same[key] for key in same} == {0.0}
    far = deviation(one, zero, zero, zero)
    for key in ("rel_l2", "error_constant", "roundoff_ratio", "error_vs_baseline"):
        assert far[key] == math.inf
    assert far["cosine"] == far["sign_bias"] == 0.0


def test_the_default_precision_is_that_of_fast():
    exact = normal(50)
    fast = exact.to(torch.bfloat16)
    assert deviation(fast, exact) == deviation(fast, exact, dtype=7)
    assert deviation(fast.float(), exact) != deviation(fast, exact)


# --- values that are not finite ------------------------------------------------------------------


def test_a_nan_in_the_reference_hides_no_other_mismatch():
    exact, fast = torch.tensor([math.nan, 1.0, 2.0]), torch.tensor([5.0, 1.0, 3.0])
    got = deviation(fast, exact, exact, exact + 1)
    assert (got["max_abs"], got["mean_abs"], got["nonfinite_exact"]) == (1.0, 0.5, 1.0)
    assert got["roundoff_ratio"] == pytest.approx(1 / math.sqrt(2))
    assert not any(math.isnan(value) for value in got.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_kernel_that_is_not_finite_alone_is_infinitely_far(value):
    exact, fast = torch.tensor([1.0, 2.0]), torch.tensor([1.0, value])
    got = deviation(fast, exact, exact, exact)
    errors = {key for key, number in got.items() if number == math.inf}
    assert errors == {*BASE[:5], "error_vs_baseline", "roundoff_ratio"}
    assert (got["nonfinite_fast"], got["nonfinite_exact"]) == (1.0, 0.0)


def test_nothing_to_compare_is_nan_and_never_zero():
    nan = torch.full((2,), math.nan)
    got = deviation(nan, nan, nan, nan)
    assert (got.pop("nonfinite_fast"), got.pop("nonfinite_exact")) == (2.0, 2.0)
    assert all(math.isnan(value) for value in got.values())


def test_both_infinite_alike_is_no_mismatch():
    lse = torch.tensor([-math.inf, 1.0])
    assert deviation(lse, lse)["max_abs"] == 0.0


def test_an_overflowed_baseline_counts_where_it_is_finite():
    exact, low = torch.tensor([1.0, 2.0]), torch.tensor([math.inf, 3.0])
    got = deviation(exact + 1, exact, low, low)
    assert got["error_vs_baseline"] == pytest.approx(1.0, rel=1e-5)
    assert got["roundoff_ratio"] == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((torch.ones(0), torch.ones(0)), r"at least one entry, got shape \(0,\)"),
        ((torch.ones(2), torch.ones(3)), r"exact must have the shape of fast, got \(3,\) and \(2,\)"),
        ((torch.ones(2), torch.ones(2), torch.ones(1)), r"low must have"),
        ((torch.ones(2), torch.ones(2), None, torch.ones(1)), r"perturbed must have"),
    ],
)
def test_bad_input_is_named(tensors, message):
    with pytest.raises(ValueError, match=message):
        deviation(*tensors)


# --- by query position ---------------------------------------------------------------------------


def test_quartiles_by_hand():
    """Rows 0-1, 2-3, 4-5 and 6 of seven, whatever stands before and after the positions."""
    exact = torch.ones(2, 7, 3, dtype=torch.float64)
    fast = exact + torch.arange(7.0)[:, None]
    low = exact + 0.5
    got = by_quartile(fast, exact, low, exact + 2, dtype=7)
    assert [numbers["max_abs"] for numbers in got] == [1.0, 3.0, 5.0, 6.0]
    assert [numbers["mean_abs"] for numbers in got] == [0.5, 2.5, 4.5, 6.0]
    assert got[3]["roundoff_ratio"] == pytest.approx(3.0)
    assert got[3] == deviation(fast[:, 6:], exact[:, 6:], low[:, 6:], exact[:, 6:] + 2, dtype=7)
    assert by_quartile(fast, exact)[0].keys() == deviation(fast, exact).keys()


def test_quartiles_show_what_the_first_rows_of_a_causal_map_hide():
    q, k, v = (normal(1, 1, 256, 16, seed=i).bfloat16() for i in range(3))
    exact, _ = exact_attention(q, k, v, causal=True)
    fast = flash(q, k, v)
    fast[:, :, 200] += 0.01  # too small to be seen in the whole
    got = [numbers["max_abs"] for numbers in by_quartile(fast, exact)]
    assert max(got[1:3]) < got[3] < 0.02
    assert deviation(fast, exact)["max_abs"] == max(got)


def test_a_nan_in_one_quarter_of_the_reference_hides_nothing():
    exact, fast = torch.ones(8, 1), torch.ones(8, 1)
    exact[0], fast[1], fast[7] = math.nan, 3.0, math.nan
    got = by_quartile(fast, exact)
    assert [numbers["max_abs"] for numbers in got] == [2.0, 0.0, 0.0, math.inf]
    assert [numbers["nonfinite_exact"] for numbers in got] == [1.0, 0.0, 0.0, 0.0]


def test_quartiles_need_four_rows():
    for shape in ((3, 5), (9,)):
        with pytest.raises(ValueError, match=r"\[..., q, d\] with q >= 4, got shape"):
            by_quartile(torch.ones(shape), torch.ones(shape))
    with pytest.raises(ValueError, match="exact must have the shape of fast"):
        by_quartile(torch.ones(4, 1), torch.ones(5, 1))


# --- laws ----------------------------------------------------------------------------------------


@some
@given(seed=st.integers(0, 999), power=st.integers(-40, 40), sign=st.sampled_from((1, -1)))
def test_relative_numbers_ignore_the_unit(seed, power, sign):
    exact, fast, low = normal(30, seed=seed), normal(30, seed=seed + 1), normal(30, seed=seed + 2)
    unit = sign * 2.0**power
    one = deviation(fast, exact, None, low, dtype=torch.bfloat16)
    two = deviation(fast * unit, exact * unit, None, low * unit, dtype=torch.bfloat16)
    for key in ("rel_l2", "error_constant", "roundoff_ratio", "cosine", "sign_bias"):
        assert two[key] == pytest.approx(one[key], rel=1e-12)
    for key in ("max_abs", "mean_abs", "rmse"):
        assert two[key] == pytest.approx(one[key] * abs(unit), rel=1e-12)


@some
@given(
    seed=st.integers(0, 999),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
    sd=st.floats(0.1, 10),
)
def test_one_rounding_is_within_one_unit_roundoff(seed, dtype, sd):
    exact = normal(200, seed=seed) * sd
    got = deviation(exact.to(dtype), exact)
    assert 0 < got["error_constant"] <= 1
    assert got["rel_l2"] <= unit_roundoff(dtype)
    assert abs(got["sign_bias"]) < 0.15  # rounding to nearest leans nowhere: sd of the mean is 0.02


def test_sign_bias_sees_which_way_a_rounding_leans():
    exact = normal(2000)
    toward = exact.float().view(torch.int32).bitwise_and(-(1 << 16)).view(torch.float32)
    away = toward + toward.sign() * torch.exp2(toward.abs().log2().floor()) * 2**-7
    assert deviation(toward.bfloat16(), exact)["sign_bias"] == pytest.approx(-0.5, abs=0.03)
    assert deviation(away.bfloat16(), exact)["sign_bias"] == pytest.approx(0.5, abs=0.03)


def test_the_worked_rounding_example_of_2510_04212():
    """-4.703990459442139 becomes -4.71875: away from zero by almost half an ulp of 2^-5."""
    exact = torch.tensor([-4.703990459442139], dtype=torch.float64)
    got = deviation(exact.bfloat16(), exact)
    assert got["max_abs"] == pytest.approx(0.014759540557861328, rel=1e-15)
    assert got["sign_bias"] == pytest.approx(0.014759540557861328 * 32, rel=1e-15)


def test_subnormal_numbers_keep_their_spacing():
    tiny = 2.0**-24  # of float16, everywhere below 2^-14
    got = deviation(torch.tensor([2 * tiny]).half(), torch.tensor([1.0 * tiny]).double())
    assert got["sign_bias"] == 1.0


def test_a_width_is_its_format():
    exact, fast = normal(40), normal(40).bfloat16()
    assert deviation(fast, exact, dtype=7) == deviation(fast, exact)
    low = exact + 1e-3
    assert deviation(fast, exact, low, dtype=10) == deviation(fast, exact, low, dtype="tf32")


def test_the_floor_of_the_baseline_error_is_one_addition():
    """In 7 bits 1 + .30078125 is a tie that goes down to 1.296875, so 2^-8 is lost."""
    one, two = torch.ones(1, dtype=torch.float64), torch.full((1,), 2.0, dtype=torch.float64)
    assert deviation(two, one, one, dtype=7)["error_vs_baseline"] == 1 / 2**-7
    x = normal(1000).bfloat16()
    atol = 2 * (x + 0.3 - 0.3 - x).abs().max().item()
    got = deviation(x + 1.0, x.double(), x)
    assert got["error_vs_baseline"] == pytest.approx(got["max_abs"] / atol)


def test_unit_roundoffs():
    wanted = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53, "tf32": 11, 0: 1}
    assert {dtype: unit_roundoff(dtype) for dtype in wanted} == {d: 2.0**-p for d, p in wanted.items()}
    for bad in ("bf16", -1, True, None):
        with pytest.raises(ValueError, match=f"got {bad!r}"):
            unit_roundoff(bad)
    with pytest.raises(ValueError, match="int64"):
        deviation(torch.ones(2, dtype=torch.int64), torch.ones(2))


def test_bf16_deviation_does_not_depend_on_the_size_of_v():
    """flash-attention#1071: v times 8 must read the same."""
    q, k, v = (normal(1, 2, 64, 16, seed=i).bfloat16() for i in range(3))
    one, eight = (
        deviation(F.scaled_dot_product_attention(q, k, u), exact_attention(q, k, u)[0]) for u in (v, v * 8)
    )
    assert one["rel_l2"] == eight["rel_l2"]
    assert one["error_constant"] == eight["error_constant"] < 2


# --- perturb and roundoff_ratio ------------------------------------------------------------------


def test_perturb_moves_every_entry_by_less_than_a_unit_roundoff():
    x = normal(5000).float()
    moved = perturb(x, torch.bfloat16, torch.Generator().manual_seed(3))
    share = ((moved - x) / x.double()) * 2**8
    assert moved.dtype == torch.float64
    assert share.abs().max() <= 1
    assert share.abs().max() > 0.99
    assert abs(share.mean()) < 0.04
    assert share.std() == pytest.approx(3**-0.5, rel=0.03)


def test_perturb_repeats_by_seed_and_leaves_the_global_generator_alone():
    x, before = normal(9), torch.get_rng_state()
    one, two = (perturb(x, 7, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, perturb(x, 7, torch.Generator().manual_seed(2)))
    assert torch.equal(torch.get_rng_state(), before)


def flash(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain(q, k, v):
    return plain_attention(q, k, v, causal=True)


def sees_one_key_too_many(q, k, v):
    keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def roundoff_ratios(kernel, dtype, sd=1.0, seed=0):
    """The ratio of the worst head for out, dq, dk and dv: T 256, d 64, 4 heads, causal."""
    q, k, v, g = (normal(1, 4, 256, 64, seed=4 * seed + i) for i in range(4))
    tensors = [x.to(dtype) for x in (q * sd, k * sd, v, g)]
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = kernel(*leaves)
    fast = (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))
    noise = torch.Generator().manual_seed(seed)
    exact, perturbed = (
        (exact_attention(*x[:3], causal=True)[0], *exact_attention_grad(*x, causal=True))
        for x in (tensors, [perturb(x, dtype, noise) for x in tensors])
    )
    return [
        max(deviation(f[:, i], e[:, i], perturbed=p[:, i])["roundoff_ratio"] for i in range(4))
        for f, e, p in zip(fast, exact, perturbed, strict=True)
    ]


@pytest.mark.parametrize("sd", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [flash, plain])
def test_healthy_16_bit_kernels_are_near_one(kernel, dtype, sd):
    assert max(roundoff_ratios(kernel, dtype, sd)) <= 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mask_off_by_one_stands_out(dtype):
    assert min(roundoff_ratios(sees_one_key_too_many, dtype)) >= 30
