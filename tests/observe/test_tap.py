import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny
from stabilitykit.observe.tap import Tap


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def loss_of(model, index=0):
    tokens, targets = tiny.batch(index)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def test_every_call_is_seen_with_its_module_and_gradients():
    model, calls = tiny.Model(layers=3), []
    with Tap(model, calls.append):
        loss_of(model).backward()
    assert [call.name for call in calls] == ["blocks.2", "blocks.1", "blocks.0"]
    for call in calls:
        assert call.q.shape == call.dq.shape == call.out.shape == call.grad_out.shape == (4, 2, 16, 8)
        assert call.backend == "flash"
        assert call.lse.shape == (4, 2, 16)
        assert call.kwargs["is_causal"]


def test_the_gradients_are_those_of_this_very_call():
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    calls = []
    with Tap(nn.Identity(), calls.append):
        out = F.scaled_dot_product_attention(q, k, v)
        (out.square().sum() + q.sum() * 100).backward()  # q is used elsewhere too
    call = calls[0]
    torch.testing.assert_close(call.grad_out, 2 * out.detach())
    torch.testing.assert_close(call.dq, q.grad - 100)
    torch.testing.assert_close(call.dk, k.grad)
    torch.testing.assert_close(call.dv, v.grad)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_watching_changes_no_bit_and_checkpointing_hides_nothing(autocast, reentrant):
    class Checkpointed(tiny.Attention):
        def forward(self, x):
            if reentrant is None:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = tiny.Model()
    model.blocks = nn.ModuleList(Checkpointed(16, 2, 0.1) for _ in range(2))

    def train(tap):
        torch.manual_seed(5)
        model.zero_grad()
        with tap:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model)
            loss.backward()
        return [loss.detach(), torch.rand(1), *(p.grad.clone() for p in model.parameters())]

    calls = []
    plain, watched = train(contextlib.nullcontext()), train(Tap(model, calls.append))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert sorted(call.name for call in calls) == ["blocks.0", "blocks.1"]
    assert all(call.dk is not None and call.grad_out is not None for call in calls)
    assert all(call.q.dtype == (torch.bfloat16 if autocast else torch.float32) for call in calls)


@pytest.mark.parametrize("backend", [torch.nn.attention.SDPBackend.MATH, None])
def test_one_tensor_as_key_and_value_keeps_its_gradient_bit_for_bit(backend):
    def train(tap):
        torch.manual_seed(3)
        x = torch.randn(2, 2, 9, 8, requires_grad=True)
        chosen = torch.nn.attention.sdpa_kernel(backend) if backend else contextlib.nullcontext()
        with tap, chosen:
            y = x * 1.1
            F.scaled_dot_product_attention(y, y, y).square().sum().backward()
        return x.grad

    calls = []
    assert torch.equal(train(contextlib.nullcontext()), train(Tap(nn.Identity(), calls.append)))
    assert calls[0].backend == ("math" if backend else "flash")


def test_multihead_attention_is_seen():
    model, calls = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), []
    with Tap(model, calls.append):
        model(torch.randn(2, 6, 16)).sum().backward()
    assert [call.name for call in calls] == ["self_attn"]
    assert calls[0].dv is not None


def test_a_call_without_backward_comes_when_the_tap_closes():
    model, calls = tiny.Model(), []
    with Tap(model, calls.append), torch.no_grad():
        loss_of(model)
        assert calls == []
    assert [call.name for call in calls] == ["blocks.0", "blocks.1"]
    assert calls[0].dq is None


def test_one_module_called_twice_gives_two_names():
    block, calls = tiny.Attention(16, 2, 0.0), []
    with Tap(nn.Sequential(block), calls.append):
        block(block(torch.randn(1, 4, 16))).sum().backward()
    assert sorted(call.name for call in calls) == ["0", "0#1"]


def test_on_call_runs_without_gradients_and_autocast():
    model, seen = tiny.Model(), []
    with Tap(model, lambda call: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))):
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model).backward()
    assert seen == [(False, False)] * 2


def test_replacing_attention_equals_calling_the_replacement_in_the_model():
    model = tiny.Model()

    def doubled(q, k, v, **kwargs):
        return 2 * F.scaled_dot_product_attention(q, k, v, **kwargs)

    torch.manual_seed(1)
    with Tap(model, replace=doubled):
        replaced = gradients(loss_of(model), model)
    original, F.scaled_dot_product_attention = F.scaled_dot_product_attention, None
    try:
        F.scaled_dot_product_attention = lambda *a, **k: 2 * original(*a, **k)
        torch.manual_seed(1)
        called = gradients(loss_of(model), model)
    finally:
        F.scaled_dot_product_attention = original
    assert all(torch.equal(a, b) for a, b in zip(replaced, called, strict=True))


def test_the_users_error_is_the_users_and_nothing_stays_behind():
    class Broken(tiny.Attention):
        def forward(self, x):
            super().forward(x)
            raise RuntimeError("mine")

    model, calls = nn.Sequential(Broken(16, 2, 0.0)), []
    with pytest.raises(RuntimeError, match="mine"), Tap(model, calls.append):
        model(torch.randn(1, 4, 16))
    F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 4))
    assert calls == []
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())


def test_a_compiled_model_is_seen_without_recompiling():
    model, calls = tiny.Model(dropout=0.0), []
    compiled = torch.compile(model, backend="eager")
    plain = loss_of(compiled).item()
    with Tap(model, calls.append):
        loss_of(compiled).backward()
    assert len(calls) == 2
    assert loss_of(compiled).item() == plain


def test_a_second_backward_through_a_kept_graph_is_not_a_second_call():
    model, calls = tiny.Model(), []
    with Tap(model, calls.append):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
    assert len(calls) == 2


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
def test_grouped_queries_keep_their_key_heads(heads):
    q = torch.randn(1, heads[0], 5, 8, requires_grad=True)
    k, v = (torch.randn(1, heads[1], 5, 8, requires_grad=True) for _ in range(2))
    calls = []
    with Tap(nn.Identity(), calls.append):
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()
    assert calls[0].k.shape == calls[0].dk.shape == k.shape
    torch.testing.assert_close(calls[0].dk, k.grad)
