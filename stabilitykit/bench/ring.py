"""What the ring's layouts cost on this machine, beside the work model and other people's rings."""

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stabilitykit.bench.ring_ranks import TILE, WAYS, counted_rounds, measured, seconds_alone
from stabilitykit.bench.steps import row
from stabilitykit.parallel.balance import balance_of, work
from stabilitykit.parallel.kernel import GRANULE
from stabilitykit.parallel.launch import on_ranks
from stabilitykit.parallel.layout import LAYOUTS, Layout, runs
from stabilitykit.parallel.peers import PEERS
from stabilitykit.parallel.tiles import parts

Row = dict[str, Any]
Rounds = Sequence[Sequence[float]]  # [round][rank]

PAIRS = 9
CRITICAL_RANKS = (4, 8)  # of the critical path, beside --ranks
PEER_LIMITS = {"torch_ring": 1.0, "ring_attention_pytorch": 3.0}
AGREEMENT = 2e-6  # float32: each within 1e-6 of the exact result
# Rows and keys by which torch's CPU kernel leaves out what its own causal mask hides.
STEP = (256, GRANULE)
# What a row of a kernel call costs beside its scores, in scores: merge_part 15 to 25, the rest the call
# itself. By time.thread_time on one core of an x86 CPU, one process, nothing else running.
MERGED_ROW = 20.0

_LOG = logging.getLogger(__name__)


def ring_bench(rounds: int = PAIRS, *, ranks: int = 2, tokens: int = 16384) -> list[Row]:
    """Rows of `stabilitykit bench ring`, which starts its ranks itself: gloo, one thread each.

    - `LAYOUT_over_contiguous_...`: wall time of contiguous over LAYOUT's, by interleaved pair; the limit is
      what attention alone can gain. Left out where ranks share a core: all their work then adds up.
    - `tiles_N_ranks/LAYOUT`: critical path of contiguous over LAYOUT's in counted tiles; limit: predicted.
      `.../off`: the most that any rank and round is off the prediction, in tiles.
    - `critical_path_N_ranks/LAYOUT`: the same in CPU seconds, each rank's rounds timed with the machine to
      themselves, a round as long as its busiest rank; limit: the work model by tile with `MERGED_ROW`.
    - `..._over_ours_forward`: a peer's wall time over ours. ring-attention-pytorch is optional
      (`parallel.peers` tells how to install it); of a missing peer there is no row, and a warning says so.
    - `torch_ring_agreement`: largest relative difference of out, dq, dk, dv from torch's own ring.
    - `peak_memory/N_tokens`: MiB of one rank, forward and backward; limit: linear from the first.

    Raises:
        ValueError: ranks or rounds below 1, or tokens that 8 * any N here does not divide.
    """
    worlds = sorted({ranks, *CRITICAL_RANKS})
    _check(rounds, ranks, tokens, worlds)
    times, agreement, peaks, missing = on_ranks(ranks, measured, tokens, rounds)[0]
    for peer, why in missing.items():
        _LOG.warning("stabilitykit: no rows of %s: %s", peer, why)
    rows = [*wall_rows(times, ranks), *agreement_rows(agreement), *memory_rows(peaks)]
    for world in worlds:
        rows += tile_rows(on_ranks(world, counted_rounds, tokens), world, tokens)
        rows += critical_rows(on_ranks(1, seconds_alone, world, tokens)[0], world, tokens)
    return rows


def wall_rows(times: dict[str, list[float]], ranks: int) -> list[Row]:
    """Rows of the wall times of one run, by job and round."""
    rows: list[Row] = []
    if ranks <= (os.cpu_count() or 1):
        for way in WAYS:
            for layout in LAYOUTS[1:]:
                ratios = _over(times[f"contiguous {way}"], times[f"{layout} {way}"])
                rows.append(row(f"{layout}_over_contiguous_{way}", ratios, "x faster", _gain(layout, ranks)))
    else:
        _LOG.warning("stabilitykit: no wall times of layouts: %d ranks share %s cores", ranks, os.cpu_count())
    for peer, (layout, _) in PEERS.items():
        if peer in times:
            ratios = _over(times[peer], times[f"{layout} forward"])
            rows.append(row(f"{peer}_over_ours_forward", ratios, f"x ours ({layout})", PEER_LIMITS[peer]))
    return rows


