"""The shadow step: a compiled model is watched beside its run, which stays the same bit for bit."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from stabilitykit.numerics.exact import exact_attention
from stabilitykit.observe.exactly import exact_options
from stabilitykit.observe.shadow import is_compiled, shadow
from stabilitykit.observe.tap import Tap


class Stateful(nn.Module):
    """A model with all the state that a pass can touch: dropout, running means, attributes, hooks."""

    def __init__(self):
        super().__init__()
        self.model = tiny.Model(dropout=0.2)
        self.norm = nn.BatchNorm1d(tiny.VOCAB)
        self.losses, self.calls = [], 0
        self.register_buffer("seen", torch.zeros(()))
        self.hooked = []
        self.norm.weight.register_hook(lambda grad: self.hooked.append(1))

    def forward(self, tokens):
        self.seen += 1
        return self.norm(self.model(tokens).flatten(0, 1))


def loss_of(net, module, index):
    tokens, targets = tiny.batch(index)
    loss = F.cross_entropy(net(tokens), targets.flatten())
    module.losses.append(loss.item())
    module.calls += 1
    return loss


def trained(backend, watched):
    """The losses, state and random stream of four steps, and what the shadow saw."""
    torch.manual_seed(4)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = Stateful()
    net = torch.compile(module, backend=backend) if backend else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    calls, compiled = [], []
    for step in range(4):
        if watched and step in (0, 2):
            shadow(module, lambda index=step: loss_of(net, module, index), calls.append)
        with torch.autocast("cpu", torch.bfloat16, enabled=step > 1):
            loss = loss_of(net, module, step)
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    state = [*module.state_dict().values(), torch.tensor(module.losses), torch.rand(1)]
    state += [torch.tensor([module.calls, len(module.hooked)])]
    return state, calls, compiled


BACKENDS = [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # inductor's own import
def test_the_run_beside_it_keeps_every_bit_and_its_compiled_code(backend):
    plain, _, compiled = trained(backend, watched=False)
    watched, calls, compiled_beside = trained(backend, watched=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert compiled == compiled_beside
    assert [call.name.split(".")[-1] for call in calls] == ["1", "0"] * 2
    assert all(call.dq is not None and call.grad_out is not None for call in calls)
    for call in calls:
        exact, _ = exact_attention(call.q, call.k, call.v, **exact_options(call.kwargs))
        assert (call.out - exact).norm() / exact.norm() < 2e-6


def test_a_shadow_inside_autocast_leaves_its_cache_alone():
    def gradient(watched):
        torch.manual_seed(0)
        layer = nn.Sequential(tiny.Attention(16, 2, 0.0))
        x = torch.randn(2, 5, 16)
        with torch.autocast("cpu", torch.bfloat16):
            first = layer(x).sum()
            if watched:
                shadow(layer, lambda: layer(x).sum(), lambda call: None)
            (first + layer(x + 1).sum()).backward()
        assert torch.is_autocast_cache_enabled()
        return layer[0].qkv.weight.grad

    assert torch.equal(gradient(False), gradient(True))


def test_an_error_in_the_loss_is_the_users_and_nothing_stays_behind():
    module = Stateful()
    before, stream = copy.deepcopy(module.state_dict()), torch.get_rng_state()

    def loss():
        loss_of(module, module, 0)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        shadow(module, loss, lambda call: None)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(stream, torch.get_rng_state())
    assert (module.losses, module.calls) == ([], 0)
    assert torch.is_autocast_cache_enabled()


def test_a_tap_that_is_open_does_not_see_the_shadow():
    module, outer, inner = Stateful(), [], []
    with Tap(module, outer.append):
        unseen = shadow(module, lambda: loss_of(module, module, 0), inner.append)
    assert (len(outer), len(inner), unseen) == (0, 2, {})


def test_a_frozen_model_is_seen_forward_only():
    module, calls = Stateful().requires_grad_(False), []
    shadow(module, lambda: loss_of(module, module, 0), calls.append)
    assert [call.dq for call in calls] == [None, None]


class Method(nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x):
        return x


def test_compiled_modules_are_told_from_plain_ones():
    assert not is_compiled(Stateful())
    assert is_compiled(torch.compile(tiny.Model(), backend="eager"))
    child = Stateful()
    child.model = torch.compile(child.model, backend="eager")
    assert is_compiled(child)
    in_place = Stateful()
    in_place.model.blocks[1].compile(backend="eager")
    assert is_compiled(in_place)
    method = Stateful()
    method.step = torch.compile(method.forward, backend="eager")
    assert is_compiled(method)
    assert is_compiled(nn.Sequential(Method()))


def test_asking_imports_no_compiler(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch._dynamo")]:
        monkeypatch.delitem(sys.modules, name)
    assert not is_compiled(nn.Linear(1, 1))
    assert "torch._dynamo" not in sys.modules
