"""One part of the ring, in every kernel that runs here."""

import math

import pytest
import torch

from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
from stabilitykit.parallel.kernel import kernel_for
from stabilitykit.parallel.tiles import Part

KERNELS = ("fused", "exact")


def drawn(dtype=torch.float64, h_kv=1, n=6, m=6):
    g = torch.Generator().manual_seed(3)
    shapes = ((2, 2, n, 4), (2, h_kv, m, 4), (2, h_kv, m, 4), (2, 2, n, 4))
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def masks():
    thin = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril(2)
    thin[0, :, 1] = False
    return thin


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("h_kv", [1, 2])
@pytest.mark.parametrize("how", ["all", "causal", "mask"])
def test_a_part_over_all_keys_is_exact_attention(name, h_kv, how):
    q, k, v, grad = drawn(h_kv=h_kv)
    causal, mask = how == "causal", masks() if how == "mask" else None
    part, kernel = Part(slice(0, 6), slice(0, 6), causal, mask), kernel_for(q, v, name, masked=True)
    out, lse = kernel.forward(q, k, v, part, 0.7)
    want_out, want_lse = exact_attention(q, k, v, causal=causal, mask=mask, scale=0.7)
    assert torch.allclose(out, want_out, rtol=0, atol=1e-14)
    assert torch.equal(lse.isinf(), want_lse.isinf()) and torch.allclose(lse, want_lse, rtol=0, atol=1e-14)
    finite = lse.masked_fill(lse == -math.inf, 0)
    got = kernel.backward(grad, q, k, v, out, finite, part, 0.7)
    for x, y in zip(
        got, exact_attention_grad(q, k, v, grad, causal=causal, mask=mask, scale=0.7), strict=True
    ):
        assert torch.allclose(x, y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", KERNELS)
def test_case_5_rows_without_keys_have_lse_minus_infinity(name):
    """torch's CPU op itself says 0 there, which a merge would take for a key."""
    q, k, v, _ = drawn()
    out, lse = kernel_for(q, v, name, masked=True).forward(
        q, k, v, Part(slice(0, 6), slice(0, 6), mask=masks()), 1.0
    )
    assert (lse[0, :, 1] == -math.inf).all() and (out[0, :, 1] == 0).all() and lse[1].isfinite().all()


def test_16_bit_inputs_are_computed_in_float32_here():
    q, _, v, _ = drawn(torch.bfloat16)
    assert kernel_for(q, v, "fused", masked=False).dtype == torch.float32
    assert kernel_for(q.double(), v.double(), "fused", masked=False).dtype == torch.float64
    assert kernel_for(q, v, "exact", masked=False).dtype == torch.float64


def test_what_the_kernels_cannot_do_is_refused():
    q, _, v, _ = drawn()
    with pytest.raises(ValueError, match="one head_dim for q, k and v, got 4 and 3"):
        kernel_for(q, v[..., :3], "fused", masked=False)
    with pytest.raises(ValueError, match="'fused' or 'exact', got 'flash'"):
        kernel_for(q, v, "flash", masked=False)  # pyright: ignore
