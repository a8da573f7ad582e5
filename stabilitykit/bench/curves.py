"""Loss curves with known trouble: planted here from a seed, or labelled files in a folder."""

import csv
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LABELS = "labels.json"
ROWS = 4000
DESCENT = 300  # rows that are not judged: every curve falls steeply at first

Span = tuple[int, int]  # first and last row


@dataclass(frozen=True, slots=True)
class Curve:
    """A log with its truth, in rows: `spikes` are to be found, `ambiguous` may be.

    `kind` is what the last of `spikes` should be called, or "" where any name will do; `grace` the rows
    after its beginning within which that one counts as found.
    """

    name: str
    source: str
    steps: list[float]
    losses: list[float]
    spikes: list[Span] = field(default_factory=list)
    ambiguous: list[Span] = field(default_factory=list)
    judged_from: int = DESCENT
    kind: str = ""
    grace: int = 10


Shape = Callable[[int], float]
SHAPES: dict[str, Shape] = {
    "power": lambda t: 1.7 + 6 * (t + 1) ** -0.35,
    "exponential": lambda t: 2.5 + 5 * math.exp(-t / 300),
    "cosine": lambda t: 2.6 + 4 * (t + 1) ** -0.4 + 0.2 * math.cos(math.pi * t / ROWS),
    "bits": lambda t: 0.9 + 2 * math.exp(-t / 200),
    "negative": lambda t: -3 + 4 * math.exp(-t / 250),
}


def planted(seed: int = 0) -> list[Curve]:
    """Harmless curves and troubled ones, the same for the same seed."""
    draw = random.Random(seed)
    return [*_harmless(draw), *_troubled(draw), _epochs(draw), _slow(draw)]


def _noisy(draw: random.Random, shape: Shape, noise: float, rows: int = ROWS) -> list[float]:
    return [shape(t) + draw.gauss(0, noise) for t in range(rows)]


