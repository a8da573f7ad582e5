"""Exact attention of a few rows over the keys of all ranks: the reference of a sharded run."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from stabilitykit.parallel.call import RingCall
from stabilitykit.parallel.kernel import kernel_for
from stabilitykit.parallel.layout import positions
from stabilitykit.parallel.ring import merge_part
from stabilitykit.parallel.tiles import Part


class ExactRows(NamedTuple):
    """Float64 out [b, h, rows, d], lse [b, h, rows] and, if the call had a backward, dq [b, h, rows, d]."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None


def exact_rows(call: RingCall, rows: Tensor) -> ExactRows:
    """The exact results of this rank's tokens `rows`, int64 indices into its n, in their order.

    Every rank must call it, each with rows of its own choice, even none. The keys travel round the ring
    once for out, and once more for dq; what a row sees is told by its position and its document alone.
    """
    kernel = kernel_for(call.q, call.v, "exact", masked=True)
    q, scale = call.q[:, :, rows].double(), call.options.scale
    out = q.new_zeros((*q.shape[:3], call.v.shape[3]))
    lse = q.new_full(q.shape[:3], -math.inf)
    for k, v, part in _blocks(call, rows):
        merge_part(out, lse, *kernel.forward(q, k, v, part, scale))
    if call.grad_out is None:
        return ExactRows(out, lse, None)
    grad_out, finite = call.grad_out[:, :, rows].double(), lse.masked_fill(lse == -math.inf, 0)
    dq = torch.zeros_like(q)
    for k, v, part in _blocks(call, rows):
        dq += kernel.backward(grad_out, q, k, v, out, finite, part, scale)[0]
    return ExactRows(out, lse, dq)


def _blocks(call: RingCall, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Part]]:
    """Every rank's keys and values in float64, and what the rows see of them."""
    ring, n = call.ring, call.k.shape[2]
    at = [positions(ring.world * n, rank, ring.world, call.options.layout) for rank in range(ring.world)]
    mine = at[ring.rank].to(rows.device)[rows].to(call.q.device)
    for owner, (k, v, *labels) in ring.blocks([call.k, call.v, *call.labels[1:]]):
        seen = _visible(call, mine[:, None], at[owner].to(mine.device))
        for of_keys in labels:
            seen = seen & (call.labels[0][:, None, rows, None] == of_keys[:, None, None])
        yield k.double(), v.double(), Part(slice(0, len(rows)), slice(0, n), mask=seen)


def _visible(call: RingCall, row: Tensor, key: Tensor) -> Tensor:
    """bool [rows, keys] by global position."""
    left, right = call.options.window or (-1, -1)
    seen = torch.ones_like(row + key, dtype=torch.bool)
    if call.options.causal:
        seen &= key <= row
    if left >= 0:
        seen &= key >= row - left
    if right >= 0:
        seen &= key <= row + right
    return seen
