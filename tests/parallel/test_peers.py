"""Other people's rings, on ours: an oracle that shares no line with it."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ranks import ranks
from ring_cases import beside_torchs
from stabilitykit.parallel.peers import found, lucidrains_ring, torch_ring


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.skipif(isinstance(torch_ring(), str), reason="this torch has no such ring")
def test_torchs_own_ring_agrees_forward_and_backward(world):
    for off in ranks(world).run(beside_torchs, n=24 * world):
        assert len(off) == 4 and max(off) < 1e-6


def test_a_peer_that_is_not_here_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ring_attention_pytorch.ring_flash_attention", None)
    assert "ring_attention_pytorch" in str(lucidrains_ring())
    assert "has no attribute 'nothing'" in str(found("math", "nothing"))


def test_lucidrains_gets_its_own_shape_and_striping(monkeypatch):
    seen = {}

    def attention(q, k, v, **options):
        seen.update(options, shape=q.shape)
        return v

    module = SimpleNamespace(ring_flash_attn=attention)
    monkeypatch.setitem(sys.modules, "ring_attention_pytorch", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ring_attention_pytorch.ring_flash_attention", module)
    ring = lucidrains_ring()
    assert not isinstance(ring, str)
    v = torch.randn(1, 2, 3, 4)
    (out,) = ring(v, v, v, None)
    assert torch.equal(out, v)
    assert seen == {"shape": (1, 3, 2, 4), "causal": True, "ring_reduce_col": True, "striped_ring_attn": True}
