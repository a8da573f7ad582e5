"""What a forward pass shows, against a plain loop, with grouped queries and with a mask."""

import pytest
import torch

from stabilitykit.observe import forward as forward_module
from stabilitykit.observe.calls import AttentionCall
from stabilitykit.observe.forward import ROWS, SEQUENCES, Forward, evenly, output_head

LAYERS = ["(module)", "blocks.0", "blocks.1"]
N, D = 40, 8
CAUSAL = torch.ones(N, N, dtype=torch.bool).tril()


def opened():
    blocks = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])
    return Forward(torch.nn.ModuleDict({"blocks": blocks}), LAYERS, None)


def call(name, *, masked=False, kv=2, scale=None, dtype=torch.float32):
    q, k, v = (torch.randn(9, heads, N, D, dtype=dtype) for heads in (4, kv, kv))
    kwargs = {
        "attn_mask": CAUSAL if masked else None,
        "dropout_p": 0.0,
        "is_causal": not masked,
        "scale": scale,
    }
    return AttentionCall(name, q, k, v, q, kwargs, "flash")


def plain(call):
    """Its largest logit and mean entropy by a loop over nothing but tensors."""
    rows, sequences = evenly(N, ROWS), list(range(0, 8, 2))
    assert len(sequences) == SEQUENCES
    k = call.k.repeat_interleave(4 // call.k.shape[1], 1).float()
    logits = call.q.float() @ k.mT * (call.kwargs["scale"] or D**-0.5)
    logits = logits.masked_fill(~CAUSAL, -torch.inf)[sequences][:, :, rows]
    p = logits.softmax(-1)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
    assert 0 not in rows  # a row with one key has no entropy
    share = entropy / torch.tensor([row + 1.0 for row in rows]).log()
    return logits.max().item(), share.mean().item()


def read(forward):
    cpu = torch.device("cpu")
    return forward.read(forward.sums(cpu).tolist(), forward.peaks(cpu).tolist())


def close_to(logit, entropy):
    return {"max_logit": pytest.approx(logit, rel=1e-5), "entropy": pytest.approx(entropy, rel=1e-4)}


@pytest.mark.parametrize("masked", [False, True])
def test_logits_and_entropy_are_those_of_a_plain_loop(masked):
    forward, one = opened(), call("blocks.0.attn#1", masked=masked)
    forward(one)
    forward.close()
    layers, whole = read(forward)
    assert layers == {"blocks.0": close_to(*plain(one))}
    assert whole == {}


@pytest.mark.parametrize("at_once", [1, 1 << 23])
def test_like_and_unlike_calls_are_not_mixed_up(monkeypatch, at_once):
    monkeypatch.setattr(forward_module, "AT_ONCE", at_once)
    first = [call("blocks.0.attn"), call("blocks.0.attn#1"), call("blocks.0.attn#2", masked=True)]
    second = [
        call("blocks.1.attn"),
        call("blocks.1.attn#1", scale=0.5),
        call("blocks.1.attn#2", kv=4),
        call("blocks.1.attn#3", dtype=torch.bfloat16),
    ]
    forward = opened()
    for one in [*first, *second[:-1]]:
        forward(one)
    forward.close()
    forward(second[-1])  # a tap may hand over in the backward
    layers, _ = read(forward)
    for name, calls in {"blocks.0": first, "blocks.1": second}.items():
        logits, entropies = zip(*map(plain, calls), strict=True)
        assert layers[name] == close_to(max(logits), min(entropies))


def test_the_output_head_is_the_last_matrix_with_a_row_per_token():
    embed = torch.nn.Embedding(50, 8)
    model = torch.nn.ModuleDict(
        {"embed": embed, "up": torch.nn.Linear(8, 32), "head": torch.nn.Linear(8, 50)}
    )
    assert output_head(model) == "head"
    assert output_head(torch.nn.ModuleDict({"embed": embed, "up": torch.nn.Linear(8, 32)})) is None


def test_layers_whose_output_has_no_usual_size_have_no_outlier():
    hidden = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    nested = torch.nested.as_nested_tensor(list(hidden), layout=torch.jagged)
    outputs = [hidden, torch.zeros(2, 6), hidden.relu() * (hidden > 1), hidden[0].to_sparse(), nested]
    blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in outputs)
    names = [f"blocks.{i}" for i in range(len(outputs))]
    forward = Forward(torch.nn.ModuleDict({"blocks": blocks}), names, None)
    for block, output in zip(blocks, outputs, strict=True):
        block(output)
    forward.close()
    layers, _ = read(forward)
    wanted = (hidden[0].abs().max() / hidden[0].abs().median()).item()
    assert layers == {"blocks.0": {"outlier": pytest.approx(wanted)}}
