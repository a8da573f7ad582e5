"""Attention written by hand, as models write it: seen as exact attention with its options, and replaced."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
from stabilitykit.observe.exactly import attend_exactly, exact_options
from stabilitykit.observe.tap import Tap

B, H, N, D = 2, 4, 6, 8
CAUSAL = torch.ones(N, N).tril()
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}  # where the scores are rounded to float32 on the way
LOWEST = torch.finfo(torch.float32).min


def padding():
    hidden = torch.zeros(B, 1, 1, N, dtype=torch.bool)
    hidden[1, ..., 4:] = True
    return hidden


def nano_gpt(q, k, v):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(D))
    att = att.masked_fill(CAUSAL.view(1, 1, N, N) == 0, float("-inf"))
    return F.dropout(F.softmax(att, dim=-1), 0.3) @ v


def gemma(q, k, v):
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.25
    weights = torch.tanh(weights / 5.0) * 5.0
    weights = weights + torch.zeros(N, N).masked_fill(CAUSAL == 0, LOWEST)
    weights = F.softmax(weights, dim=-1, dtype=torch.float64).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=True), v)


def t5(q, k, v):
    scores = torch.matmul(q, k.mT)
    scores += torch.linspace(-1, 1, H * N * N).view(1, H, N, N)
    return torch.matmul(scores.float().softmax(-1).type_as(scores), v)


def in_place(q, k, v):
    s = torch.matmul(q, k.mT)
    s /= math.sqrt(D)
    s.masked_fill_(padding(), -1e4)
    return s.softmax(dim=-1) @ v


def gpt_neo(q, k, v):
    s = torch.where(CAUSAL.bool(), q @ k.mT, torch.tensor(LOWEST))
    return torch.softmax(s, 3) @ v


def merged(q, k, v):
    """Bloom: batch and heads are one axis in the products, two in the mask."""
    q, k, v = (t.reshape(B * H, N, D) for t in (q, k, v))
    bias = torch.linspace(0, 1, H * N, dtype=q.dtype).view(H, 1, N).repeat(B, 1, 1)
    s = bias.baddbmm(batch1=q, batch2=k.transpose(1, 2), beta=1.0, alpha=0.3)
    s = s.view(B, H, N, N).masked_fill(padding(), LOWEST)
    p = F.dropout(F.softmax(s, dim=-1), 0.2).view(B * H, N, N)
    return torch.bmm(p, v).view(B, H, N, D)


def einsum(q, k, v):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k).div(torch.tensor(3.0)) - torch.eye(N)
    s = s.where(CAUSAL.bool(), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v).transpose(1, 2)


def grouped(q, k, v):
    q = q.view(B, 2, 2, N, D)
    k, v = (t[:, :2].unsqueeze(2) for t in (k, v))
    s = q @ k.transpose(-1, -2) * D**-0.5 + torch.linspace(0, 1, 4).view(2, 2, 1, 1)
    return (s.softmax(-1) @ v).view(B, H, N, D)


def zeroed(q, k, v):
    s = (q @ k.mT).masked_fill(~CAUSAL.bool(), -torch.inf)
    return s.softmax(-1).masked_fill(padding(), 0.0) @ v


def ellipsis(q, k, v):
    s = torch.einsum("... i d, ... j d -> ... i j", q, k)
    s = s - s.amax(-1, keepdim=True).detach()
    return torch.einsum("...ij,...jd->...id", s.softmax(-1), v)


KNOWN = [nano_gpt, gemma, t5, in_place, gpt_neo, merged, einsum, grouped, zeroed, ellipsis]


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, q, k, v):
        return self.attention(q, k, v)


def run(attention, calls=None, replace=None):
    """out, the gradients of q, k, v and the random stream after it; calls None: no tap."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(B, H, N, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    model = nn.Sequential()
    model.add_module("inner", Block(attention))
    tap = Tap(model, None if calls is None else calls.append, replace)
    with contextlib.nullcontext() if calls is None else tap:
        out = model.inner(q * 1.0, k * 1.0, v * 1.0)
        out.sin().sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad, torch.rand(1)], tap


