"""What one rank of the ring's bench does; free of Lightning, so that many ranks start fast."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stabilitykit.parallel.call import watched
from stabilitykit.parallel.layout import LAYOUTS, Layout
from stabilitykit.parallel.memory import peak_bytes
from stabilitykit.parallel.peers import PEERS
from stabilitykit.parallel.ring import ring_attention

HEADS, HEAD_DIM, TILE = 4, 64, 1024  # one sequence in float32; the tile is ring_attention's own
REPEATS = 5  # of a watched call; the fastest counts, whatever else runs only adds
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


def watched_rounds(rank: int, world: int, tokens: int) -> dict[str, Any]:
    """On a rank, per layout and round: tiles computed, and CPU seconds of the fastest repeat."""
    q, k, v, _ = _drawn(rank, tokens // world)
    logs: dict[str, list[Any]] = {layout: [] for layout in LAYOUTS}
    for _ in range(REPEATS):
        for layout in LAYOUTS:
            with watched(lambda call, layout=layout: logs[layout].append(call.log.forward)):
                ring_attention(q, k, v, layout=layout, tile=TILE)
    return {
        layout: {
            "tiles": [this.tiles["full"] + this.tiles["partial"] for this in passes[0]],
            "seconds": [min(this.work_s for this in hop) for hop in zip(*passes, strict=True)],
        }
        for layout, passes in logs.items()
    }


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
