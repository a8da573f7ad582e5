import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stabilitykit.gpt.model import GPT, GPTConfig, Linear, loss, rope_angles, rotated

TINY = {"vocab_size": 11, "context": 8, "layers": 2, "heads": 4, "width": 16}


def tiny(**changes) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **changes}))


SHAPES = [
    {},
    {"positions": "learned", "tied_head": False},
    {"kv_heads": 2, "qk_layernorm": True, "bias": False},
    {"kv_heads": 1, "mlp_ratio": 1},
]


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_token_sees_the_past_only(changes, bf16):
    model = tiny(**changes)
    tokens = torch.randint(11, (3, 8))
    later = tokens.clone()
    later[:, 5:] = (later[:, 5:] + 1) % 11
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        a, b = model(tokens), model(later)
    assert a.shape == (3, 8, 11)
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=0, atol=0)
    assert not torch.equal(a[:, 5:], b[:, 5:])


@pytest.mark.parametrize("changes", SHAPES)
def test_every_parameter_learns(changes):
    model = tiny(**changes)
    tokens = torch.randint(11, (4, 9))
    total, _ = loss(model(tokens[:, :-1]), tokens[:, 1:])
    total.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_equals_a_plain_decoder_written_out():
    model = tiny(kv_heads=2, qk_layernorm=True).double()
    for p in model.parameters():  # away from the init, where biases are 0
        nn.init.normal_(p, std=0.3)
    tokens = torch.randint(11, (2, 8))
    x = model.tokens.weight[tokens]
    for block in model.blocks:
        y = block.attention_norm(x)
        qkv = y @ block.attention.qkv.weight.T + block.attention.qkv.bias
        q, k, v = qkv[..., :16], qkv[..., 16:24], qkv[..., 24:]
        heads = []
        for h in range(4):
            at = slice(4 * h, 4 * h + 4)
            kv_at = slice(4 * (h // 2), 4 * (h // 2) + 4)
            qh = turned(block.attention.q_norm(q[..., at]))
            kh = turned(block.attention.k_norm(k[..., kv_at]))
            scores = qh @ kh.mT / math.sqrt(4)
            scores = scores.masked_fill(~torch.ones(8, 8).tril().bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v[..., kv_at])
        out = block.attention.out
        x = x + torch.cat(heads, -1) @ out.weight.T + out.bias
        y = block.mlp_norm(x) @ block.mlp.up.weight.T + block.mlp.up.bias
        y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
        x = x + y @ block.mlp.out.weight.T + block.mlp.out.bias
    expected = model.norm(x) @ model.tokens.weight.T
    # Rope's angles are float32 whatever the model, so no closer than that.
    torch.testing.assert_close(model(tokens), expected, rtol=1e-5, atol=1e-5)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rope by complex numbers: the vector (i, i + D/2) times e^(i * t * rate)."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-torch.arange(half).double() / half)
    turn = torch.exp(1j * torch.arange(x.shape[-2]).double()[:, None] * rate)
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), -1)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 11))
def test_rope_knows_distances_only(i, j, shift):
    torch.manual_seed(0)
    angles = rope_angles(torch.arange(32), 8)
    q, k = torch.randn(2, 1, 8).expand(2, 32, 8)
    q, k = rotated(q, angles), rotated(k, angles)
    torch.testing.assert_close(q[i] @ k[j], q[i + shift] @ k[j + shift], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(q.norm(dim=-1), q.norm(dim=-1)[:1].expand(32))


def test_init_is_gpt2s():
    model = GPT(GPTConfig(vocab_size=256, context=64, layers=8, heads=4, width=128))
    for block in model.blocks:
        assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for out in (block.attention.out, block.mlp.out):
            assert out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # sqrt(2 * 8) = 4
            assert not out.bias.any()
    assert model.head.weight is model.tokens.weight
    logits = model(torch.randint(256, (2, 64)))
    assert loss(logits, torch.randint(256, (2, 64)))[0].item() == pytest.approx(math.log(256), abs=0.2)


def test_built_on_meta_it_can_be_made_ready():
    with torch.device("meta"):
        model = GPT(GPTConfig(**TINY))
        assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 11)
    torch.manual_seed(0)
    ready = model.to_empty(device="cpu")
    for p in ready.parameters():  # to_empty leaves what lay in memory
        nn.init.constant_(p, math.nan)
    ready.reset_parameters()
    ordinary = tiny()
    ordinary.load_state_dict(ready.state_dict())
    tokens = torch.randint(11, (2, 8))
    assert torch.isfinite(ready(tokens)).all()
    assert torch.equal(ready(tokens), ordinary(tokens))


def test_dropout_acts_in_training_only():
    model = tiny(dropout=0.5)
    tokens = torch.randint(11, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("bias", [False, True])
def test_linear_under_autocast_rounds_where_a_bf16_kernel_does(bias):
    torch.manual_seed(0)
    ours, theirs = Linear(64, 32, bias=bias), nn.Linear(64, 32, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(16, 64)
    exact = F.linear(
        x.bfloat16().double(),
        ours.weight.bfloat16().double(),
        ours.bias.bfloat16().double() if bias else None,
    )
    with torch.autocast("cpu", torch.bfloat16):
        a, b = ours(x), theirs(x)
    assert a.dtype == b.dtype == torch.bfloat16
    # Both add up in float32 and round once: only where that error crosses a boundary do they differ.
    nearest = exact.bfloat16()
    assert (a == nearest).float().mean() > 0.99
    torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-6)
    a.float().square().sum().backward()
    b.float().square().sum().backward()
    assert ours.weight.grad is not None
    assert theirs.weight.grad is not None
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=2**-6, atol=0.05)
    assert torch.equal(ours(x), theirs(x))  # without autocast it is nn.Linear


def test_loss_by_hand():
    logits = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0]]])  # probabilities 1/2 and 3/4
    total, cross_entropy = loss(logits, torch.tensor([[0, 0]]), z_loss=0.1)
    expected = (math.log(2) + math.log(4 / 3)) / 2
    z = (math.log(2) ** 2 + math.log(4) ** 2) / 2
    assert cross_entropy.item() == pytest.approx(expected, rel=1e-6)
    assert total.item() == pytest.approx(expected + 0.1 * z, rel=1e-6)
    assert loss(logits, torch.tensor([[0, 0]]))[0].item() == pytest.approx(expected, rel=1e-6)


def test_loss_is_computed_in_float32():
    logits = torch.randn(2, 3, 5, dtype=torch.bfloat16)
    targets = torch.randint(5, (2, 3))
    total, _ = loss(logits, targets, z_loss=1e-4)
    assert total.dtype == torch.float32
    assert total.item() == loss(logits.float(), targets, z_loss=1e-4)[0].item()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "heads divide, got width 16, heads 3"),
        ({"kv_heads": 3}, "kv_heads that divide heads 4, got 3"),
        ({"kv_heads": 0}, "kv_heads that divide heads 4, got 0"),
        ({"heads": 16}, "even width per head for rope, got 1"),
        ({"layers": 0}, "layers >= 1, got 0"),
        ({"positions": "alibi"}, "'rope' or 'learned', got 'alibi'"),
        ({"dropout": 1.0}, r"dropout in \[0, 1\), got 1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**TINY, **changes})


def test_too_long_a_sequence_is_named():
    with pytest.raises(ValueError, match=r"at most 8 tokens \(the context\), got 9"):
        tiny()(torch.zeros(1, 9, dtype=torch.int64))
