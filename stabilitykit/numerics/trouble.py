"""An open event of finite losses: what it looks like so far, and when it is over."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stabilitykit.numerics.baseline import SLOW_ROWS
from stabilitykit.numerics.event import Event

SETTLE_FROM = 64  # rows after which the mean has forgotten how an event began


@dataclass(slots=True)
class Trouble:
    """What is needed to see an event end; all means are of the rise above the event's baseline."""

    event: Event
    passing: str  # what it is called if it comes back: "spike", or in start-up "transient"
    sigma: float
    band: float  # a row is back when it is fewer sigmas above the baseline
    back: float | None  # the mean has to be back below this as well; None: raised by one row
    untrained: float | None  # the loss of the run's first step, where much was learnt since
    mean: float
    pace: int = 1  # by how much slower it is judged than what rows show
    mark: float = 0.0  # the mean when settling was last judged
    judged: int = 0  # the row of then
    rows: int = 1
    quiet: int = 0  # rows in a row back in the band
    grew: bool = False

    def score(self, loss: float) -> float:
        """Robust sigmas above the baseline."""
        return (loss - self.event.baseline) / self.sigma

    def take(
        self, step: float, loss: float, fall: Callable[[int], float], *, recover: int, settle: int
    ) -> Literal["open", "back", "settled"]:
        """Whether the event is over with this row: the loss is back, or flat at a new level.

        `fall` guesses by how much the untroubled curve falls in so many rows; only the kind knows of it.
        """
        event, score = self.event, self.score(loss)
        if loss > event.peak:
            event.peak, event.peak_step, event.score = loss, step, score
        self.rows += 1
        self.mean += (loss - event.baseline - self.mean) / min(self.rows, SLOW_ROWS * self.pace)
        self.quiet = self.quiet + 1 if score < self.band else 0
        # Ten rows may be a dip of the wander that a slow rise stands out of.
        if self.quiet >= recover and (self.back is None or self.mean < self.back):
            event.kind = "shift" if self._lasted(fall) else self.passing
            return "back"
        settle_from = SETTLE_FROM * self.pace
        if self.rows == settle_from:
            self.mark, self.judged = self.mean, self.rows
        elif self.rows >= max(self.judged, settle_from) + settle * self.pace:
            return self._settle(fall)
        elif self.back is None and self.rows < settle_from:
            event.kind = self._young_kind(loss)
        return "open"

    def _young_kind(self, loss: float) -> str:
        """What a sudden event looks like so far: it passes once a quarter of the rise is lost."""
        peak, baseline = self.event.peak, self.event.baseline
        ruined = self.untrained is not None and loss > self.untrained
        return "divergence" if ruined or peak - loss < (peak - baseline) / 4 else self.passing

    def _change(self, fall: Callable[[int], float]) -> float:
        """How the mean changed since the mark, had the curve below not fallen on."""
        return self.mean - self.mark + fall(self.rows) - fall(self.judged)

    def _lasted(self, fall: Callable[[int], float]) -> bool:
        """Whether an event that is over was a new level, from which all of the curve came down."""
        return self.rows >= 3 * SETTLE_FROM * self.pace and self._change(fall) > -self.mark / 4

    def _settle(self, fall: Callable[[int], float]) -> Literal["open", "settled"]:
        """Still falling, still rising, stuck high, or flat at a new level: the last ends the event."""
        event, rise = self.event, self.mark
        notable = max(abs(rise) / 4, self.sigma / 2 / self.pace**0.5)
        falling = self._change(fall) < -notable
        self.grew = self.grew or self.mean - rise > notable
        self.mark, self.judged = self.mean, self.rows
        if falling:
            event.kind = self.passing
        elif self.grew or rise > max(10 * self.sigma, abs(event.baseline) / 2):
            event.kind = "divergence"
        else:
            event.kind = "shift" if rise > (self.back or self.band * self.sigma / 2) else self.passing
            return "settled"
        return "open"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "event": self.event.to_dict()}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> "Trouble":
        """The inverse of `to_dict`."""
        return cls(**{**row, "event": Event.from_dict(row["event"])})
