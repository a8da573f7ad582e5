"""What must hold of a ring's results whatever the inputs: five identities, and blocks that arrive whole.

They cost O(n d) per rank and one gather. A mask that is wrong in both passes leaves them whole: that
takes exact rows (`parallel.rows`).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabilitykit.parallel.call import RingCall

IDENTITIES = ("row_mass", "key_sum", "value_sum", "query_key", "out_value", "transport")


class Damage(NamedTuple):
    """A block that did not arrive as it was sent: by whom, to whom (ranks of the ring), at which hop."""

    backward: bool
    hop: int  # 1 to N - 1
    sender: int
    receiver: int
    owner: int  # whose keys and values it held

    def among(self, members: tuple[int, ...]) -> dict[str, Any]:
        """In plain values, with the global ranks of the ring's `members`."""
        passed = "backward" if self.backward else "forward"
        ranks = {name: members[getattr(self, name)] for name in ("sender", "receiver", "owner")}
        return {"pass": passed, "hop": self.hop, **ranks}


def invariants(call: RingCall) -> dict[str, float]:
    """How far each identity is from holding over all ranks, >= 0, the same on every rank.

    With sums over the tokens of all ranks, norms of whole tensors, and T = scale times the norm over all
    rows of |q| |dO| |O|, the size of what cancels within dK's sum:

    - `row_mass`: max over rows of |sum over parts of exp(lse of part - lse) - 1|.
    - `key_sum`: ||sum dK|| / (||dK|| + T); 0, as each row of the scores' gradient sums to 0.
    - `value_sum`: ||sum dV - sum dO|| / (||dV|| + ||dO||), over rows that see a key.
    - `query_key`: max over key heads of |<dQ, Q> - <dK, K>| / (||dQ|| ||Q|| + ||dK|| ||K|| + T ||K||).
    - `out_value`: max over key heads of |<O, dO> - <dV, V>| / (||O|| ||dO|| + ||dV|| ||V||).
    - `transport`: hops at which a block did not arrive, bit for bit, as it was sent (`damages`).

    About the unit roundoff at work, or less, if all is well: what is divided by is the size of the terms
    that were added up, not of what they leave (dK of a row with all its weight on one key is nearly
    nothing but rounding). Without a backward only the first and the last. Every rank must call it.
    """
    every = call.ring.gather(torch.cat([_row_mass(call)[None], *_sums(call)]))
    found = {"row_mass": every[:, 0].max().item()}
    if call.dq is not None:
        found |= _identities(every[:, 1:].sum(0), call)
    return found | {"transport": float(len(damages(call)))}


def damages(call: RingCall) -> list[Damage]:
    """Every hop at which what arrived was not, bit for bit, what was sent; the same on every rank."""
    passes, world = (call.log.forward, call.log.backward), call.ring.world
    mine = [each.mark for rounds in passes for each in rounds]
    marks = call.ring.gather(torch.tensor(mine, device=call.q.device)).unflatten(1, (-1, world)).tolist()
    return [
        Damage(bool(which), hop, (rank - 1) % world, rank, (rank - hop) % world)
        for which in range(len(marks[0]))
        for hop in range(1, world)
        for rank in range(world)
        if marks[rank][which][hop] != marks[(rank - 1) % world][which][hop - 1]
    ]


def _row_mass(call: RingCall) -> Tensor:
    mass, lse = call.log.mass, call.lse.double()
    assert mass is not None, "a watched call notes it"
    off = (mass - lse).expm1().abs()
    # A row that neither knows keys for is right; NaN of a row with NaN in it stays.
    return off.masked_fill((lse == -math.inf) & (mass == -math.inf), 0).max()


def _sums(call: RingCall) -> list[Tensor]:
    """This rank's terms, float64 and flat: three sums over tokens, then thirteen products per key head."""
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
    row_sizes = torch.stack([x.norm(dim=-1) for x in (q, grad_out, out)]).prod(0)
    products.append(row_sizes.square().sum((2, 3)))
    products += [(a * b).sum((2, 3)) for a, b in ((dk, k), (dk, dk), (k, k), (dv, v), (dv, dv), (v, v))]
    return [x.flatten() for x in (*token_sums, *products)]


def _identities(summed: Tensor, call: RingCall) -> dict[str, float]:
    b, heads, d, d_v = *call.k.shape[:2], call.k.shape[3], call.v.shape[3]
    sizes = [b * heads * d, b * heads * d_v, b * heads * d_v] + [b * heads] * 13
    dk_sum, dv_sum, grad_sum, dq_q, dq2, q2, o_g, o2, g2, t2, dk_k, dk2, k2, dv_v, dv2, v2 = summed.split(
        sizes
    )
    t2 = t2 * call.options.scale**2
    return {
        "key_sum": _ratio(dk_sum.norm(), dk2.sum().sqrt() + t2.sum().sqrt()),
        "value_sum": _ratio((dv_sum - grad_sum).norm(), dv2.sum().sqrt() + g2.sum().sqrt()),
        "query_key": _ratio((dq_q - dk_k).abs(), (dq2 * q2).sqrt() + ((dk2.sqrt() + t2.sqrt()) * k2.sqrt())),
        "out_value": _ratio((o_g - dv_v).abs(), (o2 * g2).sqrt() + (dv2 * v2).sqrt()),
    }


def _ratio(off: Tensor, size: Tensor) -> float:
    """The largest off / size, with 0 / 0 = 0."""
    return (off / size).masked_fill(off == 0, 0).max().item()
