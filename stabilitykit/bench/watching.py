"""What a due step costs: of attention on a 10M-parameter GPT, of what moves before the loss on three."""

from typing import Any

import pytorch_lightning as pl

from stabilitykit.bench.overhead import FULL, MIXED, MODELS
from stabilitykit.bench.steps import row, seconds_of_steps
from stabilitykit.callbacks import AttentionMonitor, PrecursorMonitor
from stabilitykit.callbacks.budget import CHOICES, FOLLOW_UPS, PROBES
from stabilitykit.observe.tap import Tap

SHAPE = {**MODELS["gpt_10m"], "batch_size": 8}
CADENCES = (100, 10)
TAP_LIMIT, LIMIT = 1.03, 1.005
PRECURSOR_SHAPES = {"gpt_nano": MODELS["gpt_nano"], "gpt_10m": SHAPE, "gpt_10m_batch_2": MODELS["gpt_10m"]}
PRECURSOR_CADENCE, PRECURSOR_LIMIT = 10, 1.004
LIKE = 3  # pairs of steps per round, of which the fastest count: whatever else runs only adds
WARMUP = 2


def watching_cost(*, rounds: int = 3) -> list[dict[str, Any]]:
    """Step time with attention watched over step time without, every second step of one run.

    - `tap_open`: the tap open for the whole step, what it sees thrown away.
    - `full_due_step`: every head and row of one sequence, forward and backward; context, no limit.
    - `auto_every_100`, `auto_every_10`: a due step with what the budget chooses for that cadence,
      spread over it; `..._covered_within` due steps in which every head and row is then seen.

    `value` is the median over rounds, `interval` their range.
    """
    tapped = _ratios(_Tapped(), rounds)
    full = AttentionMonitor(2, heads=SHAPE["heads"], rows=SHAPE["context"], sequences=1)
    results = [_row("tap_open", tapped, TAP_LIMIT), _row("full_due_step", _ratios(full, rounds), 1.0)]
    for cadence in CADENCES:
        monitor = _Paced(cadence)
        spread = [1 + (ratio - 1) / cadence for ratio in _ratios(monitor, rounds)]
        results.append(_row(f"auto_every_{cadence}", spread, LIMIT))
        covered = _row(f"auto_every_{cadence}_covered_within", [float(monitor.covered_within)], 1.0)
        results.append({**covered, "unit": "due steps"})
    return results


def precursor_cost(*, rounds: int = 3) -> list[dict[str, Any]]:
    """PrecursorMonitor's due step over the plain ones of the same run, spread over its cadence."""
    results = []
    for name, shape in PRECURSOR_SHAPES.items():
        steps = seconds_of_steps(shape, MIXED, [PrecursorMonitor(2)], steps=2 * (WARMUP + LIKE * rounds))
        spread = [1 + (ratio - 1) / PRECURSOR_CADENCE for ratio in ratios(steps, rounds)]
        name = f"{name}/precursors_every_{PRECURSOR_CADENCE}"
        results.append(row(name, spread, "x a plain step", PRECURSOR_LIMIT))
    return results


class _Paced(AttentionMonitor):
    """Due every second step, with the budget of a run in which it is due every `cadence` steps."""

    def __init__(self, cadence: int) -> None:
        super().__init__(every_n_steps=2)
        self.cadence, self.covered_within = cadence, 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._budget.every_n_steps = self.cadence

    def write(self, step: int, values: dict[str, float], detail: dict[str, Any] | None = None) -> None:
        self.covered_within = (detail or {})["budget"]["covered_within"]
        super().write(step, values, detail)


class _Tapped(pl.Callback):
    """Every second step runs under a tap."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._tap = Tap(pl_module, lambda call: None) if batch_idx % 2 else None
        if self._tap:
            self._tap.__enter__()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._tap:
            self._tap.__exit__(None, None, None)


def ratios(steps: list[float], rounds: int) -> list[float]:
    """Per round the fastest of the odd steps over the fastest of the even ones, of the last steps.

    >>> ratios([9.0, 9.0] + [1.0, 2.0, 1.5, 3.0, 1.0, 2.5] * 2, 2)
    [2.0, 2.0]
    """
    last = steps[-2 * LIKE * rounds :]
    parts = [last[i : i + 2 * LIKE] for i in range(0, len(last), 2 * LIKE)]
    return [min(part[1::2]) / min(part[::2]) for part in parts]


def _ratios(watcher: Any, rounds: int) -> list[float]:
    choosing = PROBES + 1 + (CHOICES - 1) * (FOLLOW_UPS + 1) if isinstance(watcher, _Paced) else WARMUP
    steps = 2 * (choosing + LIKE * rounds)
    return ratios(seconds_of_steps(SHAPE, FULL, [watcher], steps=steps), rounds)


def _row(name: str, values: list[float], limit: float) -> dict[str, Any]:
    return row(f"gpt_10m/{name}", values, "x a plain step", limit)
