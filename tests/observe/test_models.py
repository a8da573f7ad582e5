"""Models as others wrote them, unedited: every attention call is seen by name, both ways, and measured."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flash_stand_in import flash_attn
from model_cases import BATCH, CASES, HEADS, LAYERS, NO_ATTENTION, OTHERS, TOKENS, VOCAB, WIDTH, tokens
from stabilitykit.numerics.exact import plain_attention
from stabilitykit.observe.attention import Sample, measured, unmeasurable
from stabilitykit.observe.exactly import attend_exactly, exact_options
from stabilitykit.observe.tap import Tap

# One operation in float32 is 6e-8 off, in bfloat16 .4 %; what is compared was rounded up to four times.
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 4 * 2**-8}


def run(model, loss):
    """Every call of one forward and backward, and what was said to be unseen."""
    calls = []
    with Tap(model, calls.append) as tap:
        loss(model).backward()
    return calls, tap.unseen


def assert_measured(call):
    """All heads, rows and sequences of a call, forward and backward, are as exact as its format allows."""
    got = {"grad_out": call.grad_out, "dq": call.dq, "dk": call.dk, "dv": call.dv}
    assert not [name for name, tensor in got.items() if tensor is None]
    assert unmeasurable(call) is None
    sequences, heads, rows = (list(range(size)) for size in call.q.shape[:3])
    numbers = measured(call, Sample(heads, rows, sequences, seed=0))
    for name in ("rel_l2", "dq_rel_l2", "dk_rel_l2", "dv_rel_l2"):
        assert numbers[name] < LIMIT[call.q.dtype], f"{call.name}: {name}"


def assert_watched(model, loss, names):
    calls, unseen = run(model, loss)
    assert sorted(call.name for call in calls) == names
    assert unseen == {}
    for call in calls:
        assert_measured(call)


ALL = [
    pytest.param(case, kernel, id=f"{name}, {kernel}")
    for name, case in CASES.items()
    for kernel in case.kernels
]


@pytest.mark.parametrize(("case", "kernel"), ALL)
def test_a_model_of_transformers(case, kernel):
    assert_watched(case.build(kernel), lambda model: model(**case.batch()).loss, case.attending())


@pytest.mark.parametrize("name", ["gpt2", "llama padded", "mistral", "bert padded", "t5", "vit", "whisper"])
def test_replacing_equals_calling_in_the_model(name, monkeypatch):
    model, batch = CASES[name].build("sdpa"), CASES[name].batch()
    parameters = [p for p in model.parameters() if p.requires_grad]

    def gradients():
        loss = model(**batch).loss
        return [loss, *torch.autograd.grad(loss, parameters, allow_unused=True)]

    def called(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        return attend_exactly(query, key, value, **options)

    with Tap(model, replace=attend_exactly):
        replaced = gradients()
    monkeypatch.setattr(F, "scaled_dot_product_attention", called)
    for a, b in zip(replaced, gradients(), strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_attention_of_another_kind_is_measured_right_or_named_as_unseen(case):
    calls, unseen = run(case.build("eager"), lambda model: model(**case.batch()).loss)
    watched = {call.name for call in calls}
    for call in calls:
        assert_measured(call)
    assert set(case.attending()) <= watched | unseen.keys()
    assert not watched & unseen.keys()
    assert all(unseen.values())


@pytest.mark.parametrize("case", NO_ATTENTION.values(), ids=NO_ATTENTION)
def test_a_model_without_attention_has_no_call_and_nothing_unseen(case):
    ids = tokens()
    assert run(case.build("eager"), lambda model: model(input_ids=ids, labels=ids).loss) == ([], {})


class Attends(nn.Module):
    """Attention over x [b, t, width], the part after the projection left to the heirs."""

    def __init__(self, kv_heads=HEADS, **options):
        super().__init__()
        self.width, self.options = WIDTH // HEADS, options
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * self.width)

    def forward(self, x, memory=None):
        q = self.q(x).unflatten(-1, (-1, self.width))
        k, v = self.kv(x if memory is None else memory).unflatten(-1, (2, -1, self.width)).unbind(-3)
        return x + self.attend(q, k, v).flatten(-2)  # without x the tokens grow alike, and dq is all roundoff


class ByHand(Attends):
    """As in the textbooks and in nanoGPT's slow branch."""

    def attend(self, q, k, v):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
        future = torch.ones(q.size(-2), k.size(-2)).triu(1).bool()
        probs = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        return (probs @ v).transpose(1, 2)


