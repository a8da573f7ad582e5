"""What each monitor adds to a training step: interleaved real Trainer runs with and without it."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stabilitykit.bench.steps import row, seconds_of_steps
from stabilitykit.callbacks import AttentionMonitor, LossMonitor, WeightMonitor

MODELS: dict[str, dict[str, int]] = {
    "gpt_nano": {"layers": 4, "width": 128, "heads": 4, "context": 256, "batch_size": 8},
    "gpt_10m": {"layers": 6, "width": 384, "heads": 6, "context": 256, "batch_size": 2},
}
MIXED, FULL = "bf16-mixed", "32-true"
STEPS, WARMUP = 14, 2  # of every run; the first are not counted: allocation, first touch
EVERY, WINDOW = 7, 6  # due on steps 6 and 13; a window of twins on steps 6 to 11
ATTENTION_CADENCE = 100  # the defaults, over which the cost of a due step is spread
TWIN_CADENCE, TWIN_WINDOW = 1000, 10

Monitors = Callable[[], list[Any]]


def _lockstep() -> list[Any]:
    # Never due within the bench: the twin's step alone, without a measurement.
    return [WeightMonitor(every_n_steps=10**6, window=None, arms=["float32"], floor_seeds=0)]


CASES: dict[str, tuple[str, Monitors]] = {
    "plain": (MIXED, list),
    "loss": (MIXED, lambda: [LossMonitor()]),
    "skip": (MIXED, lambda: [LossMonitor(action="skip")]),
    "attention": (MIXED, lambda: [AttentionMonitor(EVERY)]),
    "both": (MIXED, lambda: [LossMonitor(), AttentionMonitor(EVERY)]),
    "windowed": (MIXED, lambda: [WeightMonitor(EVERY, window=WINDOW)]),
    "lockstep": (MIXED, _lockstep),
    "float32": (FULL, list),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio of step times and the limit it is held against."""

    value: float
    limit: float


def overhead(*, rounds: int = 3) -> list[dict[str, Any]]:
    """Per model: step time with a monitor over step time without, every case once per round.

    Monitors that are due now and then are spread over their default cadence (`..._every_100`: steps;
    `windowed_twins`: window 10 every 1000, one arm and three jitter seeds). The limit of a watching
    monitor is 1; that of a float32 twin in lockstep 1 + t_float32 / t_main, both from this run. `value`
    is the median over rounds, `interval` their middle half, `ratio` the median of value / limit.
    """
    results = []
    for model, shape in MODELS.items():
        found: dict[str, list[Figure]] = {}
        for _ in range(rounds):
            times = {
                name: seconds_of_steps(shape, precision, monitors(), steps=STEPS)
                for name, (precision, monitors) in CASES.items()
            }
            for name, figure in figures(times).items():
                found.setdefault(name, []).append(figure)
        results += [_row(f"{model}/{name}", values) for name, values in found.items()]
    return results


def figures(times: dict[str, list[float]]) -> dict[str, Figure]:
    """The ratios of one round, from the seconds of every step of every case.

    A step's time is the fastest of its like: whatever else runs on the machine only adds. What is due
    now and then is held against the other steps of its own run, where it costs no kernel (a test counts).
    """
    plain = min(times["plain"][WARMUP:])
    result = {name: Figure(min(times[name][WARMUP:]) / plain, 1.0) for name in ("loss", "skip")}
    for name in ("attention", "both"):
        rest, due = _rest_and_due(times[name])
        constant = rest / plain if name == "both" else 1.0
        result[f"{name}_due_step"] = Figure(constant * due / rest, 1.0)
        spread = 1 + (due / rest - 1) / ATTENTION_CADENCE
        result[f"{name}_every_{ATTENTION_CADENCE}"] = Figure(constant * spread, 1.0)
    first, *middle, last = times["windowed"][EVERY - 1 : EVERY - 1 + WINDOW]
    rest, inside = min(times["windowed"][WARMUP : EVERY - 1]), min(middle)
    fork_and_measure = max(first + last - 2 * inside, 0.0)
    spread = 1 + (TWIN_WINDOW * (inside - rest) + fork_and_measure) / (TWIN_CADENCE * rest)
    result["windowed_twins"] = Figure(spread, 1.0)
    limit = 1 + min(times["float32"][WARMUP:]) / plain
    return {**result, "lockstep_float32_twin": Figure(min(times["lockstep"][WARMUP:]) / plain, limit)}


def _rest_and_due(steps: list[float]) -> tuple[float, float]:
    """The fastest step of those that are not due, and of those that are."""
    rest = steps[WARMUP : EVERY - 1] + steps[EVERY : 2 * EVERY - 1]
    return min(rest), min(steps[EVERY - 1 :: EVERY])


def _row(name: str, found: list[Figure]) -> dict[str, Any]:
    limit = statistics.median(figure.limit for figure in found)
    ratio = statistics.median(figure.value / figure.limit for figure in found)
    return row(name, [figure.value for figure in found], "x a plain step", limit) | {"ratio": ratio}
