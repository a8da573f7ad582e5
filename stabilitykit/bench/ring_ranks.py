"""What one rank of the ring's bench does; free of Lightning, so that many ranks start fast."""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stabilitykit.parallel.call import watched
from stabilitykit.parallel.kernel import kernel_for
from stabilitykit.parallel.layout import LAYOUTS, Layout, runs
from stabilitykit.parallel.memory import peak_bytes
from stabilitykit.parallel.peers import PEERS
from stabilitykit.parallel.ring import merge_part, ring_attention
from stabilitykit.parallel.tiles import parts

HEADS, HEAD_DIM, TILE = 4, 64, 1024  # one sequence in float32; the tile is ring_attention's own
REPEATS = 3  # of a rank's rounds; the fastest counts, whatever else runs only adds
WAYS = ("forward", "forward_backward")


def measured(rank: int, world: int, tokens: int, rounds: int) -> tuple[Any, ...]:
    """On a rank: seconds by job and round, the agreement with torch's ring, memory, and peers not had."""
    q, k, v, grad_out = _drawn(rank, tokens // world)
    jobs = {f"{layout} {way}": _ours(layout, way, q, k, v, grad_out) for layout in LAYOUTS for way in WAYS}
    missing: dict[str, str] = {}
    agreement: list[float] = []
    for name, (layout, load) in PEERS.items():
        peer = load()
        if isinstance(peer, str):
            missing[name] = peer
            continue
        jobs[name] = partial(peer, q, k, v, None)
        if name == "torch_ring":
            ours = _ours(layout, "forward_backward", q, k, v, grad_out)()
            agreement = _apart(ours, peer(q, k, v, grad_out))
    times = _interleaved(jobs, rounds)
    peaks = {n * world: _peak(rank, n) for n in (tokens // world // part for part in (4, 2, 1))}
    return times, agreement, peaks, missing


def counted_rounds(rank: int, world: int, tokens: int) -> dict[str, list[int]]:
    """On a rank, per layout: tiles computed in each round of a real call."""
    q, k, v, _ = _drawn(rank, tokens // world)
    calls: list[Any] = []
    with watched(calls.append):
        for layout in LAYOUTS:
            ring_attention(q, k, v, layout=layout, tile=TILE)
    return {
        layout: [this.tiles["full"] + this.tiles["partial"] for this in call.log.forward]
        for layout, call in zip(LAYOUTS, calls, strict=True)
    }


def seconds_alone(_rank: int, _world: int, world: int, tokens: int) -> dict[str, list[list[float]]]:
    """Per layout CPU seconds of each round and rank, [round][rank], each timed with the machine to itself.

    Ranks that work at once share caches and cores, which an idle rank leaves to the others: their times
    would tell of the machine. The fastest of `REPEATS`.
    """
    q, k, v, _ = _drawn(0, tokens // world)
    found = {layout: [[math.inf] * world for _ in range(world)] for layout in LAYOUTS}
    for _ in range(REPEATS):
        for layout, rank in itertools.product(LAYOUTS, range(world)):
            out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -math.inf, dtype=torch.float64)
            for hop in range(world):
                seconds = _round_alone(layout, world, rank, hop, q, k, v, out, lse)
                found[layout][hop][rank] = min(found[layout][hop][rank], seconds)
    return found


def _round_alone(
    layout: Layout, world: int, rank: int, hop: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> float:
    """The work of one round as ring_attention does it: the same calls, the same merging."""
    kernel, scale = kernel_for(q, v, "fused", masked=False), HEAD_DIM**-0.5
    mine, theirs = (runs(world * q.shape[2], r % world, world, layout) for r in (rank, rank - hop))
    began = time.thread_time()
    how: dict[str, Any] = {"causal": True, "window": None, "tile": TILE, "granule": kernel.granule}
    for part in parts(mine, theirs, **how, counted=Counter()):
        at, keys = (slice(None), slice(None), part.rows), (slice(None), slice(None), part.keys)
        merge_part(out[at], lse[at], *kernel.forward(q[at], k[keys], v[keys], part, scale))
    return time.thread_time() - began


def _drawn(rank: int, n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randn(4, 1, HEADS, n, HEAD_DIM, generator=generator).unbind(0))


def _ours(
    layout: Layout, way: str, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor
) -> Callable[[], list[Tensor]]:
    leaves = [x.detach().requires_grad_(way == "forward_backward") for x in (q, k, v)]

    def run() -> list[Tensor]:
        out = ring_attention(*leaves, layout=layout, tile=TILE)
        return [out, *torch.autograd.grad(out, leaves, grad_out)] if out.requires_grad else [out]

    return run


def _interleaved(jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds from all ranks' start to the last one's end; each round the other way round."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds):
        for name in list(jobs)[:: -1 if turn % 2 else 1]:
            dist.barrier()
            started = time.perf_counter()
            jobs[name]()
            dist.barrier()
            times[name].append(time.perf_counter() - started)
    return times


def _peak(rank: int, n: int) -> int:
    return peak_bytes(_ours("striped", "forward_backward", *_drawn(rank, n)))


def _apart(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """Largest difference of out, dq, dk and dv over all ranks, relative to their largest entry."""
    pairs = zip(ours, theirs, strict=True)
    sizes = torch.stack([torch.stack([(a - b).abs().max(), b.abs().max()]) for a, b in pairs]).detach()
    dist.all_reduce(sizes, dist.ReduceOp.MAX)
    return (sizes[:, 0] / sizes[:, 1]).tolist()
