"""What a due step may cost, and the largest sample that costs no more; chosen by measuring, then kept."""

import math
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

SHARE = 0.005  # of the training time, at the user's cadence
# Measured at the smallest sample before the first choice, and before each further one. Few choices:
# a run that is resumed and one that was not measure the same once the choice is made.
PROBES, FOLLOW_UPS, CHOICES = 8, 4, 4
HEADS, ROWS, SEQUENCES = 2, 64, 1


@dataclass(frozen=True, slots=True)
class Size:
    """How much of every call is measured, and each layer on which of the due steps (1: on all)."""

    heads: int | list[int]
    rows: int
    sequences: int
    layers_every: int = 1

    def __str__(self) -> str:
        heads = f"heads {self.heads}" if isinstance(self.heads, list) else f"{self.heads} heads"
        return f"{heads} and {self.rows} rows, {self.sequences} of the sequences"

    def shrunk(self) -> "Size":
        """The next smaller sample, whoever chose this one; the smallest is one row of one head."""
        if self.sequences > 1:
            return replace(self, sequences=self.sequences // 2)
        if self.rows > 1:
            return replace(self, rows=self.rows // 2)
        if isinstance(self.heads, int):
            return replace(self, heads=max(1, self.heads // 2))
        return replace(self, heads=self.heads[: max(1, len(self.heads) // 2)])


@dataclass(frozen=True, slots=True)
class Most:
    """The largest call of a step: query heads, those per key head, rows, sequences; and how many calls."""

    heads: int = 1
    group: int = 1
    rows: int = 1
    sequences: int = 1
    layers: int = 1

    @classmethod
    def of(cls, shapes: list[tuple[int, int, int, int]]) -> "Most":
        """The largest of calls of these (heads, heads per key head, rows, sequences)."""
        return cls(*(max(sizes) for sizes in zip(*shapes, strict=True)), layers=max(len(shapes), 1))

    def work(self, size: Size) -> float:
        """Query rows times heads per layer and due step: what the cost grows with, beside a constant."""
        count = size.heads if isinstance(size.heads, int) else len(size.heads)
        rows = min(count, self.heads) * min(size.rows, self.rows)
        every = max(rows, self.group * self.rows)  # dk and dv need all rows of a group of heads
        return min(size.sequences, self.sequences) * (rows + every) / size.layers_every


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds: of this monitor in a due step, of a plain step, of a due step beside both (the tap)."""

    cost: float
    plain: float
    tap: float
    most: Most

    @property
    def over(self) -> float:
        """How many plain steps one due step costs."""
        return (self.cost + self.tap) / self.plain


class Clock:
    """Tells a budget the seconds of every step, from the beginning of one to that of the next."""

    def __init__(self) -> None:
        self._began: tuple[float, float, float, bool] | None = None

    def begin(self, budget: "Budget", spent: float, own: float, due: bool) -> None:
        """A step begins: `spent` is what all monitors took so far, `own` what this one did."""
        now = time.perf_counter()  # no device is waited for: steps that queue up take as long as they run
        if self._began is not None:
            at, spent_then, own_then, was_due = self._began
            rest = now - at - (spent - spent_then)
            if was_due:
                budget.due(own - own_then, rest)
            else:
                budget.plain(rest)
        self._began = now, spent, own, due


class Budget:
    """The size of the sample: what the user named, and for the rest what stays under `SHARE`.

    Args:
        every_n_steps: the cadence over which a due step's cost is spread.
        heads: None: to be chosen; likewise `rows` and `sequences`. All named: nothing is chosen.
    """

    def __init__(
        self,
        every_n_steps: int,
        heads: int | list[int] | None = None,
        rows: int | None = None,
        sequences: int | None = None,
    ):
        self.every_n_steps = every_n_steps
        self._named = {"heads": heads, "rows": rows, "sequences": sequences}
        start = {"heads": HEADS, "rows": ROWS, "sequences": SEQUENCES}
        self.size = Size(**{key: start[key] if v is None else v for key, v in self._named.items()})
        self.choices = 0
        self.settled = None not in self._named.values()
        self._plain: deque[float] = deque(maxlen=64)
        self._costs: list[float] = []
        self._taps: list[float] = []

    def plain(self, seconds: float) -> None:
        """A step that was not due, without what monitors took."""
        self._plain.append(seconds)

    def due(self, cost: float, rest: float) -> None:
        """A due step: seconds this monitor took, and all others but for other monitors'."""
        if not self._plain or self.every_n_steps == 1:
            self._plain.append(rest)  # no step is plain: the tap counts as the step
        self._costs.append(cost)
        self._taps.append(max(0.0, rest - statistics.median(self._plain)))

    def figures(self, most: Most) -> Figures | None:
        """What was measured, when there is enough of it for a choice."""
        enough = FOLLOW_UPS if self.choices else PROBES
        if self.settled or len(self._costs) < enough:
            return None
        cost, plain, tap = (statistics.median(x) for x in (self._costs, self._plain, self._taps))
        return Figures(cost, plain, tap, most)

    def choose(self, figures: Figures) -> None:
        """Takes the largest sample whose cost, predicted in proportion to its work, is allowed.

        A constant part of the cost makes the prediction too high, never too low: what is left over is
        used by the next choice. If even the smallest sample of all layers is too much, layers take
        turns: that prediction is exact.
        """
        most, before = figures.most, self.size
        allowed = SHARE * self.every_n_steps * figures.plain - figures.tap
        rate = figures.cost / most.work(self.size)
        ladder = self._ladder(most)
        fitting = [size for size in ladder if rate * most.work(size) <= allowed]
        if fitting:
            self.size = fitting[-1]
        else:
            needed = math.ceil(rate * most.work(ladder[0]) / allowed) if allowed > 0 else most.layers
            self.size = replace(ladder[0], layers_every=min(max(needed, 1), most.layers))
        self.choices += 1
        self.settled = self.size == before or self.choices == CHOICES
        self._costs, self._taps = [], []

    def shrink(self) -> None:
        """A smaller sample from now on, for good: memory ran out."""
        self.size, self.settled = self.size.shrunk(), True

    def _ladder(self, most: Most) -> list[Size]:
        """Samples of growing work: heads and rows by turns, up to all; then sequences."""
        tops = {"heads": most.heads, "rows": most.rows, "sequences": most.sequences}
        size = {"heads": HEADS, "rows": ROWS, "sequences": SEQUENCES}
        size = {key: named if named is not None else size[key] for key, named in self._named.items()}
        ladder = [Size(**size)]
        while free := [key for key in tops if self._named[key] is None and size[key] < tops[key]]:
            inner = [key for key in free if key != "sequences"] or free
            key = min(inner, key=lambda key: (size[key] / tops[key], key))
            size = {**size, key: min(2 * size[key], tops[key])}
            ladder.append(Size(**size))
        return ladder

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "size": asdict(self.size),
            "choices": self.choices,
            "settled": self.settled,
            "plain": list(self._plain),
            "costs": list(self._costs),
            "taps": list(self._taps),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, but for what the user names now."""
        named = {key: value for key, value in self._named.items() if value is not None}
        self.size = Size(**{**state["size"], **named})
        self.choices, self.settled = state["choices"], state["settled"]
        self._plain = deque(state["plain"], maxlen=64)
        self._costs, self._taps = list(state["costs"]), list(state["taps"])