@pytest.mark.parametrize("attention", KNOWN)
def test_it_is_seen_as_exact_attention_with_its_options(attention):
    calls = []
    (out, *grads, _), tap = run(attention, calls)
    (call,) = calls
    assert (call.name, call.backend, tap.unseen) == ("inner", "eager", {})
    assert call.q.shape == call.out.shape == (B, H, N, D)
    assert torch.equal(call.out, out)
    options = exact_options(call.kwargs)
    tight = FLOAT32 if attention is t5 else {}
    torch.testing.assert_close(exact_attention(call.q, call.k, call.v, **options)[0], call.out, **tight)
    exact = exact_attention_grad(call.q, call.k, call.v, call.grad_out, **options)
    for seen, true, own in zip((call.dq, call.dk, call.dv), exact, grads, strict=True):
        torch.testing.assert_close(seen, true, **tight)
        assert torch.equal(seen, own[:, : seen.shape[1]])


@pytest.mark.parametrize("attention", KNOWN)
def test_watching_it_changes_no_bit(attention):
    plain, watched = run(attention)[0], run(attention, [])[0]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.parametrize("attention", KNOWN)
def test_it_is_replaced_with_the_options_it_had(attention):
    plain, calls = run(attention)[0], []
    replaced, _ = run(attention, calls, attend_exactly)
    for a, b in zip(plain, replaced, strict=True):
        torch.testing.assert_close(a, b, **(FLOAT32 if attention is t5 else {}))
    assert calls[0].backend == "replaced"
    assert not torch.equal(plain[0], run(attention, [], lambda q, *_, **__: q)[0][0])


def test_a_learned_bias_gets_its_gradient_through_a_replacement():
    bias = torch.randn(1, H, N, N, dtype=torch.float64, requires_grad=True)

    def biased(q, k, v):
        return (q @ k.mT + bias).softmax(-1) @ v

    run(biased)
    plain, bias.grad = bias.grad, None
    run(biased, [], attend_exactly)
    torch.testing.assert_close(bias.grad, plain)


TEMPERATURE = torch.full((H, 1, 1), 2.0)
UNKNOWN = {
    "scaled by a tensor": lambda q, k, v: (q @ k.mT * TEMPERATURE).softmax(-1) @ v,
    "relu": lambda q, k, v: (q @ k.mT).relu().softmax(-1) @ v,
    "assignment": lambda q, k, v: assigned(q @ k.mT).softmax(-1) @ v,
    "not over the keys": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "tanh after the mask": lambda q, k, v: (q @ k.mT + CAUSAL).tanh().softmax(-1) @ v,
    "a bias made of its own scores": lambda q, k, v: biased_by_itself(q @ k.mT).softmax(-1) @ v,
    "all hidden, by a finite number": lambda q, k, v: hidden_rows(q @ k.mT).softmax(-1) @ v,
    "a sum or": lambda q, k, v: torch.add(CAUSAL, q @ k.mT, alpha=0.5).softmax(-1) @ v,
    "a fill with 0": lambda q, k, v: (q @ k.mT).masked_fill(CAUSAL == 0, 0.0).softmax(-1) @ v,
    "cat": lambda q, k, v: torch.cat([q @ k.mT, torch.zeros(B, H, N, 1)], -1).softmax(-1)[..., :-1] @ v,
    "a product or quotient": lambda q, k, v: ((q @ k.mT).softmax(-1) * CAUSAL) @ v,
    "a sum or difference": lambda q, k, v: ((q @ k.mT).softmax(-1) + 1) @ v,
    "leading axes": lambda q, k, v: (q @ k[:1].mT).softmax(-1) @ v,
    "a tensor with itself": lambda q, k, v: torch.einsum("bhqd,bhkd->bhqk", q, q).softmax(-1) @ (v * k),
}


def assigned(scores):
    scores[..., 0] = 0
    return scores


def biased_by_itself(scores):
    return scores + scores.tanh()


