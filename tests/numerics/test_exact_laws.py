"""What exact attention keeps, leaves alone, and refuses."""

import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_oracle import assert_close, inputs
from stabilitykit.numerics import exact
from stabilitykit.numerics.exact import (
    attention_rows,
    exact_attention,
    exact_attention_grad,
    plain_attention,
)


def test_rows_and_heads_pick_from_the_whole_result():
    q, k, v, _ = inputs(b=2, h=4, h_kv=2, n=20)
    rows, heads = torch.tensor([13, 2, 2]), torch.tensor([3, 0])
    out, lse = exact_attention(q, k, v, causal=True)
    some = exact_attention(q, k, v, causal=True, rows=rows, heads=heads)
    assert_close(some[0], out[:, heads][:, :, rows])
    assert_close(some[1], lse[:, heads][:, :, rows])


def test_gradients_of_parts_sum_to_the_whole():
    q, k, v, g = inputs(b=2, h=4, h_kv=2, n=20)
    _, dk, dv = exact_attention_grad(q, k, v, g, causal=True)
    parts = [
        exact_attention_grad(q, k, v, g[:, heads][:, :, rows], causal=True, rows=rows, heads=heads)
        for rows in torch.arange(20).split(7)
        for heads in ([0, 3], [1, 2])
    ]
    assert_close(sum(part[1] for part in parts), dk)
    assert_close(sum(part[2] for part in parts), dv)


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside had."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, torch.Tensor):
                owned = x.untyped_storage().nbytes() // x.element_size()
                self.numel = max(self.numel, owned)
        return made


@pytest.mark.parametrize("n", [512, 4096])
def test_memory_is_linear_in_length(n):
    q, k, v, g = inputs(h=1, n=n, d=4, dtype=torch.float32)
    with Largest() as seen:
        exact_attention(q, k, v, causal=True, softcap=5.0)
        exact_attention_grad(q, k, v, g)
    assert seen.numel <= 128 * n


def test_nothing_else_is_touched():
    q, k, v, g = (x.requires_grad_() for x in inputs(n=40))
    before, rng = [x.detach().clone() for x in (q, k, v, g)], torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = (
            *attention_rows(q, k, v, dtype=torch.float32),
            *exact_attention_grad(q, k, v, g, dtype=torch.float32),
        )
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()
    assert not any(x.requires_grad for x in results)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, g), before, strict=True))
    plain = attention_rows(q, k, v)
    assert (results[0] - plain.out).abs().max() < 1e-5  # bfloat16 would leave 1e-3


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_float32_is_full_float32_inside_and_put_back_after(precision):
    q, k, v, _ = inputs(n=10)
    inside = []

    def fail(*_, **__):
        inside.append(torch.backends.mkldnn.matmul.fp32_precision)
        raise MemoryError

    found = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        exact_attention(q, k, v, dtype=torch.float32)
        with mock.patch.object(exact, "_forward", fail), pytest.raises(MemoryError):
            exact_attention(q, k, v, dtype=torch.float32)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(found)
    assert inside == ["ieee"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_reaches_the_result(which, value):
    tensors = inputs(n=6)
    tensors[which][0, 0, 2, 1] = value
    out, _ = exact_attention(*tensors[:3])
    assert not out[0, 0].isfinite().all()
    assert out[0, 1].isfinite().all()
    dq, _, _ = exact_attention_grad(*tensors)
    assert not dq[0, 0].isfinite().all()
    assert dq[0, 1].isfinite().all()


@pytest.mark.parametrize(
    ("b", "h", "n", "m"), [(1, 2, 0, 3), (1, 2, 3, 0), (0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 0)]
)
def test_lengths_of_zero_give_empty_results(b, h, n, m):
    q, k, g = torch.ones(b, h, n, 4), torch.ones(b, h, m, 4), torch.ones(b, h, n, 4)
    rows = attention_rows(q, k, k, causal=True)
    assert rows.out.shape == (b, h, n, 4)
    assert rows.lse.shape == (b, h, n)
    assert (rows.max_logit.numel(), rows.entropy.numel()) == (b * h, b * h)
    if m == 0:
        assert (rows.out == 0).all()
        assert (rows.lse == -math.inf).all()
        assert (rows.max_logit == -math.inf).all()
    grads = exact_attention_grad(q, k, k, g)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    assert plain_attention(q, k, k).shape == q.shape
    assert exact_attention(q, k, k, heads=[])[0].shape == (b, 0, n, 4)


@pytest.mark.parametrize("blind", [torch.zeros(5, 5) > 0, torch.full((5, 5), -math.inf)])
def test_a_whole_call_may_see_nothing(blind):
    q, k, v, g = inputs(n=5)
    rows = attention_rows(q, k, v, mask=blind)
    assert (rows.out == 0).all()
    assert (rows.lse == -math.inf).all()
    assert (rows.max_logit == -math.inf).all()
    assert rows.entropy.isnan().all()
    assert all((x == 0).all() for x in exact_attention_grad(q, k, v, g, mask=blind))


Q = torch.zeros(1, 4, 3, 8)


@pytest.mark.parametrize(
    ("k", "options", "message"),
    [
        (Q.half(), {}, "one dtype, got torch.float32, torch.float16, torch.float32"),
        (Q.to("meta"), {}, "one device, got cpu, meta, cpu"),
        (Q[..., :4], {}, r"one head_dim >= 1, got q \(1, 4, 3, 8\), k \(1, 4, 3, 4\)"),
        (Q, {"mask": torch.zeros(2, 3)}, r"mask must broadcast to \(1, 4, 3, 3\), got \(2, 3\)"),
    ],
    ids=["dtype", "device", "head_dim", "mask"],
)
@pytest.mark.parametrize("attend", [exact_attention, attention_rows, exact_attention_grad, plain_attention])
def test_what_does_not_fit_is_one_clear_line(attend, k, options, message):
    grad = [Q] * (attend is exact_attention_grad)
    with pytest.raises(ValueError, match=message) as caught:
        attend(Q, k, Q, *grad, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("grad_out", "message"),
    [
        (Q, r"shape of out, \(1, 4, 1, 8\), got \(1, 4, 3, 8\)"),
        (Q[:, :, :1].to("meta"), "grad_out must be on cpu, got meta"),
        (Q[:, :, :1].long(), "grad_out must be floating-point, got torch.int64"),
    ],
)
def test_a_grad_out_that_does_not_fit_is_named(grad_out, message):
    with pytest.raises(ValueError, match=message):
        exact_attention_grad(Q, Q, Q, grad_out, rows=torch.tensor([1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_only_wide_precisions_are_called_exact(dtype):
    q, k, v, g = inputs()
    with pytest.raises(ValueError, match=f"dtype must be float64 or float32, got {dtype}"):
        exact_attention(q, k, v, dtype=dtype)
    with pytest.raises(ValueError, match="dtype must be"):
        exact_attention_grad(q, k, v, g, dtype=dtype)
