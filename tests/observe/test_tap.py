import contextlib
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny
from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
from stabilitykit.observe.exactly import exact_options
from stabilitykit.observe.tap import ACROSS_RANKS, Tap
from stabilitykit.parallel.ring import ring_attention


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


def checkpointed(reentrant):
    """The tiny model whose attention is computed again in the backward, unless `reentrant` is None."""

    class Checkpointed(tiny.Attention):
        def forward(self, x):
            if reentrant is None:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = tiny.Model()
    model.blocks = nn.ModuleList(Checkpointed(16, 2, 0.1) for _ in range(2))
    return model


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_watching_changes_no_bit_and_checkpointing_hides_nothing(autocast, reentrant):
    model = checkpointed(reentrant)

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


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_forward_only_tap_hands_over_at_once_and_keeps_nothing(reentrant):
    model, names, alive = checkpointed(reentrant), [], []

    def look(call):
        assert call.dq is None
        names.append(call.name)
        alive.append(weakref.ref(call.q))

    with Tap(model, look, forward_only=True) as tap:
        loss = loss_of(model)
        assert names == ["blocks.0", "blocks.1"]
        assert [q() for q in alive] == [None, None]
        loss.backward()
    assert names == ["blocks.0", "blocks.1"]  # what is computed again is no other call
    assert tap.unseen == {}


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


class Extension(torch.autograd.Function):
    """Stands for a C++ extension: nothing of it is a torch function."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


class OpaqueAttention(nn.Module):
    def forward(self, x):
        return Extension.apply(x)


def test_attention_that_left_no_record_is_named():
    model = nn.Sequential(OpaqueAttention(), nn.Sequential(tiny.Attention(16, 2, 0.0)), nn.ReLU())
    tap = Tap(model)
    with tap:
        model(torch.randn(2, 4, 16)).sum().backward()
    assert list(tap.unseen) == ["0"]
    assert "OpaqueAttention ran and left no record" in tap.unseen["0"]


def test_an_attention_op_that_is_not_known_is_named():
    class Cross(nn.Module):
        def forward(self, q):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[0]

    model, calls = nn.Sequential(Cross()), []
    tap = Tap(model, calls.append)
    with tap:
        model(torch.randn(1, 2, 4, 8))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in tap.unseen["0"]
    assert calls == []


def test_what_dropout_kept_in_the_math_backend_is_known():
    model, calls = nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True), []
    x = torch.randn(2, 6, 16)
    with Tap(model, calls.append):
        model(x, x, x, need_weights=False)[0].sum().backward()
    (call,) = calls
    assert (call.backend, call.kwargs["dropout_p"]) == ("math", 0.3)
    options = exact_options(call.kwargs)
    exact = [exact_attention(call.q, call.k, call.v, **options)[0]]
    exact += exact_attention_grad(call.q, call.k, call.v, call.grad_out, **options)
    for seen, true in zip((call.out, call.dq, call.dk, call.dv), exact, strict=True):
        assert (seen - true).norm() / true.norm() < 2e-6


def test_a_tap_inside_a_tap_sees_the_same_and_neither_sees_the_other_measure():
    model = tiny.Model()

    def measure(seen):
        def on_call(call):
            seen.append(call)
            (call.q @ call.k.mT).softmax(-1) @ call.v

        return on_call

    def train(*taps):
        torch.manual_seed(5)
        model.zero_grad()
        with contextlib.ExitStack() as stack:
            for tap in taps:
                stack.enter_context(tap)
            loss_of(model).backward()
        return [p.grad.clone() for p in model.parameters()]

    outer, inner = [], []
    plain, watched = train(), train(Tap(model, measure(outer)), Tap(model, measure(inner)))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    names = [[call.name for call in calls] for calls in (outer, inner)]
    assert names == [["blocks.1", "blocks.0"]] * 2
    assert all(torch.equal(a.dq, b.dq) for a, b in zip(outer, inner, strict=True))


def test_a_module_moved_or_replaced_has_its_new_name_from_the_next_opening_on():
    model, calls = tiny.Model(), []
    tap = Tap(model, calls.append)
    with tap:
        loss_of(model).backward()
        model.blocks[0] = tiny.Attention(16, 2, 0.0)  # in mid-step: nameless, but not lost
        loss_of(model).backward()
    model.blocks.append(model.blocks[1])
    model.blocks[1] = tiny.Attention(16, 2, 0.0)
    with tap:
        loss_of(model).backward()
    first, second, third = calls[:2], calls[2:4], calls[4:]
    assert sorted(call.name for call in first) == ["blocks.0", "blocks.1"]
    assert sorted(call.name for call in second) == ["", "blocks.1#1"]
    assert sorted(call.name for call in third) == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize("kind", ["module", "in place"])
def test_a_hook_after_compilation_would_miss_what_the_tap_sees(kind):
    model, fired, calls = tiny.Model(dropout=0.0), [], []
    if kind == "module":
        net = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
        net = model
    loss_of(net)
    model.blocks[0].register_forward_hook(lambda *_: fired.append(1))
    loss_of(net)
    assert fired == []
    with Tap(net, calls.append):
        loss_of(net).backward()
    assert [call.name.removeprefix("_orig_mod.") for call in calls] == ["blocks.1", "blocks.0"]


def test_accumulation_names_the_passes_of_one_opening_apart():
    model, calls = tiny.Model(), []
    with Tap(model, calls.append):
        for index in range(3):
            (loss_of(model, index) / 3).backward()
    assert [call.name for call in calls[::2]] == ["blocks.1", "blocks.1#1", "blocks.1#2"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_shared_module_recomputed_keeps_the_names_of_its_first_pass(reentrant):
    block, calls = tiny.Attention(16, 2, 0.0), []
    model = nn.Sequential(block)
    x = torch.randn(2, 4, 16, requires_grad=True)
    with Tap(model, calls.append):
        y = checkpoint(model, x, use_reentrant=reentrant)
        checkpoint(model, y * 2, use_reentrant=reentrant).sum().backward()
    assert [call.name for call in calls] == ["0#1", "0"]
    first = block.qkv(x).view(2, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)[0]
    assert torch.equal(calls[1].q, first)


class Ringed(nn.Module):
    """Attention by tiles that travel a ring, here of one rank."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x):
        return ring_attention(x, x * 2, x, kernel=self.kernel, tile=4)


@pytest.mark.parametrize("kernel", ["fused", "exact"])
def test_attention_across_ranks_is_named_and_its_tiles_are_no_calls(kernel):
    model, calls = nn.Sequential(Ringed(kernel), tiny.Attention(8, 2, 0.0)), []
    x = torch.randn(2, 1, 12, 8, requires_grad=True)
    plain = torch.autograd.grad(model[0](x).sum(), x)[0]
    with Tap(model, calls.append) as tap:
        found = torch.autograd.grad(model[0](x).sum(), x)[0]
        model[1](x[:, 0]).sum().backward()
    assert tap.unseen == {"0": ACROSS_RANKS}
    assert [call.name for call in calls] == ["1"]
    assert torch.equal(plain, found)
