"""What a forward pass shows, against a plain loop, with grouped queries and with a mask."""

import pytest
import torch

from stabilitykit.observe.calls import AttentionCall
from stabilitykit.observe.forward import ROWS, SEQUENCES, Forward, evenly, output_head

LAYERS = ["(module)", "blocks.0"]


@pytest.mark.parametrize("masked", [False, True])
def test_logits_and_entropy_are_those_of_a_plain_loop(masked):
    b, h, kv, n, d = 9, 4, 2, 40, 8
    q, k, v = torch.randn(b, h, n, d), torch.randn(b, kv, n, d), torch.randn(b, kv, n, d)
    mask = torch.ones(n, n, dtype=torch.bool).tril()
    kwargs = {"attn_mask": mask if masked else None, "dropout_p": 0.0, "is_causal": not masked, "scale": None}
    forward = Forward(
        torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Identity()])}), LAYERS, None
    )
    forward(AttentionCall("blocks.0.attn#1", q, k, v, q, kwargs, "flash"))
    rows, sequences = evenly(n, ROWS), list(range(0, 8, 2))
    assert len(sequences) == SEQUENCES
    logits = (q @ k.repeat_interleave(2, 1).mT / d**0.5).masked_fill(~mask, -torch.inf)[sequences][:, :, rows]
    p = logits.softmax(-1)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
    assert 0 not in rows  # a row with one key has no entropy
    share = entropy / torch.tensor([row + 1.0 for row in rows]).log()
    cpu = torch.device("cpu")
    layers, whole = forward.read(forward.sums(cpu).tolist(), forward.peaks(cpu).tolist())
    found = layers["blocks.0"]
    assert found["max_logit"] == pytest.approx(logits.max().item(), rel=1e-5)
    assert found["entropy"] == pytest.approx(share.mean().item(), rel=1e-4)
    assert whole == {}


def test_the_output_head_is_the_last_matrix_with_a_row_per_token():
    embed = torch.nn.Embedding(50, 8)
    model = torch.nn.ModuleDict(
        {"embed": embed, "up": torch.nn.Linear(8, 32), "head": torch.nn.Linear(8, 50)}
    )
    assert output_head(model) == "head"
    assert output_head(torch.nn.ModuleDict({"embed": embed, "up": torch.nn.Linear(8, 32)})) is None
