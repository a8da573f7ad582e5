"""What the ranks of the study of the ring compute, and how far it is from exact attention in one process."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
from stabilitykit.parallel.balance import balance_of, work
from stabilitykit.parallel.call import Merge, watched
from stabilitykit.parallel.launch import on_ranks
from stabilitykit.parallel.layout import LAYOUTS, Layout, pad, shard, unshard
from stabilitykit.parallel.peers import PEERS
from stabilitykit.parallel.ring import ring_attention

Row = dict[str, Any]

WORLDS = (1, 2, 3, 4, 8)
TOKENS, HEADS, HEAD_DIM, TILE = 1024, 2, 64, 1024  # a tile for a whole block: one merge per hop
COUNTED = {"scores": (48, 1), "tiles": (960, 32)}  # tokens and tile: 2 * each world divides them
TENSORS = ("out", "dq", "dk", "dv")
EPS = 2.0**-8  # of bfloat16
_16 = torch.bfloat16
MERGES = {
    "float32": Merge(),
    "bf16 partials": Merge(partials=_16),
    "bf16 sums": Merge(partials=_16, sums=_16),
    "bf16 lse": Merge(lse=_16),
}


class Case(NamedTuple):
    """One call: inputs by seed in a dtype, rows met as `merge` names."""

    layout: Layout
    dtype: torch.dtype
    merge: str
    seed: int


def cases(seeds: Sequence[int]) -> list[Case]:
    """Wide inputs with the default merge, and bfloat16 ones with every merge."""
    wide = [(dtype, "float32") for dtype in (torch.float64, torch.float32)]
    ways = wide + [(_16, merge) for merge in MERGES]
    return [Case(layout, *way, seed) for layout in LAYOUTS for way in ways for seed in seeds]


def measure(seeds: Sequence[int], worlds: Sequence[int] = WORLDS) -> list[Row]:
    """Rows of every experiment on real ranks, for the claims; one start of `world` processes per size."""
    rows: list[Row] = []
    exact: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for case in cases(seeds):
        if (case.dtype, case.seed) not in exact:
            exact[case.dtype, case.seed] = reference(case.dtype, case.seed)
    for world in worlds:
        found = on_ranks(world, rank_work, list(seeds))
        for at, case in enumerate(cases(seeds)):
            parts = [rank["attention"][at] for rank in found]
            rows.append(deviation_row(case, world, parts, exact[case.dtype, case.seed]))
        rows += peer_rows(world, [rank["peers"] for rank in found], exact[torch.float32, seeds[0]], seeds[0])
        rows += balance_rows(world, [rank["counted"] for rank in found])
    return rows


def reference(dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Exact out, dq, dk, dv in float64 of the inputs as they are in `dtype`."""
    q, k, v, grad_out = drawn(dtype, seed)
    return [exact_attention(q, k, v, causal=True)[0], *exact_attention_grad(q, k, v, grad_out, causal=True)]


@cache
def drawn(dtype: torch.dtype, seed: int, n: int = TOKENS) -> list[Tensor]:
    """q, k, v, grad_out of whole sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(4, 1, HEADS, n, HEAD_DIM, generator=generator, dtype=torch.float64)
    return list(draw.to(dtype).unbind(0))


def rank_work(rank: int, world: int, seeds: list[int]) -> dict[str, Any]:
    """All that one rank does: its shards of every case, of the peers, and its counters."""
    attention = [attended(rank, world, case) for case in cases(seeds)]
    counted = {
        f"{layout} {unit}": tiles_of(rank, world, layout, *sizes)
        for layout in LAYOUTS
        for unit, sizes in COUNTED.items()
    }
    return {"attention": attention, "peers": peers(rank, world, seeds[0]), "counted": counted}


def attended(rank: int, world: int, case: Case) -> list[Tensor]:
    """This rank's out, dq, dk, dv."""
    *qkv, grad_out = sharded(rank, world, case.layout, drawn(case.dtype, case.seed))
    leaves = [x.requires_grad_() for x in qkv]
    out = ring_attention(*leaves, layout=case.layout, merge=MERGES[case.merge], tile=TILE)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def sharded(rank: int, world: int, layout: Layout, whole: Sequence[Tensor]) -> list[Tensor]:
    """This rank's part of each, padded as the layout needs."""
    return [shard(pad(x, world, layout, 2), rank, world, layout, 2) for x in whole]


