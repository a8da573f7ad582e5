"""The usual range of many signals, each against its own past; no torch."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from stabilitykit.numerics.robust import RollingWindow

WINDOW = 64  # values that make a band
KNOWN = 16  # of them before it is judged
SIGMAS = 8.0
RELEARN = 64  # values outside in a row, after which they are the new usual
TAIL, SIGMAS_TO_TAIL = 0.1, 1.2816  # a Gaussian's 10 % and 90 % quantiles


class Scale(NamedTuple):
    """How a signal is compared: on which axis, to which sides, and the least noise it is granted."""

    axis: str = "log"  # "log", "linear", or "asinh": linear about 0, logarithmic far from it
    high: bool = True
    low: bool = False
    floor: float = 0.05  # one sigma, in units of the axis


class Outside(NamedTuple):
    """A value outside its band since step `since`: the median of the band, and how many sigmas off."""

    value: float
    usual: float
    sigmas: float
    since: int


class Bands:
    """One robust band per signal, of its last WINDOW values that were not outside.

    A value is outside when it is more than SIGMAS robust standard deviations from the median, or is
    not finite. Each side has its own deviation, from the 10 % or 90 % quantile, so that a skewed or
    steadily moving signal is not outside for that alone. A signal that stays outside for RELEARN values
    has a new usual level.
    """

    def __init__(self) -> None:
        self._bands: dict[str, _Band] = {}

    def update(
        self, step: int, values: Mapping[str, float], scales: Mapping[str, Scale]
    ) -> dict[str, Outside]:
        """Which of the signals are outside at `step`; the others are learnt. `scales` by the same names.

        >>> bands, scale = Bands(), {"ratio": Scale()}
        >>> found = [bands.update(step, {"ratio": 1e-3}, scale) for step in range(20)]
        >>> bands.update(20, {"ratio": 0.03}, scale)["ratio"].since
        20
        """
        found = {}
        for name, value in values.items():
            outside = self._bands.setdefault(name, _Band()).update(step, value, scales[name])
            if outside is not None:
                found[name] = outside
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; floats survive exactly."""
        return {name: band.state() for name, band in self._bands.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._bands = {name: _Band(**row) for name, row in state.items()}


class _Band:
    def __init__(self, values: list[float] | None = None, out: list[float] | None = None, since: int = 0):
        self._known = RollingWindow(WINDOW, values or [])
        self._out = out or []  # values outside in a row, on the axis
        self._since = since

    def update(self, step: int, value: float, scale: Scale) -> Outside | None:
        at = _on_axis(value, scale.axis)
        sigmas = self._sigmas(at, scale)
        if sigmas <= SIGMAS:
            self._out = []
            if math.isfinite(at):
                self._known.push(at)
            return None
        if not self._out:
            self._since = step
        usual = _from_axis(self._known.median(), scale.axis) if len(self._known) else math.nan
        outside = Outside(value, usual, sigmas, self._since)
        self._out.append(at)
        if len(self._out) >= RELEARN:
            self._known = RollingWindow(WINDOW, [at for at in self._out if math.isfinite(at)])
            self._out = []
        return outside

    def _sigmas(self, at: float, scale: Scale) -> float:
        if at == -math.inf and not scale.low:
            return 0.0  # the log of an exact zero
        if not math.isfinite(at):
            return math.inf
        known = len(self._known)
        if known < KNOWN:
            return 0.0
        middle = self._known.median()
        if at >= middle:
            side = self._known.quantile(1 - TAIL) - middle
            judged = scale.high
        else:
            side = middle - self._known.quantile(TAIL)
            judged = scale.low
        # Few values understate the noise by chance, as in Student's t.
        sigma = max(side / SIGMAS_TO_TAIL * (1 + KNOWN / 2 / known), scale.floor)
        return abs(at - middle) / sigma if judged else 0.0

    def state(self) -> dict[str, Any]:
        return {"values": list(self._known.values), "out": self._out, "since": self._since}


def _on_axis(value: float, axis: str) -> float:
    if axis == "asinh":
        return math.asinh(value)
    if axis == "linear" or not math.isfinite(value):
        return value
    return math.log(value) if value > 0 else -math.inf


def _from_axis(at: float, axis: str) -> float:
    return {"log": math.exp, "asinh": math.sinh, "linear": float}[axis](at)
