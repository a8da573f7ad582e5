"""The five identities and the checksum: small when all is well, large for each bug seen elsewhere."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import ranks
from ring_cases import corrupted, identities, whole
from stabilitykit.parallel.call import Merge, watched
from stabilitykit.parallel.invariants import damages, invariants
from stabilitykit.parallel.layout import LAYOUTS
from stabilitykit.parallel.ring import ring_attention
from stabilitykit.parallel.transport import Ring

NAMES = ["row_mass", "key_sum", "value_sum", "query_key", "out_value", "transport"]
BUGS = [
    "stale keys", "dk and dv mixed", "dk one block off", "dropped dv hop", "stale lse", "skipped hop",
    "diagonal in the forward",
]  # fmt: skip
BF16 = {"n": 128, "d": 16, "dtype": torch.bfloat16}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_is_well_to_the_last_digits(world, layout):
    draw = {"n": 24, "h_kv": 1, "b": 2}
    for found in ranks(world).run(identities, layout=layout, draw=draw, window=(9, 0)):
        assert list(found) == NAMES and found["transport"] == 0
        assert max(found.values()) < 1e-14


def test_all_ranks_hear_the_same_and_hidden_rows_do_no_harm():
    mask = [[False] * 10 + [True] * 14]
    found = ranks(4).run(identities, draw={"n": 24}, mask=mask)
    assert found[0] == found[1] == found[2] == found[3]
    assert max(found[0].values()) < 1e-14


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize(
    "healthy",
    [{"draw": BF16}, {"draw": BF16, "merge": Merge(partials=torch.bfloat16)}],
    ids=["float32", "bf16"],
)
def test_each_injected_bug_moves_one_a_hundredfold(bug, healthy):
    well = ranks(4).run(identities, **healthy)[0]
    ill = ranks(4).run(identities, bug=bug, **healthy)[0]
    ratios = {name: ill[name] / well[name] for name in NAMES[:-1] if well[name] > 0}
    assert max(ratios.values()) > 100, ratios


def test_a_mask_that_is_wrong_in_both_passes_is_seen_by_exact_rows_only():
    draw = {"n": 48}
    found = ranks(4).run(identities, bug="diagonal in both", draw=draw, seen=True)
    well = ranks(4).run(identities, draw=draw, seen=True)
    assert max(found[0][name] for name in NAMES) < 1e-14
    assert max(rank["out_off"] for rank in found) > 0.1 and max(rank["dq_off"] for rank in found) > 0.1
    assert max(rank[off] for rank in well for off in ("out_off", "dq_off")) < 1e-14


@pytest.mark.parametrize("hop", [1, 2])
def test_a_bit_that_flips_in_transit_is_seen(hop):
    found = ranks(3).run(corrupted, hop=hop)
    assert {rank["transport"] for rank in found} == {1.0}


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 9),
    h_kv=st.integers(1, 2),
    causal=st.booleans(),
    sd=st.floats(0.1, 3),
    seed=st.integers(0, 9),
)
def test_they_hold_for_any_input(n, h_kv, causal, sd, seed):
    q, k, v, grad = whole(n=n, h_kv=h_kv, sd=sd, seed=seed)
    found = []
    for x in (q, k, v):
        x.requires_grad_()
    with watched(lambda call: found.append(invariants(call))):
        torch.autograd.grad(ring_attention(q, k, v, causal=causal, tile=2), (q, k, v), grad)
    assert max(found[0].values()) < 1e-14


def test_watching_changes_no_bit_and_a_call_without_gradients_is_seen_too():
    q, k, v, _ = whole()
    plain, found = ring_attention(q, k, v), []
    with watched(found.append):
        assert torch.equal(ring_attention(q, k, v), plain)
    assert ring_attention(q, k, v) is not None and len(found) == 1
    assert list(invariants(found[0])) == ["row_mass", "transport"]
    assert torch.equal(found[0].out, plain) and found[0].dq is None


def test_a_saturated_head_in_which_gradients_are_all_rounding_is_well():
    """Softmax of two keys, nearly one-hot: dq and dk are nothing but what is left of far larger terms."""
    q, k, v, grad = whole(n=2, h_kv=2, sd=3.0, seed=1)
    found = []
    with watched(lambda call: found.append((invariants(call), call.dk.norm().item()))):
        torch.autograd.grad(ring_attention(*(x.requires_grad_() for x in (q, k, v))), (q, k, v), grad)
    ((told, size),) = found
    assert max(told.values()) < 1e-15 and size < 1e-3


def test_a_watcher_names_a_call_as_it_begins():
    q, k, v, grad = whole()
    places, found = ["first"], []
    with watched(lambda call: found.append(call.name), lambda: places[-1]):
        out = ring_attention(*(x.requires_grad_() for x in (q, k, v)))
        places.append("second")
        torch.autograd.grad(out, (q, k, v), grad)
    assert found == ["first"]


def flipped(rank, world, *, hop):
    """A case of tests/ranks.py: `damages` where rank 1's block of that hop leaves with a flipped bit."""
    sent, found, pass_on = [], [], Ring.pass_on

    def wrong(self, leaving, arriving):
        sent.append([x.clone() for x in leaving])
        if rank == 1 and len(sent) == hop:
            sent[-1][0].view(torch.int64).flatten()[3] ^= 1
        return pass_on(self, sent[-1], arriving)

    q, k, v, _ = whole(n=6, seed=rank)
    with watched(lambda call: found.append(damages(call))), mock.patch.object(Ring, "pass_on", wrong):
        ring_attention(q, k, v)
    return [tuple(damage) for damage in found[0]]


@pytest.mark.parametrize("hop", [1, 2])
def test_the_hop_at_which_a_block_was_damaged_is_named_on_all_ranks_alike(hop):
    # At hop 1 rank 1 sends its own block, at hop 2 what it got from rank 0.
    damage = (False, hop, 1, 2, 1 if hop == 1 else 0)
    assert ranks(3).run(flipped, hop=hop) == 3 * [[damage]]
