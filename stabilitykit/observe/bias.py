"""DeltaWalk: does the stored output's rounding push delta, and with it the gradients, to one side?"""

import math
from typing import Any

from stabilitykit.observe.attention import worst


class DeltaWalk:
    """Per layer and head the running sum of delta_low - delta_exact, over its size if it were random.

    delta = rowsum(dO * O) enters every dq and dk; low is from the stored output, exact from the exact
    one. Without a bias the sum over n rows is a random walk: `delta_bias` = sum / sqrt(sum of
    squares) stays near a standard normal number, while a bias makes it grow with sqrt(n). The
    mechanism of arXiv 2510.04212, Sec. 3.
    """

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, list[float]]] = {}

    def add(self, layers: dict[str, dict[str, Any]]) -> None:
        """Adds what the rows of a due step hold, and sets their `delta_bias` and that of their layers."""
        for name, row in layers.items():
            sums = self._sums.setdefault(name, {})
            for head in row["heads"]:
                if "delta_walk" in head:
                    before = sums.get(head["head"], [0.0, 0.0, 0.0])
                    walk = [a + b for a, b in zip(before, head["delta_walk"], strict=True)]
                    sums[head["head"]] = walk
                    head["delta_bias"] = walk[0] / math.sqrt(walk[1]) if walk[1] else 0.0
            row.update({key: v for key, v in worst(row["heads"]).items() if key == "delta_bias"})

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {name: {head: list(walk) for head, walk in sums.items()} for name, sums in self._sums.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._sums = {name: {head: list(w) for head, w in sums.items()} for name, sums in state.items()}
