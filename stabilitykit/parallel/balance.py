"""How causal attention's work falls on the ranks, per round: counted, not timed; by score or by tile."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from stabilitykit.numerics.scores import require
from stabilitykit.parallel.layout import LAYOUTS, Run, runs
from stabilitykit.parallel.tiles import band

# The ring's layouts; DistFlashAttn's schedule, where idle ranks help (arXiv 2310.03294, section 3.2);
# and head-parallel attention over whole sequences (DeepSpeed-Ulysses, arXiv 2309.14509).
Schedule = Literal["contiguous", "striped", "zigzag", "distflash", "ulysses"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
Tile = tuple[int, int]  # query rows, keys


class Balance(NamedTuple):
    """Of one head: work of each rank, of the busiest over the mean (>= 1), and along the critical path.

    The critical path is the sum over rounds of the busiest rank's work, as all wait for it.
    """

    per_rank: list[float]
    imbalance: float
    critical_path: float


def work(
    schedule: Schedule,
    world: int,
    block: int,
    *,
    tile: Tile = (1, 1),
    unit: Literal["scores", "tiles"] = "scores",
) -> list[list[float]]:
    """Work of one head, [round][rank], of `world` ranks with `block` tokens each.

    A tile is computed whole unless all of it is masked; with 1 x 1 tiles the scores are those that
    are visible. Fractions only under "ulysses", whose ranks share the heads.

    Raises:
        ValueError: no such schedule, or a block that the layout cannot have.

    >>> work("contiguous", 2, 3), work("striped", 2, 3)
    ([[6, 6], [0, 9]], [[6, 6], [3, 6]])
    """
    require(schedule in SCHEDULES, f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if schedule in LAYOUTS:
        every = [runs(world * block, rank, world, schedule) for rank in range(world)]
        return [
            [_met(every[rank], every[(rank - hop) % world], tile, unit) for rank in range(world)]
            for hop in range(world)
        ]
    if schedule == "ulysses":
        whole = [Run(0, 1, world * block)]
        return [[_met(whole, whole, tile, unit) / world] * world]
    first, later = Run(0, 1, block), Run(block, 1, block)
    diagonal, full = _met([first], [first], tile, unit), _met([later], [first], tile, unit)
    rounds: list[list[float]] = [[diagonal] * world]
    for hop in range(1, world // 2 + 1):
        half = 2 * hop == world  # what is left of N (N - 1) / 2 blocks keeps half of the ranks busy
        rounds.append([0 if half and rank >= world // 2 else full for rank in range(world)])
    return rounds


def balance(
    schedule: Schedule,
    world: int,
    block: int,
    *,
    tile: Tile = (1, 1),
    unit: Literal["scores", "tiles"] = "scores",
) -> Balance:
    """The balance of `work` with the same arguments."""
    return balance_of(work(schedule, world, block, tile=tile, unit=unit))


def balance_of(rounds: Sequence[Sequence[float]]) -> Balance:
    """The balance of any work or time, [round][rank]; what was counted or measured, too.

    >>> balance_of([[6, 6], [0, 9]])
    Balance(per_rank=[6, 15], imbalance=1.4285714285714286, critical_path=15)
    """
    per_rank: list[float] = [sum(rank) for rank in zip(*rounds, strict=True)]
    mean = sum(per_rank) / len(per_rank)
    return Balance(per_rank, max(per_rank) / mean if mean else 1.0, sum(max(ranks) for ranks in rounds))


def attention_speedup(
    schedule: Schedule, world: int, block: int, *, over: Schedule = "contiguous", tile: Tile = (1, 1)
) -> float:
    """Critical path of `over` by that of `schedule`, in scores computed: attention only, links for free.

    >>> attention_speedup("striped", 4, 2), attention_speedup("striped", 8, 4096, tile=(2048, 4096))
    (1.25, 1.0)
    """
    slow, fast = (balance(name, world, block, tile=tile).critical_path for name in (over, schedule))
    return slow / fast


def _met(q_runs: list[Run], k_runs: list[Run], tile: Tile, unit: str) -> int:
    bands = [(q.length, k.length, band(q, k, causal=True, window=None).high) for q in q_runs for k in k_runs]
    return sum(_computed(*sizes, tile, unit == "tiles") for sizes in bands)


@lru_cache(maxsize=4096)
def _computed(n_rows: int, n_keys: int, high: int, tile: Tile, count: bool) -> int:
    """Tiles, or the scores in them, of which some score is visible, where row a sees keys <= a + high."""
    tall, wide = tile
    total = 0
    for top in range(0, n_rows, tall):
        bottom = min(top + tall, n_rows)
        tiles = -(-max(0, min(n_keys, bottom + high)) // wide)
        total += tiles if count else (bottom - top) * min(n_keys, tiles * wide)
    return total
