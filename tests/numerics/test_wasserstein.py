import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from stabilitykit.numerics import wasserstein as module
from stabilitykit.numerics.wasserstein import between_sorted, ordered, wasserstein

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def draw(seed: int, size: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)


def tensors():
    return st.builds(
        draw,
        st.integers(0, 10**6),
        st.integers(1, 300),
        st.sampled_from(DTYPES),
        st.sampled_from([0.01, 1.0, 30.0]),
    )


@settings(deadline=None, max_examples=100)
@given(tensors(), tensors())
def test_agrees_with_scipy(a, b):
    ours = wasserstein(a, b)
    assert ours == pytest.approx(wasserstein_distance(a.double(), b.double()), rel=1e-12, abs=1e-300)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 300), st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_agrees_with_scipy_at_equal_sizes(seed, size, first, second):
    a, b = draw(seed, size, first), draw(seed + 1, size, second)
    expected = wasserstein_distance(a.double(), b.double())
    assert wasserstein(a, b) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, max_examples=50)
@given(tensors(), tensors(), st.sampled_from([1, 1.5, 2, 3]))
def test_is_symmetric_and_zero_on_equal(a, b, p):
    assert wasserstein(a, b, p) == pytest.approx(wasserstein(b, a, p), rel=1e-13)
    assert wasserstein(a, a.clone(), p) == 0.0


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.integers(1, 50), st.floats(-100, 100), st.sampled_from([1, 2, 4]))
def test_a_shift_is_its_size(seed, size, shift, p):
    a = draw(seed, size, torch.float64)
    assert wasserstein(a, a + shift, p) == pytest.approx(abs(shift), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_unequal_sizes_against_every_value_repeated_to_a_common_size(p):
    a, b = draw(1, 12, torch.float64), draw(2, 18, torch.float64)
    repeated = wasserstein(a.repeat_interleave(3), b.repeat_interleave(2), p)
    assert wasserstein(a, b, p) == pytest.approx(repeated, rel=1e-13)


def test_by_hand():
    assert wasserstein(torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0]), p=2) == math.sqrt(12.5)
    # Half of the mass of {1, 3} moves by 1 each way to reach {2}.
    assert wasserstein(torch.tensor([1.0, 3.0]), torch.tensor([2.0])) == 1.0
    # Sixths: 0-0, 0-0, 0-0, then 6-0, then 6-9 twice: (6 + 3 + 3) / 6.
    assert wasserstein(torch.tensor([0.0, 6.0]), torch.tensor([0.0, 0.0, 9.0])) == pytest.approx(2.0)


def test_shape_does_not_matter_and_sums_are_in_float64():
    a = torch.zeros(1000, 100)
    assert wasserstein(a, a.view(-1) + 0.1) == pytest.approx(float(torch.tensor(0.1)), rel=1e-14)


def test_is_blind_to_permutation_where_relative_l2_is_not():
    a = draw(3, 1000, torch.float32)
    b = a[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    assert wasserstein(a, b) == 0.0
    assert (b - a).norm() / a.norm() > 1


def test_chunks_add_up(monkeypatch):
    a, b = draw(4, 1000, torch.float32), draw(5, 1000, torch.float32)
    whole = wasserstein(a, b)
    monkeypatch.setattr(module, "CHUNK", 7)
    assert wasserstein(a, b) == pytest.approx(whole, rel=1e-14)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 2.5]))
def test_unequal_sizes_in_small_chunks(seed, n, m, p):
    a, b = draw(seed, n, torch.float64), draw(seed + 1, m, torch.float64)
    expected = wasserstein(a.repeat_interleave(m), b.repeat_interleave(n), p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 7)
        assert wasserstein(a, b, p) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_counting_is_the_sorted_distance(other):  # cases.md 96
    a, b = draw(8, 5000, torch.bfloat16), draw(9, 3000, other, 1.5)
    assert wasserstein(a, b) == pytest.approx(wasserstein(a.double(), b.double()), rel=1e-13)
    assert wasserstein(a, b, 2) == pytest.approx(wasserstein(a.double(), b.double(), 2), rel=1e-13)


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_zeros_of_both_signs_and_the_extremes(dtype):
    top = torch.finfo(dtype).max
    a = torch.tensor([0.0, -0.0, top, -top], dtype=dtype)
    assert wasserstein(a, torch.tensor([-0.0, -top, 0.0, top], dtype=dtype)) == 0.0
    assert ordered(a).tolist() == [-top, 0.0, 0.0, top]


def test_an_overflow_to_half_is_an_error_that_counts():  # cases.md 94, 96
    a = torch.tensor([1.0, 70000.0, -70000.0])
    with pytest.raises(ValueError, match="got 2 non-finite of 3 in b"):
        wasserstein(a, a.half())
    with pytest.raises(ValueError, match="got 2 non-finite of 3 in a"):
        wasserstein(a.half(), a.half())


@pytest.mark.slow
def test_twenty_million_values():  # cases.md 99
    a, b = torch.rand(20_000_000), torch.rand(20_000_000).bfloat16()
    assert 0 < wasserstein(a, b) < 1e-3
    assert 0 < wasserstein(a.bfloat16(), b) < 1e-3


def test_inputs_keep_their_order_and_graphs_are_left_alone():
    a = torch.tensor([3.0, 1.0], requires_grad=True)
    assert wasserstein(a, torch.tensor([[1.0], [3.0]])) == 0.0
    assert a.tolist() == [3.0, 1.0]
    assert wasserstein(draw(1, 12, torch.float32).view(3, 4).T, draw(1, 12, torch.float32)) == 0.0


def test_int8_and_meta_are_named():
    a = torch.ones(2)
    with pytest.raises(ValueError, match="expected floating-point values, got torch.int8 in b"):
        wasserstein(a, a.to(torch.int8))
    with pytest.raises(ValueError, match="got a meta tensor without any in a"):
        wasserstein(a.to("meta"), a)


def test_one_sort_serves_many():
    a, b = draw(6, 50, torch.float32), draw(7, 50, torch.bfloat16)
    assert between_sorted(ordered(a), ordered(b), 2) == wasserstein(a, b, 2)


@pytest.mark.parametrize(
    ("a", "b", "p", "words"),
    [
        ([1.0] * 97 + [math.nan, math.inf, -math.inf], [1.0], 1, "got 3 non-finite of 100 in a"),
        ([1.0], [math.nan], 1, "got 1 non-finite of 1 in b"),
        ([], [1.0], 1, r"expected finite values, got none \(empty\) in a"),
        ([1.0], [1], 1, "expected floating-point values, got torch.int64 in b"),
        ([1.0], [1.0], 0.5, "expected 1 <= p < inf, got 0.5"),
        ([1.0], [1.0], math.inf, "expected 1 <= p < inf, got inf"),
    ],
)
def test_bad_input_is_named(a, b, p, words):
    with pytest.raises(ValueError, match=words):
        wasserstein(torch.tensor(a), torch.tensor(b), p)
