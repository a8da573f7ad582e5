"""How a step's attention fell on the ranks of each ring: tiles counted, CPU seconds, seconds of waiting."""

from dataclasses import dataclass, field
from typing import Any

from stabilitykit.parallel.balance import balance, balance_of
from stabilitykit.parallel.call import RingCall

Members = tuple[int, ...]  # global ranks of a ring, in its order


@dataclass(slots=True)
class Load:
    """What one rank did in one ring; `predicted` tiles are `parallel.balance`'s, None where it has no say."""

    tiles: int = 0
    work_s: float = 0.0
    wait_s: float = 0.0
    predicted: float | None = 0.0


@dataclass(slots=True)
class Loads:
    """Adds up the calls of a step on this rank, by the ring they were made in."""

    rings: dict[Members, Load] = field(default_factory=dict)

    def add(self, call: RingCall) -> None:
        """Both passes of a call."""
        load = self.rings.setdefault(call.ring.members, Load())
        for passed in (call.log.forward, call.log.backward):
            load.tiles += sum(each.tiles["full"] + each.tiles["partial"] for each in passed)
            load.work_s += sum(each.work_s for each in passed)
            load.wait_s += sum(each.wait_s for each in passed)
            ahead = _predicted(call) if passed else 0.0
            load.predicted = None if ahead is None or load.predicted is None else load.predicted + ahead


def balances(ranks: list[Loads]) -> list[dict[str, Any]]:
    """Per ring the `ranks`, what each did, `imbalance` (busiest over mean, in tiles) and `wait_percent`.

    `wait_percent` is of the rank that waited most, of its time in the rings' rounds.
    """
    members = dict.fromkeys(ring for rank in ranks for ring in rank.rings)
    return [_balanced(ring, [ranks[rank].rings[ring] for rank in ring]) for ring in members]


def _balanced(ring: Members, loads: list[Load]) -> dict[str, Any]:
    ahead = [load.predicted for load in loads if load.predicted is not None]
    shares = [load.wait_s / max(load.wait_s + load.work_s, 1e-9) for load in loads]
    return {
        "ranks": list(ring),
        "tiles": [load.tiles for load in loads],
        "work_s": [load.work_s for load in loads],
        "wait_s": [load.wait_s for load in loads],
        "imbalance": balance_of([[load.tiles for load in loads]]).imbalance,
        "predicted_imbalance": balance_of([ahead]).imbalance if len(ahead) == len(loads) else None,
        "wait_percent": 100 * max(shares),
    }


def _predicted(call: RingCall) -> float | None:
    """Tiles of this rank in one pass, from the layout alone; documents and windows hide what it counts."""
    options = call.options
    if call.labels or options.window is not None or not options.causal:
        return None
    side = (options.tile, options.tile)
    found = balance(options.layout, call.ring.world, call.q.shape[2], tile=side, unit="tiles")
    return found.per_rank[call.ring.rank]
