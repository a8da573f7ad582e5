"""Attention arms: each name is the attention it says, and is 0 where it is the run's own."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tiny
from stabilitykit.numerics.emulated import emulated_attention
from stabilitykit.numerics.exact import exact_attention, plain_attention
from stabilitykit.observe.replacement import replacement
from stabilitykit.observe.twin import Twin

KWARGS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": None, "enable_gqa": False}


def qkv(dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 2, 16, 8, generator=draw).to(dtype).unbind(0)


def math_sdpa(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ORACLES = {
    "exact": lambda q, k, v: exact_attention(q, k, v, causal=True)[0].to(q.dtype),
    "plain": lambda q, k, v: plain_attention(q, k, v, causal=True),
    "flash": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "math": math_sdpa,
    "emulated": lambda q, k, v: emulated_attention(q, k, v, causal=True),
    "emulated(state_dtype=bfloat16,tile_k=4,variant=fa1)": lambda q, k, v: emulated_attention(
        q, k, v, causal=True, state_dtype=torch.bfloat16, tile_k=4, variant="fa1"
    ),
    "emulated(score_dtype=4)": lambda q, k, v: emulated_attention(q, k, v, causal=True, score_dtype=4),
    "torch.nn.functional:scaled_dot_product_attention": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True
    ),
}


@pytest.mark.parametrize("text", ORACLES)
def test_each_name_is_the_attention_it_says_forward_and_backward(text):
    results = []
    for attention in (lambda q, k, v: replacement(text)(q, k, v, **KWARGS), ORACLES[text]):
        leaves = [x.clone().requires_grad_() for x in qkv()]
        out = attention(*leaves)
        if text == "exact":  # its gradients are exact_attention_grad's, tested where it is
            results.append([out.detach()])
        else:
            results.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][0].dtype == torch.bfloat16


def apart(module, text, steps=3, precision=None):
    """Largest distance of a twin from one that is the same, after some steps."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    twins = [Twin(module, [optimizer], arm) for arm in ("same", text)]
    for index in range(steps):
        tokens, targets = tiny.batch(index, size=2)
        with torch.autocast("cpu", dtype=precision or torch.bfloat16, enabled=precision is not None):
            for twin in twins:
                twin.forward_backward(
                    lambda t=tokens, y=targets: F.cross_entropy(module(t).flatten(0, 1), y.flatten())
                )
        for twin in twins:
            twin.step()
    same, own = (twin.pairs()[1] for twin in twins)
    return max(float((own[name] - same[name]).abs().max()) for name in same)


@pytest.mark.parametrize(
    "text",
    [
        "exact_attention",
        "attention=math",
        "attention=plain",
        "attention=emulated(state_dtype=bfloat16,tile_k=4)",
    ],
)
def test_another_attention_has_an_effect(text):
    torch.manual_seed(0)
    assert apart(tiny.Model(), text, precision=torch.bfloat16) > 0


def own_kernel(q, k, v, **kwargs):
    return F.scaled_dot_product_attention(q, k, v, **kwargs)


@pytest.mark.parametrize("text", ["attention=flash", "attention=mine:own_kernel"])
def test_the_runs_own_attention_has_none(text, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(own_kernel=own_kernel))
    torch.manual_seed(0)
    assert apart(tiny.Model(), text) == 0


class Checkpointed(tiny.Model):
    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_what_is_recomputed_in_the_backward_is_replaced_too():
    torch.manual_seed(0)
    assert apart(Checkpointed(dropout=0.0), "attention=flash") == 0
    assert apart(Checkpointed(dropout=0.0), "exact_attention") > 0


def test_dropout_in_the_kernel_is_that_of_the_run():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(16, 8))

        def forward(self, tokens):
            q = self.w[None, None].expand(1, 2, 16, 8)
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    module = Drops().double()
    twins = [Twin(module, [], text) for text in ("same", "attention=emulated(tile_k=4)", "exact_attention")]
    losses = [twin.forward_backward(lambda: module(None).square().sum()).item() for twin in twins]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)


def test_no_attention_is_said_and_the_module_is_whole():
    module = nn.Linear(2, 2)
    twin = Twin(module, [], "lr_hold+exact_attention".removeprefix("lr_hold+"))
    weight = module.weight
    with pytest.raises(
        ValueError, match="arm 'exact_attention': expected attention that it can replace, saw none"
    ):
        twin.forward_backward(lambda: module(torch.ones(1, 2)).sum())
    assert module.weight is weight


def test_attention_that_is_not_understood_is_told_with_its_module():
    class ByHand(nn.Module):
        """Attention whose softmax does not sum over keys alone: the tap names it and leaves it."""

        def forward(self, x):
            scores = (x @ x.transpose(-1, -2)).softmax(-1).sqrt()
            return scores @ x

    class Both(tiny.Model):
        def __init__(self):
            super().__init__(layers=1)
            self.strange_attention = ByHand()

        def forward(self, tokens):
            return self.head(self.blocks[0](self.strange_attention(self.embed(tokens))))

    module = Both()
    twin = Twin(module, [], "exact_attention")
    twin.forward_backward(lambda: module(tiny.batch(0)[0]).sum())
    assert set(twin.unreplaced) <= {"strange_attention"}


def raises(q, k, v, **kwargs):
    raise KeyError("mine")


def short(q, k, v, **kwargs):
    return q[:, :, :1]


def no_options(q, k, v):
    return v


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (raises, "it raised KeyError\\('mine'\\)"),
        (short, r"to return a tensor \(2, 2, 16, 8\), got \(2, 2, 1, 8\)"),
        (no_options, "with attn_mask, dropout_p, is_causal, .*unexpected keyword"),
    ],
)
def test_a_users_function_that_fails_is_one_line(function, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(function=function))
    with pytest.raises(ValueError, match=words):
        replacement("mine:function")(*qkv(), **KWARGS)


def test_a_kernel_that_this_device_lacks_is_said():
    with pytest.raises(
        ValueError, match="attention=cudnn: expected a kernel that can do torch.bfloat16 .* on cpu"
    ):
        replacement("cudnn")(*qkv(), **KWARGS)
    with pytest.raises(
        ValueError, match=r"attention=flash: expected attention that torch's SDPA can do, got \['softcap'\]"
    ):
        replacement("flash")(*qkv(), **KWARGS, softcap=30.0)
