"""A claim: a sentence with a source, a band fixed before running, and what was measured."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence held against measured values; `interval` is their lowest and highest."""

    claim: str
    source: str
    expected: str
    measured: float
    interval: tuple[float, float]
    holds: bool | Literal["indistinguishable"]

    def to_json(self) -> dict[str, Any]:
        """The row as `study --format json` prints it."""
        return asdict(self) | {"interval": list(self.interval)}


@dataclass(frozen=True, slots=True)
class Study:
    """What a study returns: claims, rows of numbers, figures (plotly, by title), and words on both."""

    name: str
    claims: list[Claim]
    results: list[dict[str, Any]]
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    words: str = ""

    def to_json(self) -> dict[str, Any]:
        """The one document `study --format json` prints; figures are the page's."""
        document = {"study": self.name, "claims": [claim.to_json() for claim in self.claims]}
        return document | {"results": self.results, "words": self.words}


def claim(
    text: str, source: str, values: Sequence[float], *, low: float = -math.inf, high: float = math.inf
) -> Claim:
    """The claim that every one of `values` (one per seed) lies in low..high; `measured` is their median.

    A value that is not a number holds nothing.

    >>> claim("a tie", "by hand", [1.0, 3.0, 2.0], low=1).holds, claim("b", "", [0.5], low=1).holds
    (True, False)
    """
    holds = all(low <= value <= high for value in values)
    return Claim(text, source, _band(low, high), statistics.median(values), (min(values), max(values)), holds)


def _band(low: float, high: float) -> str:
    """The band in words.

    >>> _band(5, 15), _band(3, math.inf), _band(-math.inf, 1), _band(0, 0)
    ('in [5, 15]', '>= 3', '<= 1', 'exactly 0')
    """
    if low == high:
        return f"exactly {low:.17g}"
    if math.isinf(low) or math.isinf(high):
        return f">= {low:g}" if math.isinf(high) else f"<= {high:g}"
    return f"in [{low:g}, {high:g}]"
