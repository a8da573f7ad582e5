"""The signals of PrecursorMonitor: how each is judged, per layer from what was measured, and the worst."""

import math
from collections.abc import Mapping
from typing import Any

from stabilitykit.numerics.bands import Bands, Scale
from stabilitykit.observe.attention import worst
from stabilitykit.observe.forward import layer_of

RUN = "(run)"  # where a signal is of the whole run
# In the order in which they are told: what moves first by its nature first. Gradients and ratios are
# feared high, a loss scale low, what the forward pass shows to either side. The floors are what a healthy
# run's noise is granted at least: 8 sigmas of them are 50 %, 8 % of gradients, 16 % of entropy, 3 halvings.
SCALES: dict[str, Scale] = {
    "update_ratio": Scale(),
    "rms": Scale(),
    "entropy": Scale("linear", low=True, floor=0.02),
    "max_logit": Scale("asinh", low=True),
    "eps_share": Scale("linear", floor=0.01),
    "log_z": Scale("asinh", low=True),
    "outlier": Scale(floor=0.1),
    "max_weight": Scale(),
    "loss_scale": Scale(high=False, low=True, floor=3 * math.log(2) / 8),
    "grad_norm": Scale(floor=0.1),
}

Layers = dict[str, dict[str, float]]


def per_layer(parameters: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int]) -> Layers:
    """The signals of each layer from the numbers of its parameters, as `Updates.read` gives them.

    Norms are of the layer as one vector, RMS_t is that of its worst tensor.

    >>> numbers = {"b.0.w": {"grad": 3.0, "update": 0.5, "weight": 2.0}, "b.0.v": {"grad": 4.0}}
    >>> per_layer(numbers, {"b.0.w": 9, "b.0.v": 9})
    {'b.0': {'grad_norm': 5.0, 'update_ratio': 0.25}}
    """
    members: dict[str, list[str]] = {}
    for name in parameters:
        members.setdefault(layer_of(name), []).append(name)
    return {
        layer: _signals([parameters[name] for name in names], [sizes[name] for name in names])
        for layer, names in members.items()
    }


def _signals(rows: list[Mapping[str, float]], sizes: list[int]) -> dict[str, float]:
    found = {"grad_norm": _norm(rows, "grad")}
    if any("update" in row for row in rows):
        weight, update = _norm(rows, "weight"), _norm(rows, "update")
        found["update_ratio"] = update / weight if weight else (math.inf if update else 0.0)
    small = [(row["small"], size) for row, size in zip(rows, sizes, strict=True) if "small" in row]
    if small:
        found["eps_share"] = sum(share * size for share, size in small) / sum(size for _, size in small)
    for name, of in {"rms": "rms", "max_weight": "peak"}.items():
        numbers = [row[of] for row in rows if of in row]
        if numbers:
            found[name] = math.nan if any(map(math.isnan, numbers)) else max(numbers)
    return found


def _norm(rows: list[Mapping[str, float]], of: str) -> float:
    return math.sqrt(sum(row[of] ** 2 for row in rows if of in row))


def without(layers: Layers, signal: str) -> Layers:
    """The layers but for one of their signals."""
    return {layer: {name: row[name] for name in row if name != signal} for layer, row in layers.items()}


def judged(bands: Bands, step: int, layers: Layers, whole: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Signal -> layer -> how it is outside its own band; `whole` are signals of the whole run."""
    signals = {
        f"{name}/{at}": value for at, row in {**layers, RUN: whole}.items() for name, value in row.items()
    }
    scales = {key: SCALES[key.partition("/")[0]] for key in signals}
    moved: dict[str, dict[str, Any]] = {}
    for key, outside in bands.update(step, signals, scales).items():
        name, _, layer = key.partition("/")
        moved.setdefault(name, {})[layer] = outside._asdict()
    return {name: moved[name] for name in SCALES if name in moved}


def values_of(layers: Layers, whole: Mapping[str, float], moved: Mapping[str, Any]) -> dict[str, float]:
    """The record's values: each signal's worst over the layers, and how many are outside their band."""
    numbers = worst(list(layers.values())) | dict(whole)
    values = {f"precursors/{name}": numbers[name] for name in SCALES if name in numbers}
    return {**values, "precursors/moved": float(sum(map(len, moved.values())))}
