"""What the recent, untroubled losses promise for the next one: level, noise and slow rise."""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from stabilitykit.numerics.robust import RollingWindow

LEVEL_ROWS = 8  # the local level is short, so that it lags a steep opening descent by four rows only
SLOW_ROWS = 32  # memory of the slow mean, which is then as noisy as a plain mean of 64 rows
HUMP_ROWS = 4
PACE = 16  # by how much the memory of the mean that sees a creep is longer
TREND_ROWS = 64  # learnt rows between the marks whose differences give the descent
FORESIGHT = 1000  # rows for which a descent is taken to go on
FINE = 4  # decimals from which on a loss is not met again by chance
HELD_MOVE = 2.0  # last digits by which a coarser log has to move for a repeated row to be no new evidence
KNOWN_ROWS = 8  # residuals from which on the noise is measured rather than assumed
UNKNOWN_NOISE = 0.05  # the noise assumed until then: of the level, or of 1 if that is more
# The noise is read off the residuals' 10 % and 90 % quantiles, 1.2816 Gaussian sigmas from the median;
# the MAD, which sees the inner half only, reads zero on a log rounded to one decimal.
TAIL, SIGMAS_TO_TAIL = 0.1, 1.2816
RELATIVE_FLOOR = 0.002  # of the level: less noise than this is not told from rounding


class RunningMean:
    """An exponential mean over `memory` rows, and the lowest it has been since its memory was full."""

    def __init__(self, memory: int):
        self.memory = memory
        self.count = 0
        self.value = self.lowest = 0.0

    @property
    def rise(self) -> float:
        """How far it is above its lowest."""
        return self.value - self.lowest

    def learn(self, loss: float) -> None:
        """Takes a row in."""
        self.count += 1
        self.value += (loss - self.value) / min(self.count, self.memory)
        # A mean of few rows is low by chance, and would stay the lowest.
        self.lowest = min(self.lowest, self.value) if self.count >= self.memory else self.value


