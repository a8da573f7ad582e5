"""A claim: a sentence with a source, a band fixed before running, and what was measured."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from scipy.stats import t as student


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


def comparison(text: str, source: str, ratios: Sequence[float], *, above: bool = False) -> Claim:
    """The claim that a ratio, one per seed, is below 1, or `above` it, as a rule and not by luck.

    `measured` is the geometric mean, `interval` Student's 95 % interval of it; where 1 lies in that,
    the claim is "indistinguishable". One seed has no interval, and a ratio that is not a positive
    number holds nothing.

    >>> comparison("by seed", "", [0.5, 0.4, 0.6]).holds, comparison("noise", "", [0.5, 2.0]).holds
    (True, 'indistinguishable')
    """
    expected = f"{'above' if above else 'below'} 1 (95 % over seeds)"
    if not all(0 < ratio < math.inf for ratio in ratios):
        worst = (min(ratios), max(ratios))
        return Claim(text, source, expected, statistics.median(ratios), worst, False)
    logs = [math.log(ratio) for ratio in ratios]
    middle, reach = statistics.mean(logs), math.inf
    if len(logs) > 1:
        reach = statistics.stdev(logs) / math.sqrt(len(logs)) * float(student.ppf(0.975, len(logs) - 1))
    low, high = math.exp(middle - reach), math.exp(middle + reach) if middle + reach < 700 else math.inf
    holds = "indistinguishable" if low <= 1 <= high else (low > 1) == above
    return Claim(text, source, expected, math.exp(middle), (low, high), holds)


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
