"""The usual range of many signals, each against its own past; no torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stabilitykit.numerics.robust import RollingWindow

LEVEL = 16  # values whose median is the usual one
WINDOW = 64  # deviations from it that are the usual ones
KNOWN = 16  # of them before a value is judged
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
    """A value outside its band since step `since`, the usual one, and how many sigmas it is off."""

    value: float
    usual: float
    sigmas: float
    since: int


class Bands:
    """One robust band per signal, about the median of its last LEVEL values that were not outside.

    A value is outside when it is more than SIGMAS robust standard deviations off what that median
    promises, or not finite. The deviations are those of the last WINDOW values, so that a steady course
    is not outside for that alone; each side has its own, from the 10 % or 90 % quantile. A signal that
    stays outside for RELEARN values has a new usual level.
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
    def __init__(
        self,
        level: Sequence[float] = (),
        off: Sequence[float] = (),
        out: Sequence[float] = (),
        since: int = 0,
    ):
        self._level = RollingWindow(LEVEL, level)
        self._off = RollingWindow(WINDOW, off)  # how far values were from the level of their time
        self._out = list(out)  # values outside in a row
        self._since = since

    def update(self, step: int, value: float, scale: Scale) -> Outside | None:
        at = _on_axis(value, scale.axis)
        usual, sigmas = self._judged(at, scale)
        if sigmas <= SIGMAS:
            self._out.clear()
            if math.isfinite(at):
                self._learn(at)
            return None
        if not self._out:
            self._since = step
        self._out.append(at)
        if len(self._out) == RELEARN:
            self._level = RollingWindow(LEVEL, [at for at in self._out if math.isfinite(at)])
            self._out.clear()
        return Outside(value, _from_axis(usual, scale.axis), sigmas, self._since)

    def _learn(self, at: float) -> None:
        if len(self._level):
            self._off.push(at - self._level.median())
        self._level.push(at)

    def _judged(self, at: float, scale: Scale) -> tuple[float, float]:
        """The usual value, and how many sigmas `at` is off it to a side that is judged."""
        known = len(self._off)
        lag = self._off.median() if known else 0.0  # of a signal on a steady course
        usual = self._level.median() + lag if len(self._level) else math.nan
        if at == -math.inf and not scale.low:
            return usual, 0.0  # the log of an exact zero
        if not math.isfinite(at):
            return usual, math.inf
        if known < KNOWN or not (scale.high if at >= usual else scale.low):
            return usual, 0.0
        side = self._off.quantile(1 - TAIL) - lag if at >= usual else lag - self._off.quantile(TAIL)
        # Few values understate the noise by chance, as in Student's t.
        sigma = max(side / SIGMAS_TO_TAIL * (1 + KNOWN / 2 / known), scale.floor)
        return usual, abs(at - usual) / sigma

    def state(self) -> dict[str, Any]:
        return {
            "level": list(self._level.values),
            "off": list(self._off.values),
            "out": list(self._out),
            "since": self._since,
        }


def _on_axis(value: float, axis: str) -> float:
    if axis == "asinh":
        return math.asinh(value)
    if axis == "linear" or not math.isfinite(value):
        return value
    return math.log(value) if value > 0 else -math.inf


def _from_axis(at: float, axis: str) -> float:
    return {"log": math.exp, "asinh": math.sinh, "linear": float}[axis](at)
