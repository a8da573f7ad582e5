"""FlexAttention's forward (torch has no backward for it on a CPU): its mods become options, or are named."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from stabilitykit.numerics.exact import exact_attention
from stabilitykit.observe.exactly import attend_exactly, exact_options
from stabilitykit.observe.tap import Tap

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
B, H, N, M, D = 2, 4, 6, 9, 8
SLOPES = torch.linspace(0.1, 0.4, H)


def causal(b, h, i, j):
    return i >= j


def ragged(b, h, i, j):
    return j < 5 + 2 * b + h


def alibi(score, b, h, i, j):
    return score - SLOPES[h] * (i - j).abs()


def hidden(score, b, h, i, j):
    return torch.where(i + 2 >= j, score, -torch.inf)


def softcap(score, b, h, i, j):
    return 5 * torch.tanh(score / 5)


def run(tap, score_mod=None, mask_mod=None, wide=(), heads=H):
    torch.manual_seed(2)
    q, k, v = torch.randn(B, H, N, D), torch.randn(B, heads, M, D), torch.randn(B, heads, M, D)
    blocks = create_block_mask(mask_mod, *(wide or (None, None)), N, M, device="cpu") if mask_mod else None
    with tap, torch.no_grad():
        return flex_attention(q, k, v, score_mod, blocks, scale=0.3, enable_gqa=heads != H, return_lse=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_mod": causal},
        {"mask_mod": ragged, "wide": (B, H)},
        {"score_mod": alibi},
        {"score_mod": hidden, "mask_mod": ragged, "wide": (B, H)},
        {"mask_mod": causal, "heads": 2},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_it_is_seen_with_its_masks_and_biases(options):
    calls = []
    tap = Tap(nn.Identity(), calls.append)
    watched = run(tap, **options)
    (call,) = calls
    assert (call.backend, tap.unseen) == ("flex", {})
    out, lse = exact_attention(call.q, call.k, call.v, **exact_options(call.kwargs))
    torch.testing.assert_close(call.out.double(), out, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(call.lse.double(), lse, rtol=2e-6, atol=2e-6)
    plain = run(torch.no_grad(), **options)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    replaced, _ = run(Tap(nn.Identity(), replace=attend_exactly), **options)
    assert torch.equal(replaced, out.float())


@pytest.mark.filterwarnings("ignore:return_lse is deprecated")
def test_a_mod_that_does_more_than_add_is_named():
    calls = []
    tap = Tap(nn.Identity(), calls.append, replace=attend_exactly)
    watched = run(tap, score_mod=softcap)
    assert calls == []
    assert "score_mod that does not add" in tap.unseen[""]
    assert torch.equal(watched[0], run(torch.no_grad(), score_mod=softcap)[0])


def test_without_a_mask_the_options_are_sdpas_five():
    calls = []
    with Tap(nn.Identity(), calls.append), torch.no_grad():
        flex_attention(*torch.randn(3, B, H, N, D))
    assert calls[0].kwargs == {
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": pytest.approx(D**-0.5),
        "enable_gqa": False,
    }
