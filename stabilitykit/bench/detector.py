"""The loss-spike detector: how fast, in how much memory, and how right beside the rules of others."""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from stabilitykit.bench.curves import Curve, Span, labelled, planted
from stabilitykit.bench.peers import PEERS
from stabilitykit.bench.steps import row
from stabilitykit.numerics.history import find_events
from stabilitykit.numerics.spikes import SpikeDetector

MICROSECONDS, SECONDS, MEMORY = 20.0, 30.0, 1.1  # limits; the last: peak of 1e6 rows over that of 1e5
RECALL, FALSE_PER_10K, KINDS = 0.98, 0.1, 19 / 21
TIMED_ROWS, MANY_ROWS = 100_000, 1_000_000
OURS = "stabilitykit"
GRID = list(product((5.5, 6.5, 7.5), (2.25, 2.75, 3.25)))  # threshold, slack


@dataclass(frozen=True, slots=True)
class Score:
    """Counts over some curves; false alarms are of the rows judged."""

    found: int = 0
    troubles: int = 0
    false: int = 0
    rows: int = 0
    named: int = 0
    to_name: int = 0

    def __add__(self, other: "Score") -> "Score":
        return Score(*(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    @property
    def counts(self) -> tuple[int, ...]:
        """The fields in order."""
        return (self.found, self.troubles, self.false, self.rows, self.named, self.to_name)

    @property
    def figures(self) -> dict[str, float]:
        """Recall, precision, F1 (1 where there was nothing to find), false alarms per 10,000 rows."""
        recall = self.found / self.troubles if self.troubles else 1.0
        said = self.found + self.false
        precision = self.found / said if said else 1.0
        f1 = 2 * self.found / (said + self.troubles) if said + self.troubles else 1.0
        return {
            "recall": recall,
            "precision": precision,
            "f1": f1,
            "false_per_10k": 1e4 * self.false / self.rows if self.rows else 0.0,
        }


def detector(rounds: int = 5, data: Path | None = None) -> list[dict[str, Any]]:
    """Per figure its value beside a limit; `interval` is the span over rounds, or the value itself.

    Every rule is scored on the same curves: planted ones, or with `data` the labelled files of a folder.
    `left_out/...` is the worst over sources when the options are tuned on all other sources.

    Raises:
        ValueError: `data` without labels.
    """
    curves = planted() if data is None else labelled(data)
    results = [_speed(rounds), *_command()]
    ours = sum((score_ours(curve) for curve in curves), Score())
    named = ours.named / ours.to_name if ours.to_name else 1.0
    limits = {"recall": RECALL, "false_per_10k": FALSE_PER_10K}
    results += [row(f"{OURS}/{name}", [v], name, limits.get(name, v)) for name, v in ours.figures.items()]
    results.append(row(f"{OURS}/kinds_right", [named], "share, at least", KINDS))
    for name, rule in PEERS.items():
        theirs = sum((judge(curve, list(rule(curve.losses))) for curve in curves), Score())
        for figure, value in theirs.figures.items():
            results.append(row(f"{name}/{figure}", [value], f"{figure}; limit: ours", ours.figures[figure]))
    return results + left_out(curves)


def score_ours(curve: Curve, *, threshold: float = 6.5, slack: float = 2.75) -> Score:
    """The detector's counts on one curve."""
    place = {step: row for row, step in enumerate(curve.steps)}
    detector = SpikeDetector(threshold=threshold, slack=slack)
    events = find_events(zip(curve.steps, curve.losses, strict=True), detector)
    starts = [place[event.start] for event in events]
    spans = [(place[event.start], place[event.end]) for event in events if event.end is not None]
    score = judge(curve, starts, spans)
    if not curve.kind:
        return score
    last = curve.spikes[-1][0]
    kinds = [event.kind for event, start in zip(events, starts, strict=True) if start >= last - 1]
    return score + Score(named=curve.kind in kinds[:2], to_name=1)


def judge(curve: Curve, starts: Sequence[int], spans: Sequence[Span] = ()) -> Score:
    """Counts of alarms at rows `starts`; `spans` are the events that ended.

    A trouble is found when an alarm is in it or in its grace, or when an event of at most 50 rows covers
    its beginning. An alarm is false outside troubles (and 50 rows after) and ambiguous stretches; those
    within 50 rows of each other count once.
    """
    starts = sorted(row for row in starts if row >= curve.judged_from)
    found = sum(_found(curve, number, starts, spans) for number in range(len(curve.spikes)))
    false, last = 0, -1000
    for start in starts:
        near = any(first - 3 <= start <= end + 50 for first, end in curve.spikes)
        if not near and not any(first - 5 <= start <= end + 5 for first, end in curve.ambiguous):
            false += start - last > 50
            last = start
    return Score(found, len(curve.spikes), false, len(curve.losses) - curve.judged_from)


def _found(curve: Curve, number: int, starts: Sequence[int], spans: Sequence[Span]) -> bool:
    first, last = curve.spikes[number]
    planted_one = bool(curve.kind) and number == len(curve.spikes) - 1
    end = min(last, first + curve.grace) if planted_one else last + curve.grace
    if any(first - 1 <= row <= end for row in starts):
        return True
    return any(begin <= first <= over and over - begin <= 50 for begin, over in spans)


def left_out(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """The worst recall, F1 and false alarms over sources, each scored with options tuned on the others.

    The options of the best F1 on the others are taken; of those that tie, the middle one of GRID.
    """
    scores: list[dict[str, Score]] = [{} for _ in GRID]
    for own, (threshold, slack) in zip(scores, GRID, strict=True):
        for curve in curves:
            score = score_ours(curve, threshold=threshold, slack=slack)
            own[curve.source] = own.get(curve.source, Score()) + score
    worst: dict[str, list[float]] = {}
    for source in sorted({curve.source for curve in curves}):
        others = [sum((s for name, s in row.items() if name != source), Score()) for row in scores]
        best = max(score.figures["f1"] for score in others)
        ties = [place for place, score in enumerate(others) if score.figures["f1"] == best]
        chosen = scores[ties[len(ties) // 2]][source].figures
        for name, value in chosen.items():
            worst.setdefault(name, []).append(value)
    unit = "worst source, options tuned on the others"
    limits = {"recall": RECALL, "precision": RECALL, "f1": RECALL, "false_per_10k": FALSE_PER_10K}
    return [
        row(f"left_out/{name}", [max(values) if "false" in name else min(values)], unit, limits[name])
        for name, values in worst.items()
    ]


def _speed(rounds: int) -> dict[str, Any]:
    draw = random.Random(0)
    losses = [2 + 3 / (1 + t / 1000) + draw.gauss(0, 0.05) for t in range(TIMED_ROWS)]
    found = []
    for _ in range(rounds):
        update = SpikeDetector().update
        started = time.perf_counter()
        for step, loss in enumerate(losses):
            update(step, loss)
        found.append((time.perf_counter() - started) / TIMED_ROWS * 1e6)
    return row("update", found, "microseconds, at most", MICROSECONDS)


def _command() -> list[dict[str, Any]]:
    """Seconds of a million rows through the command, and its peak memory beside a tenth of them."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        _, small = _spikes(_written(log, MANY_ROWS // 10))
        seconds, large = _spikes(_written(log, MANY_ROWS))
    return [
        row("million_rows", [seconds], "s, at most", SECONDS),
        row("million_rows_memory", [large / small], "x the peak of 100,000 rows, at most", MEMORY),
    ]


def _written(log: Path, rows: int) -> Path:
    draw = random.Random(0)
    with log.open("w", encoding="utf-8") as file:
        file.write("step,loss\n")
        for t in range(rows):
            file.write(f"{t},{2 + 3 / (1 + t / 1000) + draw.gauss(0, 0.05):.5f}\n")
    return log


def _spikes(log: Path) -> tuple[float, int]:
    """Seconds and peak memory of the command on a log."""
    command = [sys.executable, "-m", "stabilitykit.cli", "spikes", str(log), "--format", "json"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise ValueError(f"expected exit code 0 of {' '.join(command)}, got {process.returncode}")
    return time.perf_counter() - started, used.ru_maxrss
