"""Rounding against exact fractions, numpy and torch's own casts."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.numerics.formats import rounded, ulp, unit_roundoff

some = settings(max_examples=200, deadline=None)
float64s = st.floats(allow_nan=False, allow_infinity=False)
float32s = st.floats(allow_nan=False, width=32)
CARRIERS = (torch.float32, torch.float64)


def of(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def bits(x):
    """What `==` cannot tell: the sign of zero, and which entries are NaN."""
    return (
        (x.signbit() & ~x.isnan()).tolist(),
        x.isnan().tolist(),
        x.nan_to_num(0.0, math.inf, -math.inf).tolist(),
    )


# --- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize("carrier", CARRIERS)
def test_ties_go_to_the_even_neighbour(carrier):
    eighth = 2**-3  # half of the spacing of 2 bits at 1
    x = of(1 + eighth, 1 + 3 * eighth, 1 + 0.99 * eighth, 1 + 1.01 * eighth, dtype=carrier)
    assert rounded(x, 2).tolist() == [1.0, 1.5, 1.0, 1.25]
    assert rounded(-x, 2).tolist() == [-1.0, -1.5, -1.0, -1.25]
    assert rounded(of(1.9, dtype=carrier), 2).tolist() == [2.0]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_float16_overflows_and_has_subnormals(carrier):
    tiny = 2.0**-24
    x = of(65519.0, 65520.0, -1e6, tiny / 2, 0.51 * tiny, 1.5 * tiny, 2.5 * tiny, dtype=carrier)
    wanted = [65504.0, math.inf, -math.inf, 0.0, tiny, 2 * tiny, 2 * tiny]
    assert rounded(x, torch.float16).tolist() == wanted


def test_float64_is_rounded_once_to_16_bits_and_not_through_float32():
    """1 + 2^-8 + 2^-40 lies above the tie; float32 would make the tie of it, which goes to 1."""
    x = of(1 + 2**-8 + 2**-40)
    assert x.bfloat16().item() == 1.0
    assert rounded(x, torch.bfloat16).item() == 1 + 2**-7
    assert rounded(of(1 + 2**-11 + 2**-40), torch.float16).item() == 1 + 2**-10


def test_the_worked_rounding_example_of_2510_04212():
    """-4.703990459442139 becomes -4.71875 in bfloat16: away from zero by almost half its ulp of 2^-5."""
    x = of(-4.703990459442139)
    assert (rounded(x, torch.bfloat16) - x).item() == -0.014759540557861328
    assert ulp(x, torch.bfloat16).item() == 2**-5


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("precision", [0, 7, 22, "tf32", torch.bfloat16, torch.float16])
def test_zeros_infinities_and_nan_stay_what_they_are(carrier, precision):
    x = of(0.0, -0.0, math.inf, -math.inf, math.nan, dtype=carrier)
    assert bits(rounded(x, precision)) == bits(x)


def test_a_format_at_least_as_fine_as_the_carrier_changes_nothing():
    for carrier, fine in ((torch.float32, (torch.float32, torch.float64, 23, 60)), (torch.float64, (52,))):
        x = torch.rand(5, dtype=carrier)
        assert all(rounded(x, precision) is x for precision in fine)


def test_bad_precisions_are_named():
    for bad in ("bf16", -1, True, 1.5, None, torch.int64):
        with pytest.raises(ValueError, match='dtype must be a floating torch.dtype, "tf32" or mantissa bits'):
            rounded(torch.ones(1), bad)


# --- oracles -------------------------------------------------------------------------------------


def by_fractions(value, width, smallest, largest):
    """The nearest multiple of the spacing, exactly; `smallest` and `largest` are powers of two."""
    power = Fraction(2) ** max(math.frexp(value)[1] - 1, smallest)
    spacing = power / 2**width
    near = round(Fraction(value) / spacing) * spacing  # Python's round takes ties to even
    return math.copysign(math.inf, value) if abs(near) >= Fraction(2) ** largest else float(near)


@some
@given(value=float64s, width=st.integers(0, 51))
def test_any_width_of_float64(value, width):
    assert rounded(of(value), width).item() == by_fractions(value, width, -1022, 1024)


@some
@given(value=float64s | st.floats(-1e-37, 1e-37) | st.floats(-7e4, 7e4))
def test_16_bits_of_float64(value):
    assert rounded(of(value), torch.bfloat16).item() == by_fractions(value, 7, -126, 128)
    assert rounded(of(value), torch.float16).item() == by_fractions(value, 10, -14, 16)
    with np.errstate(over="ignore"):
        assert rounded(of(value), torch.float16).item() == np.float64(value).astype(np.float16)


@some
@given(value=float32s | st.floats(-(2.0**-125), 2.0**-125, width=32))
def test_16_bits_of_float32_and_its_widths(value):
    x = of(value, dtype=torch.float32)
    assert bits(rounded(x, torch.bfloat16)) == bits(x.bfloat16().float()) == bits(rounded(x, 7))
    assert bits(rounded(x, torch.float16)) == bits(x.half().float())
    assert bits(rounded(x, "tf32")) == bits(rounded(x, 10))
    if 2**-14 <= abs(value) < 65504:
        assert rounded(x, torch.float16).item() == rounded(x, 10).item()


# --- laws ----------------------------------------------------------------------------------------


@some
@given(value=float32s, width=st.integers(0, 22), carrier=st.sampled_from(CARRIERS))
def test_rounding_repeats_is_odd_and_stays_within_half_an_ulp(value, width, carrier):
    x = of(value, dtype=carrier)
    near = rounded(x, width)
    assert bits(rounded(near, width)) == bits(near)
    assert bits(rounded(-x, width)) == bits(-near)
    if near.isfinite():
        assert (near - x).abs().double() <= ulp(x, width).double() / 2


@some
@given(low=float64s, high=float64s, width=st.integers(0, 51))
def test_rounding_keeps_order(low, high, width):
    low, high = sorted((low, high))
    assert rounded(of(low), width) <= rounded(of(high), width)


def test_unit_roundoff_is_the_worst_relative_error():
    x = 1 + torch.rand(20000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for precision in (torch.bfloat16, torch.float16, "tf32", 4):
        worst = ((rounded(x, precision) - x) / x).abs().max().item()
        assert 0.95 * unit_roundoff(precision) < worst <= unit_roundoff(precision)