class ByEinsum(Attends):
    """Heads never leave their place, the scale is put on q, the mask is added."""

    def attend(self, q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q / math.sqrt(q.size(-1)), k)
        scores = scores + torch.full((q.size(1), k.size(1)), -torch.inf).triu(1)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


class ByBmm(Attends):
    """Batch and heads folded into one axis, scale inside baddbmm, as in older libraries."""

    def attend(self, q, k, v):
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
        bias = torch.zeros(len(q), q.size(1), k.size(1))
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.0, alpha=q.size(-1) ** -0.5)
        out = torch.bmm(torch.softmax(scores, -1), v)
        return out.unflatten(0, (-1, HEADS)).transpose(1, 2)


@pytest.mark.parametrize("attention", [ByHand, ByEinsum, ByBmm])
def test_attention_written_by_hand(attention):
    model = nn.Sequential(attention(), attention())
    x = torch.randn(BATCH, TOKENS, WIDTH)
    assert_watched(model, lambda model: model(x).square().sum(), ["0", "1"])


@pytest.mark.parametrize("name", ["pythia-14m", "Gemma-2-2b"])
def test_a_model_of_litgpt(name):
    gpt = pytest.importorskip("litgpt.model", reason="litgpt comes with `make setup`")
    size = {"n_layer": LAYERS, "n_embd": WIDTH, "intermediate_size": 48, "padded_vocab_size": VOCAB}
    config = gpt.Config.from_name(name, block_size=32, n_head=HEADS, **size)
    model = gpt.GPT(config)
    ids = tokens()
    assert_watched(
        model,
        lambda model: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        [f"transformer.h.{layer}.attn" for layer in range(LAYERS)],
    )


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights):
    class Weighed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)[0]

    x = torch.randn(BATCH, TOKENS, WIDTH)
    assert_watched(Weighed(), lambda model: model(x).square().sum(), ["attention"])


def test_transformer_encoder_layer():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    x, future = torch.randn(BATCH, TOKENS, WIDTH), nn.Transformer.generate_square_subsequent_mask(TOKENS)
    assert_watched(
        model,
        lambda model: model(x, mask=future).square().sum(),
        ["layers.0.self_attn", "layers.1.self_attn"],
    )


VARIABLE = torch.tensor([0, 3, TOKENS]).int()


def keys_of(k):
    """Two sequences' offsets too, the second of 8 keys."""
    return torch.tensor([0, len(k) - 8, len(k)]).int()


class Flash(Attends):
    """flash-attn's own functions, on [b, t, h, d]."""

    def attend(self, q, k, v):
        return flash_attn.flash_attn_func(q, k, v, **self.options)


class FlashPacked(Attends):
    def attend(self, q, k, v):
        return flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **self.options)


class FlashKeysPacked(Attends):
    def attend(self, q, k, v):
        return flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **self.options)


class FlashVariable(Attends):
    """Sequences of unlike lengths, one after the other in [tokens, h, d]."""

    def attend(self, q, k, v):
        return flash_attn.flash_attn_varlen_func(q, k, v, VARIABLE, keys_of(k), 8, 8, **self.options)