def agreement_rows(off: Sequence[float]) -> list[Row]:
    """The row of the agreement with torch's ring, if there is one."""
    return (
        [row("torch_ring_agreement", [max(off)], "of the largest entry, at most", AGREEMENT)] if off else []
    )


def memory_rows(peaks: dict[int, int]) -> list[Row]:
    """Rows of the peaks, by tokens of all ranks."""
    first = min(peaks)
    return [
        row(f"peak_memory/{n}_tokens", [peak / 2**20], "MiB of a rank", peaks[first] / 2**20 * n / first)
        for n, peak in sorted(peaks.items())
    ]


def tile_rows(per_rank: Sequence[dict[str, list[int]]], world: int, tokens: int) -> list[Row]:
    """Rows of the counted tiles of all ranks; `.../off`: the most that a rank's round has too many or few."""
    predicted = {
        layout: work(layout, world, tokens // world, tile=(TILE, TILE), unit="tiles") for layout in LAYOUTS
    }
    counted: dict[str, Rounds] = {
        layout: list(zip(*(found[layout] for found in per_rank), strict=True)) for layout in LAYOUTS
    }
    off = max(
        abs(a - b)
        for layout in LAYOUTS
        for here, there in zip(counted[layout], predicted[layout], strict=True)
        for a, b in zip(here, there, strict=True)
    )
    name = f"tiles_{world}_ranks"
    return [
        *_gains(name, counted, predicted, "x fewer; limit: predicted"),
        row(f"{name}/off", [off], "tiles of a rank and round", 0.0),
    ]


def critical_rows(found: Mapping[str, Rounds], world: int, tokens: int) -> list[Row]:
    """Rows of the CPU seconds of all rounds and ranks."""
    predicted = {layout: modelled(layout, world, tokens // world) for layout in LAYOUTS}
    return _gains(f"critical_path_{world}_ranks", found, predicted, "x shorter; limit: the work model")


def modelled(layout: Layout, world: int, block: int) -> list[list[float]]:
    """Work of each round and rank, [round][rank], in scores: those computed, and what their rows cost."""
    scores = work(layout, world, block, tile=STEP)
    return [
        [
            scores[hop][rank] + MERGED_ROW * merged_rows(layout, world, block, rank, hop)
            for rank in range(world)
        ]
        for hop in range(world)
    ]


def merged_rows(layout: Layout, world: int, block: int, rank: int, hop: int) -> int:
    """Rows of all kernel calls of one round of a rank.

    >>> [merged_rows("contiguous", 2, 2048, 1, hop) for hop in (0, 1)]  # a triangle, then two rows of tiles
    [2048, 2048]
    """
    mine, theirs = (runs(world * block, r % world, world, layout) for r in (rank, rank - hop))
    calls = parts(mine, theirs, causal=True, window=None, tile=TILE, granule=GRANULE, counted=Counter())
    return sum(call.rows.stop - call.rows.start for call in calls)


def _check(rounds: int, ranks: int, tokens: int, worlds: Sequence[int]) -> None:
    for name, value in (("rounds", rounds), ("ranks", ranks)):
        if value < 1:
            raise ValueError(f"expected --{name} >= 1, got {value}")
    each = 8 * math.lcm(*worlds)  # zigzag halves a rank's tokens, and a quarter of them is measured, too
    if tokens < each or tokens % each:
        numbers = ", ".join(map(str, worlds))
        even = max(1, -(-tokens // each)) * each
        raise ValueError(
            f"expected --tokens that {each} divides (8 times {numbers} ranks), got {tokens}; take {even}"
        )


def _gains(name: str, found: Mapping[str, Rounds], predicted: Mapping[str, Rounds], unit: str) -> list[Row]:
    """Critical path of contiguous over those of the others, beside the same as predicted."""
    have, want = (
        {layout: balance_of(rounds).critical_path for layout, rounds in paths.items()}
        for paths in (found, predicted)
    )
    return [
        row(f"{name}/{layout}", [have["contiguous"] / have[layout]], unit, want["contiguous"] / want[layout])
        for layout in LAYOUTS[1:]
    ]


def _gain(layout: Layout, world: int) -> float:
    """What attention alone can gain over contiguous, of long blocks (arXiv 2311.09431, section 2.2).

    >>> _gain("striped", 2), _gain("zigzag", 4)
    (1.5, 1.75)
    """
    return 2 - 1 / world if layout != "contiguous" else 1.0


def _over(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(slow, fast, strict=True)]