def tiles_of(rank: int, world: int, layout: Layout, tokens: int, tile: int) -> list[int]:
    """Tiles that this rank computed, round by round, as the call itself counted them."""
    calls = []
    with watched(calls.append):
        ring_attention(
            *sharded(rank, world, layout, drawn(torch.float32, 0, tokens))[:3], layout=layout, tile=tile
        )
    return [this.tiles["full"] + this.tiles["partial"] for this in calls[0].log.forward]


def peers(rank: int, world: int, seed: int) -> dict[str, list[Tensor] | str]:
    """What each peer's ring makes of float32 inputs on this rank, or why it cannot be had."""
    found: dict[str, list[Tensor] | str] = {}
    for name, (layout, load) in PEERS.items():
        ring = load()
        mine = sharded(rank, world, layout, drawn(torch.float32, seed))
        found[name] = ring if isinstance(ring, str) else ring(*mine)
    return found


def deviation_row(case: Case, world: int, per_rank: Sequence[list[Tensor]], exact: Sequence[Tensor]) -> Row:
    """Errors of one case: `max_NAME` of the largest entry, `eps_NAME` Frobenius, in bfloat16's eps."""
    row: Row = {"experiment": "deviation", "ranks": world, "layout": case.layout, "merge": case.merge}
    row |= {"dtype": str(case.dtype).removeprefix("torch."), "seed": case.seed}
    return row | errors(case.layout, per_rank, exact)


def errors(layout: Layout, per_rank: Sequence[list[Tensor]], exact: Sequence[Tensor]) -> dict[str, float]:
    """Of each tensor that the ranks have: largest error by the largest entry, and Frobenius in eps."""
    found: dict[str, float] = {}
    for name, true, parts in zip(TENSORS, exact, zip(*per_rank, strict=True), strict=False):
        off = unshard(parts, layout, 2)[:, :, : true.shape[2]].double() - true
        found[f"max_{name}"] = (off.abs().max() / true.abs().max()).item()
        found[f"eps_{name}"] = (off.norm() / true.norm()).item() / EPS
    return found


def peer_rows(
    world: int, per_rank: Sequence[dict[str, list[Tensor] | str]], exact: Sequence[Tensor], seed: int
) -> Iterator[Row]:
    """A row per peer: its errors, or in words why it is not here."""
    for name, (layout, _) in PEERS.items():
        row: Row = {"experiment": "peer", "ranks": world, "peer": name, "layout": layout, "seed": seed}
        parts = [rank[name] for rank in per_rank]
        missing = [part for part in parts if isinstance(part, str)]
        results = [part for part in parts if not isinstance(part, str)]
        yield row | ({"unavailable": missing[0]} if missing else errors(layout, results, exact))


def balance_rows(world: int, per_rank: Sequence[dict[str, list[int]]]) -> Iterator[Row]:
    """Counted work beside predicted, per layout, by score and by tile; `differ`: the largest difference."""
    for layout in LAYOUTS:
        for unit, (tokens, tile) in COUNTED.items():
            counted = list(zip(*(rank[f"{layout} {unit}"] for rank in per_rank), strict=True))
            predicted = work(layout, world, tokens // world, tile=(tile, tile), unit="tiles")
            differ = max(
                abs(a - b) for x, y in zip(counted, predicted, strict=True) for a, b in zip(x, y, strict=True)
            )
            found, model = balance_of(counted), balance_of(predicted)
            yield {
                "experiment": "balance", "ranks": world, "layout": layout, "unit": unit, "differ": differ,
                "critical_path": found.critical_path, "predicted": model.critical_path,
                "imbalance": found.imbalance, "predicted_imbalance": model.imbalance,
            }  # fmt: skip
