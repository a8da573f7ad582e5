"""Models as others wrote them, unedited: every attention call is seen by name, both ways, and measured."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model_cases import BATCH, CASES, HEADS, LAYERS, NO_ATTENTION, OTHERS, TOKENS, VOCAB, WIDTH, tokens
from stabilitykit.observe.attention import unmeasurable
from stabilitykit.observe.exactly import attend_exactly
from stabilitykit.observe.tap import Tap
from watching import Attends, assert_measured, assert_watched, run

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


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama padded", "bert padded", "gptj"])
def test_a_model_in_bfloat16(name, kernel):
    case = CASES[name]
    calls, unseen = run(case.build(kernel).bfloat16(), lambda model: model(**case.batch()).loss)
    assert (sorted(call.name for call in calls), unseen) == (case.attending(), {})
    for call in calls:
        if (name, kernel) == ("gptj", "eager"):  # it makes its q and k float32, not its v
            assert "bfloat16, float32" in unmeasurable(call)
        else:
            assert_measured(call)


@pytest.mark.parametrize("case", NO_ATTENTION.values(), ids=NO_ATTENTION)
def test_a_model_without_attention_has_no_call_and_nothing_unseen(case):
    ids = tokens()
    assert run(case.build("eager"), lambda model: model(input_ids=ids, labels=ids).loss) == ([], {})


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
