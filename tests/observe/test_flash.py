"""flash-attn's own Python layer over a CPU stand-in for its compiled kernel: seen and replaced."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flash_stand_in import flash_attn
from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
from stabilitykit.observe.exactly import attend_exactly, exact_options
from stabilitykit.observe.tap import Tap

B, N, M, H, G, D = 2, 7, 11, 4, 2, 16
CU_Q, CU_K = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 16], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05])


def fixed(q, k, v, **options):
    return flash_attn.flash_attn_func(q.view(B, N, H, D), k.view(B, M, G, D), v.view(B, M, G, D), **options)


def packed(q, k, v, **options):
    q, k, v = q.view(-1, H, D)[:10], k.view(-1, G, D)[:16], v.view(-1, G, D)[:16]
    return flash_attn.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 7, 11, **options)


def narrow(q, k, v, **options):
    """flash-attn pads heads to a multiple of 8."""
    q, k, v = q.view(B, N, H, D)[..., :5], k.view(B, M, G, D)[..., :5], v.view(B, M, G, D)[..., :5]
    return flash_attn.flash_attn_func(q, k, v, **options)


OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window_size": (3, 0)},
    {"window_size": (2, 1), "softcap": 5.0},
    {"causal": True, "alibi_slopes": SLOPES, "softmax_scale": 0.3},
]


class Block(nn.Module):
    def __init__(self, attention, **options):
        super().__init__()
        self.attention, self.options = attention, options

    def forward(self, q, k, v):
        return self.attention(q, k, v, **self.options)


def run(attention, options, calls=None, replace=None, dtype=torch.float32, recompute=None):
    """out and the gradients of q, k, v; calls None: no tap."""
    torch.manual_seed(1)
    inputs = [
        torch.randn(size, dtype=dtype).requires_grad_() for size in (B * N * H * D, *(B * M * G * D,) * 2)
    ]
    model = nn.Sequential()
    model.add_module("inner", Block(attention, **options))
    tap = Tap(model, None if calls is None else calls.append, replace)
    with contextlib.nullcontext() if calls is None and replace is None else tap:
        if recompute is None:
            out = model.inner(*inputs)
        else:
            out = checkpoint(model.inner, *inputs, use_reentrant=recompute)
        out.float().sin().sum().backward()
    return [out.detach(), *(tensor.grad for tensor in inputs)], tap


def off(call):
    """The largest relative distance of out, dq, dk, dv from exact attention with the call's options."""
    options = exact_options(call.kwargs)
    exact = [exact_attention(call.q, call.k, call.v, **options)[0]]
    exact += exact_attention_grad(call.q, call.k, call.v, call.grad_out, **options)
    pairs = zip((call.out, call.dq, call.dk, call.dv), exact, strict=True)
    return max(((seen - true).norm() / true.norm()).item() for seen, true in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("attention", [fixed, packed, narrow])
def test_it_is_seen_and_is_exact_attention_with_its_options(attention, options, dtype):
    calls = []
    watched, tap = run(attention, options, calls, dtype=dtype)
    (call,) = calls
    assert (call.name, call.backend, tap.unseen) == ("inner", "flash_attn", {})
    assert call.lse.shape == call.q.shape[:3]
    assert off(call) < (2e-6 if dtype == torch.float32 else 2e-2)
    plain, _ = run(attention, options, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_only_what_sdpa_cannot_say_is_said_in_further_options():
    def square(q, k, v):
        q, k, v = (t[: B * N * G * D].view(B, N, G, D) for t in (q, k, v))
        return flash_attn.flash_attn_func(q, k, v, causal=True)

    calls = []
    run(square, {}, calls)
    assert set(calls[0].kwargs) == {"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
    run(packed, {"causal": True}, calls)
    assert calls[1].kwargs["align"] == "bottom_right"
    assert calls[1].q.shape == (1, H, 10, D)


@pytest.mark.parametrize("attention", [fixed, packed, narrow])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_is_replaced_forward_and_backward(attention, options):
    plain, _ = run(attention, options)
    replaced, _ = run(attention, options, replace=attend_exactly)
    for a, b in zip(plain, replaced, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    other, _ = run(attention, options, replace=lambda q, k, v, **_: 2 * q)
    assert torch.equal(other[3], torch.zeros_like(other[3]))
    assert other[1].abs().max() > 0


def test_a_replacement_equals_calling_it_bit_for_bit():
    def called(q, k, v):
        heads = (q.view(B, N, H, D), k.view(B, M, G, D), v.view(B, M, G, D))
        q, k, v = (t.transpose(1, 2) for t in heads)
        kwargs = {
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": True,
            "scale": D**-0.5,
            "enable_gqa": True,
        }
        return attend_exactly(q, k, v, align="bottom_right", **kwargs).transpose(1, 2)

    replaced, _ = run(fixed, {"causal": True}, replace=attend_exactly)
    assert all(torch.equal(a, b) for a, b in zip(run(called, {})[0], replaced, strict=True))


@pytest.mark.parametrize("recompute", [True, False])
def test_checkpointed_calls_are_seen_once_with_their_gradients(recompute):
    calls = []
    watched, _ = run(fixed, {"causal": True}, calls, recompute=recompute)
    assert [call.name for call in calls] == ["inner"]
    assert off(calls[0]) < 2e-6
    plain, _ = run(fixed, {"causal": True}, recompute=recompute)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_packed_qkv_and_two_calls_in_one_module():
    def twice(q, k, v):
        first, second = (t[: 2 * 5 * 3 * 2 * 8].view(2, 5, 3, 2, 8) for t in (k, v))
        return (
            flash_attn.flash_attn_qkvpacked_func(first)
            + flash_attn.flash_attn_qkvpacked_func(second, causal=True)
            + q.sum()
        )

    calls = []
    run(twice, {}, calls)
    assert sorted(call.name for call in calls) == ["inner", "inner#1"]
    assert max(map(off, calls)) < 2e-6


def test_dropout_is_seen_but_not_replaced():
    calls = []
    plain, _ = run(fixed, {"dropout_p": 0.2})
    watched, tap = run(fixed, {"dropout_p": 0.2}, calls, attend_exactly)
    assert calls[0].kwargs["dropout_p"] == 0.2
    assert "dropout" in tap.unseen["inner"]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.fixture
def flash_attn_3():
    """The ops of flash-attn 3 by their schemas (hopper/flash_api.cpp, shortened), over those of 2."""
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(
        "fwd(Tensor q, Tensor k, Tensor v, Tensor? q_descale=None, float? softmax_scale=None, "
        "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, "
        "float softcap=0.0) -> (Tensor, Tensor)"
    )
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? dq=None, "
        "Tensor? dk=None, Tensor? dv=None, float? softmax_scale=None, bool is_causal=False, "
        "int window_size_left=-1, int window_size_right=-1, float softcap=0.0) -> (Tensor, Tensor, Tensor)"
    )
    two = torch.ops.flash_attn

    def fwd(q, k, v, q_descale, scale, causal, left=-1, right=-1, chunk=0, softcap=0.0):
        return two._flash_attn_forward(q, k, v, 0.0, scale, causal, left, right, softcap, None, False)[:2]

    def bwd(dout, q, k, v, out, lse, dq, dk, dv, scale, causal, left=-1, right=-1, softcap=0.0):
        grads = [torch.empty_like(t) for t in (q, k, v)]
        options = (0.0, scale, causal, left, right, softcap, None, False)
        two._flash_attn_backward(dout, q, k, v, out, lse, *grads, *options)
        return tuple(grads)

    library.impl("fwd", fwd, "CPU")
    library.impl("bwd", bwd, "CPU")
    yield torch.ops.flash_attn_3
    library._destroy()


class Three(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, chunk):
        ops = torch.ops.flash_attn_3
        out, lse = ops.fwd(q, k, v, softmax_scale=0.25, is_causal=True, attention_chunk=chunk)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        return *torch.ops.flash_attn_3.bwd(dout, *ctx.saved_tensors, softmax_scale=0.25, is_causal=True), None


def test_the_ops_of_flash_attn_3_are_known_by_name(flash_attn_3):
    def attention(q, k, v, chunk=0):
        return Three.apply(q.view(B, N, H, D), k.view(B, M, G, D), v.view(B, M, G, D), chunk)

    calls = []
    _, tap = run(attention, {}, calls)
    assert tap.unseen == {}
    assert off(calls[0]) < 2e-6
    replaced, _ = run(attention, {}, replace=attend_exactly)
    torch.testing.assert_close(replaced[1], run(attention, {})[0][1], rtol=1e-5, atol=1e-5)
    calls.clear()
    _, tap = run(attention, {"chunk": 4}, calls)
    assert calls == []
    assert "attention_chunk" in tap.unseen["inner"]
