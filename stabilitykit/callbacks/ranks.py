"""What all ranks found on a due step, as one: per layer and head the row of the rank that is farthest off."""

import math
import platform
from typing import Any

from torch import distributed as dist

from stabilitykit.callbacks.run import world
from stabilitykit.observe.attention import worst
from stabilitykit.parallel.invariants import IDENTITIES

Layers = dict[str, dict[str, Any]]
# Numbers of a layer that are no head's.
_OF_ALL_HEADS = ("logit_bound", *IDENTITIES)


def everyone(mine: Any) -> list[tuple[str, Any]]:
    """Every rank's host name and what it has, in rank order; the one collective of a due step."""
    if world() == 1:
        return [(platform.node(), mine)]
    parts: list[Any] = [None] * world()
    dist.all_gather_object(parts, (platform.node(), mine))
    return parts


def merged(parts: list[tuple[str, Layers]]) -> Layers:
    """The layers of all ranks: heads are united, of a head seen by several the worst row stands.

    `delta_walk` is added over the ranks: their rows are one sample. With several ranks a row names
    the rank it is of, a layer that of its worst head and its host. Layers in the order of the forward
    pass: a backward hands over the last one first.
    """
    names = list(dict.fromkeys(name for _, layers in parts for name in reversed(layers)))
    if len(parts) == 1:
        return {name: parts[0][1][name] for name in names}
    return {
        name: _layer([(r, h, ls[name]) for r, (h, ls) in enumerate(parts) if name in ls]) for name in names
    }


def _layer(rows: list[tuple[int, str, dict[str, Any]]]) -> dict[str, Any]:
    heads: dict[int, dict[str, Any]] = {}
    walks: dict[int, list[float]] = {}
    for rank, _, row in rows:
        for head in row["heads"]:
            at = head["head"]
            if "delta_walk" in head:
                before = walks.get(at, [0.0, 0.0, 0.0])
                walks[at] = [a + b for a, b in zip(before, head["delta_walk"], strict=True)]
            if at not in heads or _badness(head) > _badness(heads[at]):
                heads[at] = {**head, "rank": rank}
    for at, walk in walks.items():
        heads[at]["delta_walk"] = walk
    rank, host, first = max(rows, key=lambda row: _badness(row[2]))
    united = [heads[at] for at in sorted(heads)]
    whole = worst([{key: row[key] for key in _OF_ALL_HEADS if key in row} for _, _, row in rows])
    return {"rank": rank, "host": host, **first, **worst(united), **whole, "heads": united}


def _badness(row: dict[str, Any]) -> tuple[float, float]:
    count = row["nonfinite"] + row.get("grad_nonfinite", 0.0)
    ratios = (row["roundoff_ratio"], row.get("grad_roundoff_ratio", 0.0))
    return count, max(math.inf if math.isnan(ratio) else ratio for ratio in ratios)
