"""What must hold of a ring's results whatever the inputs: five identities, and the transport's checksums.

They cost O(n d) per rank and one gather. A mask that is wrong in both passes leaves them whole: that
takes exact rows (`parallel.rows`).
"""

import math

import torch
from torch import Tensor

from stabilitykit.parallel.call import RingCall, checksum


def invariants(call: RingCall) -> dict[str, float]:
    """How far each identity is from holding over all ranks, >= 0, the same on every rank.

    With sums over the tokens of all ranks and norms of whole tensors:

    - `row_mass`: max over rows of |sum over parts of exp(lse of part - lse) - 1|.
    - `key_sum`: ||sum dK|| / ||dK||; 0, as each row of the scores' gradient sums to 0.
    - `value_sum`: ||sum dV - sum dO|| / ||dO||, over rows that see a key.
    - `query_key`: max over key heads of |<dQ, Q> - <dK, K>| / (||dQ|| ||Q||).
    - `out_value`: max over key heads of |<O, dO> - <dV, V>| / (||O|| ||dO||).
    - `transport`: passes and ranks whose last block was not, bit for bit, its owner's.

    About the unit roundoff at work, or less, if all is well; without a backward only the first and the
    last. Every rank must call it.
    """
    ring = call.ring
    own = checksum(call.k, call.v)
    marks = ring.gather(torch.tensor([own, *call.log.carried], device=call.q.device))
    wrong = (marks[:, 1:] != marks.roll(-1, 0)[:, :1]).sum()
    every = ring.gather(torch.cat([_row_mass(call)[None], *_sums(call)]))
    found = {"row_mass": every[:, 0].max().item()}
    if call.dq is not None:
        found |= _identities(every[:, 1:].sum(0), call)
    return found | {"transport": float(wrong)}


def _row_mass(call: RingCall) -> Tensor:
    mass, lse = call.log.mass, call.lse.double()
    assert mass is not None, "a watched call notes it"
    off = (mass - lse).expm1().abs()
    # A row that neither knows keys for is right; NaN of a row with NaN in it stays.
    return off.masked_fill((lse == -math.inf) & (mass == -math.inf), 0).max()


def _sums(call: RingCall) -> list[Tensor]:
    """This rank's terms, float64 and flat: three sums over tokens, then six products per key head."""
    if call.grad_out is None or call.dq is None or call.dk is None or call.dv is None:
        return []
    groups = (call.k.shape[1], -1)
    seen = (call.lse > -math.inf).unsqueeze(-1)
    q, out, grad_out, dq = (
        x.double().unflatten(1, groups) for x in (call.q, call.out, call.grad_out * seen, call.dq)
    )
    k, v, dk, dv = (x.double() for x in (call.k, call.v, call.dk, call.dv))
    token_sums = dk.sum(2), dv.sum(2), grad_out.sum((2, 3))
    pairs = (dq, q), (dq, dq), (q, q), (out, grad_out), (out, out), (grad_out, grad_out)
    products = [(a * b).sum((2, 3, 4)) for a, b in pairs]
    products += [(a * b).sum((2, 3)) for a, b in ((dk, k), (dk, dk), (dv, v))]
    return [x.flatten() for x in (*token_sums, *products)]


def _identities(summed: Tensor, call: RingCall) -> dict[str, float]:
    b, heads, d, d_v = *call.k.shape[:2], call.k.shape[3], call.v.shape[3]
    sizes = [b * heads * d, b * heads * d_v, b * heads * d_v] + [b * heads] * 9
    dk, dv, grad_out, dq_q, dq_dq, q_q, o_g, o_o, g_g, dk_k, dk_dk, dv_v = summed.split(sizes)
    return {
        "key_sum": _ratio(dk.norm(), dk_dk.sum().sqrt()),
        "value_sum": _ratio((dv - grad_out).norm(), g_g.sum().sqrt()),
        "query_key": _ratio((dq_q - dk_k).abs(), (dq_dq * q_q).sqrt()),
        "out_value": _ratio((o_g - dv_v).abs(), (o_o * g_g).sqrt()),
    }


def _ratio(off: Tensor, size: Tensor) -> float:
    """The largest off / size, with 0 / 0 = 0."""
    return (off / size).masked_fill(off == 0, 0).max().item()