def _harmless(draw: random.Random) -> list[Curve]:
    power = SHAPES["power"]
    found = {
        f"{name}_noise_{noise}": _noisy(draw, shape, noise)
        for name, shape in SHAPES.items()
        for noise in (0.01, 0.05, 0.3)
    }
    found["decay_tail"] = _noisy(draw, lambda t: power(t) - max(0, t - 3000) * 3e-4, 0.03)
    found["curriculum"] = _noisy(draw, lambda t: power(t) - 0.4 * (t > 2000), 0.03)
    found["batch_size"] = [power(t) + draw.gauss(0, 0.05 if 1500 < t < 3000 else 0.08) for t in range(ROWS)]
    found["heavy_tails"] = [power(t) + 0.04 * _student(draw, 6) for t in range(ROWS)]
    found["ema"] = smoothed(_noisy(draw, power, 0.1), 0.9)
    found["two_digits"] = [round(x, 2) for x in _noisy(draw, power, 0.004)]
    found["plateau"] = [max(round(power(t), 1), 2.2) for t in range(ROWS)]
    steps = _noisy(draw, power, 0.03)
    found["every_20th"] = [steps[t - t % 20] for t in range(ROWS)]
    found["sawtooth"] = _noisy(draw, lambda t: power(t) - 0.08 * (t // 800) + 0.03 * (t % 800) / 800, 0.03)
    wander = smoothed(_noisy(draw, lambda t: 0, 0.13), 0.95)
    found["data_order"] = [power(t) + w + draw.gauss(0, 0.04) for t, w in enumerate(wander)]
    return [_curve(name, losses) for name, losses in found.items()] + [
        _curve("tokens", _noisy(draw, power, 0.05), every=524_288),
        _curve("start_up_hump", _noisy(draw, lambda t: power(t) + _hump(t), 0.03), judged_from=60),
    ]


def _hump(t: int) -> float:
    return 1.2 * math.exp(-(((t - 25) / 5) ** 2))


def smoothed(losses: list[float], keep: float) -> list[float]:
    """The exponential mean that a trainer may log in place of the loss.

    >>> smoothed([4.0, 2.0], 0.5)
    [4.0, 3.0]
    """
    result = losses[:1]
    for loss in losses[1:]:
        result.append(keep * result[-1] + (1 - keep) * loss)
    return result


def _student(draw: random.Random, freedom: int) -> float:
    return draw.gauss(0, 1) / math.sqrt(draw.gammavariate(freedom / 2, 2 / freedom))


@dataclass(frozen=True, slots=True)
class _Plant:
    """What is added at `t` rows after the beginning, `sigmas` of noise being the least height."""

    kind: str
    rows: int | None  # that it lasts; None: to the end
    grace: int
    change: Callable[[int, float], float]


PLANTS: dict[str, _Plant] = {
    "blip": _Plant("spike", 1, 10, lambda t, noise: max(0.3, 10 * noise) * (t == 0)),
    "bump": _Plant("spike", 26, 10, lambda t, noise: max(0.5, 8 * noise) * math.exp(-t / 15) * (t < 40)),
    "cliff": _Plant("spike", 151, 10, lambda t, noise: 3 * math.exp(-t / 60) * (t < 200)),
    "ramp": _Plant("divergence", None, 120, lambda t, noise: min(2.5, 0.02 * t)),
    "creep": _Plant("divergence", None, 1500, lambda t, noise: 0.001 * t),
    "nan": _Plant("nonfinite", None, 10, lambda t, noise: math.nan),
    "shift": _Plant("shift", None, 400, lambda t, noise: max(0.15, 5 * noise)),
}


def _troubled(draw: random.Random) -> list[Curve]:
    curves = []
    for name, plant in PLANTS.items():
        for shape_name, shape in SHAPES.items():
            noise, begin = draw.choice((0.01, 0.03, 0.1)), draw.randrange(1200, 2400)
            losses = _noisy(draw, shape, noise)
            for t in range(begin, ROWS):
                losses[t] += plant.change(t - begin, noise)
            span = (begin, ROWS - 1 if plant.rows is None else begin + plant.rows - 1)
            curve = f"{shape_name}_{name}"
            curves.append(_curve(curve, losses, spikes=[span], kind=plant.kind, grace=plant.grace))
    return curves


def _epochs(draw: random.Random) -> Curve:
    """The same two bad batches in every epoch of 700 steps."""
    bad = [t for t in range(DESCENT, ROWS) if t % 700 in (123, 456)]
    losses = _noisy(draw, lambda t: SHAPES["power"](t) + 0.8 * (t in bad), 0.04)
    return _curve("power_epochs", losses, spikes=[(t, t) for t in bad])


def _slow(draw: random.Random) -> Curve:
    """5 % in 20,000 steps."""
    losses = _noisy(draw, lambda t: 3 + 0.15 * max(0, t - 4000) / 20_000, 0.04, 24_000)
    span = (4000, len(losses) - 1)
    return _curve("flat_slow", losses, spikes=[span], kind="divergence", grace=15_000)


def _curve(name: str, losses: list[float], every: int = 1, **truth: Any) -> Curve:
    shape = name.split("_", 1)[0]
    source = shape if shape in SHAPES else "power"
    return Curve(name, source, [every * t for t in range(len(losses))], losses, **truth)


# --- labelled files -----------------------------------------------------------------------------------

NAMED = {name: plant.kind for name, plant in PLANTS.items()}


def labelled(folder: Path) -> list[Curve]:
    """The CSV files that `folder`/labels.json tells the truth about: {name: {spikes: [[first, last]...],
    ambiguous, judged_from_row, kind: "real" or "injected:PLANT"}}, all in rows.

    What is before the first "_" of a name is its source (after "inj_PLANT_", for an injected one).

    Raises:
        ValueError: no labels, or a file of them that is not there.
    """  # fmt: skip
    path = folder / LABELS
    if not path.is_file():
        raise ValueError(f"expected {LABELS} in {folder}")
    labels: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [_labelled(folder / f"{name}.csv", label) for name, label in labels.items()]


def _labelled(path: Path, label: dict[str, Any]) -> Curve:
    if not path.is_file():
        raise ValueError(f"expected {path}, which {LABELS} names")
    with path.open(encoding="utf-8") as file:
        rows = [(float(row[0]), float(row[1])) for row in list(csv.reader(file))[1:]]
    plant = label["kind"].partition(":")[2]
    base = path.stem.split("_", 2)[2] if plant else path.stem
    return Curve(
        path.stem,
        base.split("_", 1)[0],
        [step for step, _ in rows],
        [loss for _, loss in rows],
        spikes=[(first, last) for first, last in label["spikes"]],
        ambiguous=[(first, last) for first, last in label["ambiguous"]],
        judged_from=label["judged_from_row"],
        kind=NAMED[plant] if plant else "",
        grace=PLANTS[plant].grace if plant else 10,
    )