def hidden_rows(scores):
    """The first two rows see no key: such a row weighs all keys alike and has no gradient."""
    return scores.masked_fill(torch.arange(N)[:, None] < 2, LOWEST)


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_is_not_understood_is_named_with_its_reason_and_left_alone(reason):
    calls, plain = [], run(UNKNOWN[reason])[0]
    watched, tap = run(UNKNOWN[reason], calls, replace=lambda q, *_, **__: q)
    assert calls == []
    assert list(tap.unseen) == ["inner"]
    assert reason in tap.unseen["inner"]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.parametrize("second", ["bhij,bhjd->bhid", "bhij,ijd->bhid"])
def test_probabilities_that_weigh_two_values_are_named_since_dq_is_that_of_both(second):
    relative = torch.randn(B, H, N, D) if "bhjd" in second else torch.randn(N, N, D)

    def attention(q, k, v):
        probs = (q @ k.mT).softmax(-1)
        return probs @ v + torch.einsum(second, probs, relative.to(probs.dtype))

    calls, plain = [], run(attention)[0]
    watched, tap = run(attention, calls)
    assert calls == []
    assert list(tap.unseen) == ["inner"]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_a_learned_scale_is_watched_but_not_replaced():
    scale, calls = torch.tensor(0.5, requires_grad=True), []

    def attention(q, k, v):
        return (q @ k.mT * scale).softmax(-1) @ v

    _, tap = run(attention, calls, attend_exactly)
    assert [call.backend for call in calls] == ["eager"]
    assert "scale is learned" in tap.unseen["inner"]


def test_products_that_are_no_attention_are_no_calls():
    def experts(q, k, v):
        hidden = F.gelu(torch.einsum("bhnd,bhed->bhne", q, k))
        return torch.einsum("bhne,bhed->bhnd", hidden, v) + (q @ k.mT @ v)

    calls = []
    _, tap = run(experts, calls)
    assert (calls, tap.unseen) == ([], {})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_multihead_attention_with_weights_is_seen_by_heads(masked, autocast):
    layer, calls = nn.MultiheadAttention(16, 4, dropout=0.25, batch_first=True), []
    mask = torch.zeros(N, N).masked_fill(CAUSAL == 0, -math.inf) if masked else None
    x = torch.randn(3, N, 16)
    with Tap(nn.Sequential(layer), calls.append), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(x, x, x, attn_mask=mask)[0].sum().backward()
    (call,) = calls
    assert (call.name, call.q.shape) == ("0", (3, 4, N, 4))
    assert call.q.dtype == (torch.bfloat16 if autocast else torch.float32)
    exact, _ = exact_attention(call.q, call.k, call.v, **exact_options(call.kwargs))
    assert (call.out - exact).norm() / exact.norm() < (2**-7 if autocast else 2e-6)


def test_a_softmax_of_a_product_without_a_record_is_named_whatever_its_module_is_called():
    def elementwise(q, k, v):
        return ((q @ k.mT).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)

    calls = []
    _, tap = run(elementwise, calls)
    assert calls == []
    assert "a softmax of a product ran and left no record" in tap.unseen["inner"]


def test_without_gradients_it_comes_when_the_tap_closes():
    calls = []
    with Tap(Block(nano_gpt), calls.append), torch.no_grad():
        nano_gpt(*torch.randn(3, B, H, N, D))
    assert [call.dq for call in calls] == [None]


def test_heads_of_multihead_attention_are_not_those_of_what_comes_after_it():
    layer, calls = nn.MultiheadAttention(16, 4, batch_first=True), []
    x = torch.randn(3, N, 16)
    with Tap(layer, calls.append):
        y = layer(x, x, x)[0]
        ((y @ y.mT).softmax(-1) @ y).sum().backward()
    assert sorted(tuple(call.q.shape) for call in calls) == [(3, 1, N, 16), (3, 4, N, 4)]


def test_an_empty_batch_is_no_call():
    calls = []
    with Tap(Block(nano_gpt), calls.append):
        x = torch.randn(0, H, N, D)
        assert ((x @ x.mT).softmax(-1) @ x).shape == x.shape
    assert calls == []
