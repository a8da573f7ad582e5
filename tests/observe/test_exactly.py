"""Exact attention as a drop-in: it is what `exact_attention` says, and replacing equals calling it."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
from stabilitykit.observe.exactly import attend_exactly, exact_options, part_of
from stabilitykit.observe.tap import Tap

FIVE = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


def inputs(dtype=torch.float32, heads=4):
    torch.manual_seed(0)
    shapes = ((2, 4, 6, 8), (2, heads, 7, 8), (2, heads, 7, 8))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_exact_attention_in_the_format_of_q(dtype):
    tensors = inputs(dtype, heads=2)
    out = attend_exactly(*tensors, **{**FIVE, "is_causal": True, "enable_gqa": True}, softcap=3.0)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, grad_out)
    options = {"causal": True, "softcap": 3.0}
    assert torch.equal(out, exact_attention(*tensors, **options)[0].to(dtype))
    for own, exact in zip(grads, exact_attention_grad(*tensors, grad_out, **options), strict=True):
        assert torch.equal(own, exact.to(dtype))


def test_dropout_drops_what_the_kernel_drops_on_a_cpu():
    tensors = inputs()
    torch.manual_seed(1)
    out = attend_exactly(*tensors, **{**FIVE, "dropout_p": 0.4})
    after = torch.rand(1)
    torch.manual_seed(1)
    kernel = F.scaled_dot_product_attention(*tensors, dropout_p=0.4)
    assert torch.equal(after, torch.rand(1))
    torch.testing.assert_close(out, kernel)


def test_a_learned_mask_gets_its_gradient():
    tensors = inputs(torch.float64)
    mask = torch.randn(4, 6, 7, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(attention(*tensors, attn_mask=mask).sin().sum(), [*tensors, mask])
        for attention in (
            lambda *t, attn_mask: attend_exactly(*t, **{**FIVE, "attn_mask": attn_mask}),
            F.scaled_dot_product_attention,
        )
    ]
    for own, torchs in zip(*grads, strict=True):
        torch.testing.assert_close(own, torchs)


def test_the_options_of_a_part_are_those_of_the_call():
    tensors = [tensor.detach() for tensor in inputs()]
    kwargs = {**FIVE, "attn_mask": torch.randn(2, 4, 6, 7), "dropout_p": 0.3}
    kwargs |= {"dropout_mask": torch.rand(2, 1, 6, 7) > 0.3, "alibi_slopes": torch.rand(2, 4)}
    whole = exact_options(kwargs)
    part = part_of(part_of(whole, sequences=[1]), heads=slice(1, 3))
    expected = exact_attention(*tensors, **whole)[0][1:, 1:3]
    got = exact_attention(*(tensor[1:, 1:3] for tensor in tensors), **part)[0]
    assert torch.equal(got, expected)


class NanoGPT(nn.Module):
    """Attention by hand; `exactly` calls exact attention in its place."""

    def __init__(self, exactly):
        super().__init__()
        self.qkv, self.exactly = nn.Linear(16, 48), exactly

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        keep = torch.ones(1, 1, x.shape[1], x.shape[1]).tril()
        if self.exactly:
            y = attend_exactly(q, k, v, **{**FIVE, "attn_mask": keep != 0, "scale": 1.0 / math.sqrt(8)})
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(8))
            y = F.softmax(att.masked_fill(keep == 0, float("-inf")), dim=-1) @ v
        return y.transpose(1, 2).reshape(x.shape)


def gradients(model, replace=None):
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(3), requires_grad=True)
    with Tap(model, replace=replace):
        out = model(x)
        return [out, *torch.autograd.grad(out.sin().sum(), [x, *model.parameters()], allow_unused=True)]


def same(one, other):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_replacing_equals_calling_in_attention_written_by_hand():
    by_hand, exactly = NanoGPT(False), NanoGPT(True)
    exactly.load_state_dict(by_hand.state_dict())
    assert same(gradients(by_hand, attend_exactly), gradients(exactly))
    assert not same(gradients(by_hand), gradients(exactly))


def test_replacing_equals_calling_in_a_transformer_encoder_layer(monkeypatch):
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plain, replaced = gradients(model), gradients(model, attend_exactly)

    def called(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
        return attend_exactly(q, k, v, **{**FIVE, "is_causal": is_causal, "attn_mask": attn_mask})

    monkeypatch.setattr(F, "scaled_dot_product_attention", called)
    monkeypatch.setattr(F, "multi_head_attention_forward", rebound(called))
    assert same(replaced, gradients(model))
    assert not same(plain, replaced)


def rebound(called):
    """torch's function with another scaled_dot_product_attention: it looks it up in its own globals."""
    import types

    own = F.multi_head_attention_forward
    names = {**own.__globals__, "scaled_dot_product_attention": called}
    function = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__)
    function.__kwdefaults__ = own.__kwdefaults__
    return function