class Baseline:
    """The running course of a loss, from the rows it was told to learn (the unflagged ones).

    `slow` and `slower` are their means over SLOW_ROWS and PACE times as many, `bottom` the lowest level.
    """

    def __init__(self, window: int, floor: float):
        self.floor = floor
        self._noise = RollingWindow(window)  # residuals about the local level at their time
        self._grain = 0.0  # the smallest change ever seen: what the log was rounded to, or nearly 0
        self._move, self._moves = 0.0, 0  # the mean size of changes that are not 0, and how many there were
        self._decimals = 0  # with how many the log is written, FINE or more being much alike
        self._near = self._far = 0.0  # mean squared changes over one row, and over LEVEL_ROWS
        self._changes = 0
        self.restart()

    def restart(self, losses: Iterable[float] = (), *, forget_noise: bool = False) -> None:
        """Forgets the level, then learns `losses`; the noise is kept unless told otherwise."""
        if forget_noise:
            self._noise = RollingWindow(self._noise.size)
            self._near = self._far = 0.0
            self._changes = 0
        self._level = RollingWindow(LEVEL_ROWS)
        self.level: float | None = None  # the median of the last few rows
        self.bottom = math.inf  # until there are LEVEL_ROWS
        self.slow, self.slower = RunningMean(SLOW_ROWS), RunningMean(PACE * SLOW_ROWS)
        self._marks: deque[float] = deque(maxlen=5)  # the slow mean now and then, for the descent
        for loss in losses:
            self.learn(loss)

    def settle(self) -> None:
        """Takes the present level for a new one: what came before is not its lowest."""
        self.restart(list(self._level.values))

    def repeats(self, loss: float) -> bool:
        """Whether the last loss is held in the log: it is met again, which by chance would be rare.

        White noise that moves by m of its last digits on average repeats itself in a third of 1 / m of
        the rows.
        """
        if not len(self._level) or loss != self._level.values[-1]:
            return False
        return self._decimals >= FINE or self._move > HELD_MOVE * 10.0**-self._decimals

    @property
    def hump(self) -> tuple[float, float]:
        """How far the mean of the last HUMP_ROWS is above `bottom`, and one deviation of the changes.

        The noise of a start-up is not known from its few residuals, which its own fall has stretched;
        until HUMP_ROWS changes were seen it may be anything.
        """
        last = list(self._level.values)[-HUMP_ROWS:]
        noise = max(math.sqrt(self._near / 2), self.floor) if self._changes >= HUMP_ROWS else math.inf
        return sum(last) / len(last) - self.bottom, noise

    @property
    def persistence(self) -> float:
        """In how many rows the noise is new: 1 when white, (1 + r) / (1 - r) or less for an AR(1) of r.

        Rows of a log that was smoothed, or of data in an order, are no independent evidence. The ratio
        of changes over LEVEL_ROWS to those over one is (1 - r^8) / (1 - r); its power 1.5 comes near.
        """
        return max(1.0, self._far / self._near) ** 1.5 if self._near else 1.0

    def fall(self, rows: int) -> float:
        """How far the loss is expected to fall in the next `rows`, never negative.

        The descent of late goes on as that of a power law does, ever slower.
        """
        if len(self._marks) < 2:
            return 0.0
        slope = (self._marks[0] - self._marks[-1]) / (TREND_ROWS * (len(self._marks) - 1))
        return max(0.0, slope) * self.slow.count * math.log1p(min(rows, FORESIGHT) / self.slow.count)

    def expect(self, loss: float) -> tuple[float, float]:
        """The loss promised in place of `loss`, and one robust standard deviation of the noise."""
        level, known = self.level, len(self._noise)
        if level is None:
            return loss, UNKNOWN_NOISE * max(abs(loss), 1.0)
        if known < KNOWN_ROWS:
            largest = max((abs(residual) for residual in self._noise.values), default=0.0)
            return level, max(UNKNOWN_NOISE * max(abs(level), 1.0), 0.45 * largest, self.floor)
        low, lag, high = self._noise.tails(TAIL)
        upper, lower = (high - lag) / SIGMAS_TO_TAIL, (lag - low) / SIGMAS_TO_TAIL
        # A steep descent still in the window makes the lower side long; it is not noise. And few
        # residuals understate the noise by chance, as in Student's t.
        noise = min((upper + lower) / 2, 1.5 * upper) * (1 + KNOWN_ROWS / known)
        # Where a descent ends at a corner, the next loss is not lower than the last ones.
        promised = max(level + lag, self._level.quantile(0.0))
        return promised, max(noise, RELATIVE_FLOOR * abs(level), self._grain / 2, self.floor)

    def learn(self, loss: float) -> None:
        """Takes an unflagged row in, unless it is held."""
        if self.repeats(loss):
            return
        rows = self._level.values
        while self._decimals < FINE and round(loss, self._decimals) != loss:
            self._decimals += 1
        if self.level is not None:
            change = abs(loss - rows[-1])
            if change and not self._moves:
                self._noise = RollingWindow(self._noise.size)  # of one value held so far: no measure of noise
            self._noise.push(loss - self.level)
            if len(rows) == LEVEL_ROWS:
                self._changes = min(self._changes + 1, self._noise.size)
                self._near += (change**2 - self._near) / self._changes
                # The cap keeps the opening descent, which is no noise, from being remembered for long.
                self._far += (min((loss - rows[0]) ** 2, 16 * self._near) - self._far) / self._changes
            if change:
                self._grain = min(change, self._grain or change)
                self._moves = min(self._moves + 1, self._noise.size)
                self._move += (change - self._move) / self._moves
        self._level.push(loss)
        self.level = self._level.median()
        if len(rows) == LEVEL_ROWS and self.level < self.bottom:
            self.bottom = self.level
        self.slow.learn(loss)
        self.slower.learn(loss)
        if self.slow.count % TREND_ROWS == 0:
            self._marks.append(self.slow.value)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; floats survive exactly."""
        return {
            "noise": list(self._noise.values),
            "level": list(self._level.values),
            "grain": [self._grain, self._move, self._moves, self._decimals],
            "bottom": None if self.bottom == math.inf else self.bottom,
            "changes": [self._changes, self._near, self._far],
            "count": self.slow.count,
            "slow": [self.slow.value, self.slow.lowest],
            "slower": [self.slower.value, self.slower.lowest],
            "marks": list(self._marks),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; the options stay this object's own."""
        self._noise = RollingWindow(self._noise.size, state["noise"])
        self._level = RollingWindow(LEVEL_ROWS, state["level"])
        self.level = self._level.median() if len(self._level) else None
        self._grain, self._move, self._moves, self._decimals = state["grain"]
        self.bottom = math.inf if state["bottom"] is None else state["bottom"]
        self._changes, self._near, self._far = state["changes"]
        for mean, (value, lowest) in ((self.slow, state["slow"]), (self.slower, state["slower"])):
            mean.count, mean.value, mean.lowest = state["count"], value, lowest
        self._marks = deque(state["marks"], maxlen=self._marks.maxlen)