class Called(Attends):
    """The same module with the replacement written into it instead of flash-attn."""

    def attend(self, q, k, v):
        words = {"softmax_scale": "scale", "window_size": "window"}
        options = {
            "align": "bottom_right",
            **{words.get(name, name): self.options[name] for name in self.options},
        }
        packed = q.dim() == 3
        if packed:
            options |= {"cu_seqlens_q": VARIABLE, "cu_seqlens_k": keys_of(k)}
            q, k, v = (t[None] for t in (q, k, v))
        out = plain_attention(*(t.transpose(1, 2) for t in (q, k, v)), **options).transpose(1, 2)
        return out[0] if packed else out


ALIBI = torch.tensor([0.5, 0.25, 0.125, 0.0625])
FLASH = {
    "fixed": (Flash, {}, TOKENS),
    "fixed causal": (Flash, {"causal": True}, TOKENS),
    "fixed scaled": (Flash, {"softmax_scale": 0.7}, TOKENS),
    "fixed grouped": (Flash, {"kv_heads": 2, "causal": True}, TOKENS),
    "fixed more keys": (Flash, {"causal": True}, TOKENS + 5),
    "fixed fewer keys": (Flash, {"causal": True}, TOKENS - 5),
    "fixed window": (Flash, {"window_size": (3, 1)}, TOKENS + 2),
    "fixed causal window": (Flash, {"window_size": (3, 0), "causal": True}, TOKENS),
    "fixed softcap": (Flash, {"softcap": 0.5, "causal": True}, TOKENS),
    "fixed alibi": (Flash, {"alibi_slopes": ALIBI, "causal": True}, TOKENS),
    "qkv packed": (FlashPacked, {"causal": True}, TOKENS),
    "kv packed": (FlashKeysPacked, {"causal": True, "kv_heads": 2}, TOKENS + 5),
    "variable": (FlashVariable, {}, TOKENS),
    "variable causal grouped": (FlashVariable, {"causal": True, "kv_heads": 2}, TOKENS),
    "variable more keys": (FlashVariable, {"causal": True}, TOKENS + 5),
    "variable window": (FlashVariable, {"window_size": (2, 1)}, TOKENS + 2),
    "variable softcap": (FlashVariable, {"softcap": 0.5, "causal": True}, TOKENS),
    "variable alibi": (FlashVariable, {"alibi_slopes": ALIBI}, TOKENS + 5),
}


def flash_model(kind, options, keys, dtype):
    """Two layers over one memory, and their loss."""
    model = nn.ModuleList([kind(**options), kind(**options)]).to(dtype)
    batch = () if kind is FlashVariable else (BATCH,)
    x, memory = (torch.randn(*batch, n, WIDTH).to(dtype) for n in (TOKENS, keys))

    def loss(model):
        own = None if kind is FlashPacked else memory
        return model[1](model[0](x, own), own).float().square().sum()

    return model, loss


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(("kind", "options", "keys"), FLASH.values(), ids=FLASH)
def test_flash_attn_is_watched(kind, options, keys, dtype):
    model, loss = flash_model(kind, options, keys, dtype)
    assert_watched(model, loss, ["0", "1"])
    assert all(call.backend == "flash_attn" for call in run(model, loss)[0])


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(("kind", "options", "keys"), FLASH.values(), ids=FLASH)
def test_flash_attn_is_replaced(kind, options, keys, dtype):
    model, loss = flash_model(kind, options, keys, dtype)
    calls, parameters = [], list(model.parameters())

    def replace(q, k, v, **kwargs):
        return plain_attention(q, k, v, **exact_options(kwargs))

    with Tap(model, calls.append, replace):
        replaced = torch.autograd.grad(loss(model), parameters)
    for module in model:
        module.__class__ = Called  # same weights, same options
    called = torch.autograd.grad(loss(model), parameters)
    assert all(torch.equal(a, b) for a, b in zip(replaced, called, strict=True))
    assert [call.backend for call in calls] == ["replaced", "replaced"]
    for call in calls:
        assert_measured(call)
