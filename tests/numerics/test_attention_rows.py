"""The statistics of attention rows, and the textbook baseline."""

import math
from unittest import mock

import pytest
import torch

from attention_oracle import assert_close, inputs, normal, oracle
from stabilitykit.numerics import scores
from stabilitykit.numerics.exact import attention_rows, exact_attention, exact_attention_grad, plain_attention

KEEP = torch.rand(1, 2, 7, 9, generator=torch.Generator().manual_seed(5)) > 0.4
KEEP[..., 3, :] = False
ADDED = torch.where(KEEP, normal(1, 2, 7, 9, seed=6), -math.inf)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"mask": ADDED[..., :7]},
        {"mask": KEEP[..., :7]},
        {"softcap": 0.5},
        {"alibi_slopes": torch.full((2,), 0.5)},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_largest_logit_and_entropy(options):
    q, k, v, _ = inputs(n=7)
    for rows in (scores._ROWS, 2):
        with mock.patch.object(scores, "_ROWS", rows):
            stats = attention_rows(q, k, v, **options)
        for head in range(2):
            # Attention over the identity gives the probabilities themselves.
            p = oracle(q, k, torch.eye(7).expand(1, 2, 7, 7), **options).out[0, head]
            p = torch.from_numpy(p.astype(float))
            raw = (q @ k.mT)[0, head] / 2
            assert stats.max_logit[0, head].item() == pytest.approx(raw[p > 0].max().item(), rel=1e-14)
            shares = [
                -(r[r > 0] * r[r > 0].log()).sum() / math.log((r > 0).sum())
                for r in p if (r > 0).sum() > 1
            ]  # fmt: skip
            assert stats.entropy[0, head].item() == pytest.approx(sum(shares).item() / len(shares), rel=1e-12)


def test_entropy_runs_from_one_key_to_all():
    zero = torch.zeros(1, 1, 6, 4)
    assert attention_rows(zero, zero, zero, causal=True).entropy.item() == pytest.approx(1.0)
    sharp = torch.eye(6)[None, None] * 100
    assert attention_rows(sharp, sharp, sharp).entropy.item() == pytest.approx(0.0, abs=1e-12)
    assert attention_rows(zero, zero, zero, window=(0, 0)).entropy.isnan().all()


def test_lowest_finite_masks_hide_keys_from_the_statistics():
    q, k, v, _ = inputs(n=7, m=9)
    lowest = torch.zeros(1, 2, 7, 9).masked_fill(~KEEP, torch.finfo(torch.float32).min)
    got, want = attention_rows(q, k, v, mask=lowest), attention_rows(q, k, v, mask=KEEP)
    assert_close(got.max_logit, want.max_logit)
    assert_close(got.entropy, want.entropy)


def test_plain_attention_rounds_every_step():
    q, k, v, _ = inputs(n=30, d=16, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.float16):
        got = plain_attention(q, k, v, causal=True)
    s = (q @ k.mT) * 0.25
    s = s.masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -math.inf)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.softmax(s, -1) @ v)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "align": "bottom_right", "window": (2, -1)},
        {"mask": KEEP, "softcap": 0.9},
        {"mask": ADDED, "alibi_slopes": torch.tensor([0.5, 0.2]), "dropout_mask": KEEP, "dropout_p": 0.5},
        {"rows": torch.tensor([3, 6, 0]), "heads": [1]},
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_plain_attention_in_float64_is_exact(options):
    q, k, v, g = (x.requires_grad_() for x in inputs(n=7, m=9))
    rows, heads = options.get("rows", torch.arange(7)), options.get("heads", [0, 1])
    g = g.detach()[:, heads][:, :, rows]
    out = plain_attention(q, k, v, **options)
    assert_close(out.detach(), exact_attention(q, k, v, **options)[0])
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
    want = exact_attention_grad(q, k, v, g, **options)
    for got, wanted in zip((dq[:, heads][:, :, rows], dk, dv), want, strict=True):
        assert_close(got, wanted)
