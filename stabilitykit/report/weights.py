"""What weights records say in words: how far each arm's twin is from the run, and from its noise."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stabilitykit.records import Record
from stabilitykit.report.reading import counted, number, show

_PHRASES = {
    "not distinguishable from the floor": "is not distinguishable from the run's own rounding noise",
    "this arm had no effect": "had no effect",
    "no floor was measured": "was measured without a noise floor",
    "the floor is not finite": "has no finite noise floor to stand against",
}


class Comparison(NamedTuple):
    """One arm's twin against the run, in one record."""

    arm: str
    row: Record

    def value(self, name: str) -> float:
        """The arm's number `name`, as `rel_l2`; NaN when the record has none."""
        return self.row.values.get(f"weights/{key_of(self.arm)}/{name}", math.nan)

    @property
    def words(self) -> str:
        """The monitor's verdict."""
        return str(self.row.detail.get("verdict", {}).get(self.arm, ""))

    @property
    def nonfinite(self) -> int:
        """How many of the twin's weights are not finite."""
        return int(self.row.detail.get("nonfinite", {}).get(self.arm, 0))

    @property
    def finite(self) -> bool:
        """Whether the run and its twin could be compared at all."""
        return not self.nonfinite and not run_nonfinite(self.row)

    @property
    def judged(self) -> bool:
        """Whether a noise floor told what the distance means."""
        return self.words.startswith(("above", "not distinguishable"))

    @property
    def phrase(self) -> str:
        """The verdict with its verb."""
        return _PHRASES.get(self.words) or (f"is {self.words}" if self.words else "has no verdict")

    @property
    def distance(self) -> str:
        """Relative L2, in floors where there is a floor that is not 0."""
        plain, floors = self.value("rel_l2"), self.value("rel_l2_over_floor")
        if plain == 0:
            return "distance 0"
        if not math.isfinite(floors):
            return f"relative L2 {show(plain)}"
        return "1 floor" if show(floors) == "1" else f"{show(floors)} floors"


def key_of(arm: str) -> str:
    """An arm's text as it stands in a key.

    >>> key_of("jitter=1e-6")
    'jitter_1e_6'
    """
    return re.sub("[^a-zA-Z0-9]+", "_", arm)


def arms(rows: Iterable[Record]) -> dict[str, str]:
    """Every arm measured in the order first seen: as it stands in keys -> as the user wrote it."""
    rows = list(rows)
    written = {key_of(text): text for row in rows for text in row.detail.get("verdict", {})}
    keys = [key.split("/") for row in rows for key in row.values]
    return {parts[1]: written.get(parts[1], parts[1]) for parts in keys if len(parts) == 3}


def comparisons(rows: Sequence[Record]) -> dict[str, list[Comparison]]:
    """Every arm, as the user wrote it, and the records it is in."""
    return {
        arm: [Comparison(arm, row) for row in rows if f"weights/{key}/rel_l2" in row.values]
        for key, arm in arms(rows).items()
    }


def floor(row: Record, name: str) -> list[float]:
    """The distances `name` ("w1" or "rel_l2") of the jittered twins of a record, one per seed."""
    return [number(value) for value in row.detail.get("floor", {}).get(name, [])]


def run_nonfinite(row: Record) -> int:
    """How many of the run's own weights are not finite."""
    return int(row.detail.get("nonfinite", {}).get("main", 0))


def windowed(rows: Sequence[Record]) -> bool:
    """Whether twins were forked anew for every record; else one set went on in lockstep."""
    return rows[-1].detail.get("window") is not None


def sentence(found: dict[str, list[Comparison]]) -> str:
    """What all comparisons say together, arm by arm."""
    rows = {look.row.step: look.row for looks in found.values() for look in looks}
    told = "; ".join(f"{arm} {_tell(looks)}" for arm, looks in found.items() if looks)
    return f"Weights: {_when([rows[step] for step in sorted(rows)])}, {told}."


def _when(rows: Sequence[Record]) -> str:
    last = rows[-1]
    if "forked_at" not in last.detail:
        return f"at step {last.step}"
    start = last.detail["forked_at"]
    trained = counted(last.step - start + 1, "step")
    if len(rows) == 1:
        return f"after {trained} " + (f"from step {start}" if windowed(rows) else "in lockstep")
    if windowed(rows):
        return f"in {len(rows)} windows of {trained}, the last from step {start}"
    return f"at {len(rows)} measured steps, the last after {trained} in lockstep"


def _tell(looks: Sequence[Comparison]) -> str:
    last, total = looks[-1], len(looks)
    if total == 1:
        if last.words.startswith("above"):
            return f"{last.phrase}: {last.distance}"
        seeds = len(floor(last.row, "rel_l2"))
        return f"{last.phrase} ({last.distance}{', ' + counted(seeds, 'jitter seed') if seeds else ''})"
    (first, count), *others = Counter(look.phrase for look in looks).most_common()
    every = "both" if total == 2 else f"all {total}"
    parts = [f"{first} in {f'{count} of {total}' if others else every}"]
    parts += [f"{phrase} in {count}" for phrase, count in others]
    return f"{' and '.join(parts)} (last: {last.distance})"
