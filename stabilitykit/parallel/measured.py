"""How far one ring attention call is from exact attention, on a few rows of every rank."""

import random
from typing import Any

import torch
from torch import Tensor

from stabilitykit.numerics.deviation import deviation, perturb
from stabilitykit.parallel.call import RingCall
from stabilitykit.parallel.invariants import invariants
from stabilitykit.parallel.rows import exact_rows


def measured(call: RingCall, *, rows: int, seed: str) -> dict[str, Any]:
    """The `invariants` of one call and, per head of this rank under "heads", how far a few rows are off.

    Out and, after a backward, dq of `rows` of this rank's tokens, drawn by `seed` and rank, against
    `exact_rows`: `roundoff_ratio`, `rel_l2` and `nonfinite`, the same of dq with `grad_` before it
    (`numerics.deviation`). Every rank must call it, with the same arguments.
    """
    draw = random.Random(f"{seed}/{call.ring.rank}")
    tokens = call.q.shape[2]
    at = torch.tensor(sorted(draw.sample(range(tokens), min(rows, tokens))), device=call.q.device)
    noise = torch.Generator(call.q.device).manual_seed(draw.getrandbits(63))
    heads: list[dict[str, Any]] = [{"head": head} for head in range(call.q.shape[1])]
    for name, (fast, exact, moved) in _compared(call, at, noise).items():
        for head, row in enumerate(heads):
            off = deviation(fast[:, head], exact[:, head], None, moved[:, head], dtype=call.q.dtype)
            row |= {f"{name}{key}": off[key] for key in ("roundoff_ratio", "rel_l2")}
            row[f"{name}nonfinite"] = float(max(0, off["nonfinite_fast"] - off["nonfinite_exact"]))
    return {"dtype": str(call.q.dtype).removeprefix("torch."), **invariants(call), "heads": heads}


def _compared(call: RingCall, at: Tensor, noise: torch.Generator) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Of out and of dq: the call's rows, the exact ones, those of inputs moved by one roundoff.

    What is stored is moved too: out, from which the backward takes delta = rowsum(dO O), so that a change
    e of delta moves dq by -scale e (P k) (FlashAttention-2, arXiv 2307.08691, Alg. 2).
    """

    def stored(x: Tensor) -> Tensor:
        return perturb(x, call.q.dtype, noise)

    # P k comes with the exact out, as values beside v that no gradient reaches.
    both = call._replace(v=torch.cat([call.v, call.k], -1))
    moved = call._replace(q=stored(call.q), k=stored(call.k), v=stored(call.v))
    if call.grad_out is not None:
        both = both._replace(grad_out=torch.cat([call.grad_out, torch.zeros_like(call.q)], -1))
        moved = moved._replace(grad_out=stored(call.grad_out))
    exact, other = exact_rows(both, at), exact_rows(moved, at)
    out, seen_keys = exact.out.split([call.v.shape[3], call.k.shape[3]], -1)
    found = {"": (call.out[:, :, at], out, stored(other.out))}
    if call.grad_out is not None and call.dq is not None and exact.dq is not None and other.dq is not None:
        grad_out = call.grad_out[:, :, at].double()
        change = (grad_out * (stored(out) - out)).sum(-1, keepdim=True)
        dq = other.dq - call.options.scale * change * seen_keys
        found["grad_"] = (call.dq[:, :, at], exact.dq, stored(dq))
    return found
