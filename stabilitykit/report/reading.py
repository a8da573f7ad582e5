"""What the views take from the records: numbers, events, the layers and heads of attention."""

import math
import re
from collections.abc import Iterable
from typing import Any

from stabilitykit.records import Record
from stabilitykit.runlog import Records

Layers = dict[str, list[tuple[int, dict[str, Any]]]]
LOSS_NOUNS = {
    "spike": "loss spike",
    "divergence": "loss divergence",
    "nonfinite": "non-finite loss",
    "shift": "loss shift",
    "transient": "start-up transient",
}


def number(value: Any) -> float:
    """A number from a record's detail, where non-finite ones are spelled out; NaN for no number.

    >>> [number(value) for value in (3, "-inf", "flash", None)]
    [3.0, -inf, nan, nan]
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def show(value: float) -> str:
    """At most four significant digits, as a person writes them.

    >>> [show(v) for v in (6.1043, 0.0, 1234.6, 1.5e-7, float("nan"))]
    ['6.104', '0', '1235', '1.5e-07', 'nan']
    """
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def counted(count: int, noun: str) -> str:
    """A count and its noun, in the plural when it is not one.

    >>> counted(1, "step"), counted(1234, "non-finite loss")
    ('1 step', '1,234 non-finite losses')
    """
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}" + ("es" if noun.endswith("ss") else "s")


def events(records: Records) -> list[dict[str, Any]]:
    """The last state of every event, by start: the closing record replaces the opening one."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in records.of("event"):
        event = {"start": row.step, **row.detail}
        last[(event.get("monitor"), event.get("id"), event["start"])] = event
    return sorted(last.values(), key=lambda event: number(event["start"]))


def is_about(event: dict[str, Any], subject: str) -> bool:
    """Whether an event is of the monitor of `subject`, "loss" or "attention", and of that very number.

    >>> is_about({"monitor": "LossMonitor"}, "loss"), is_about({"monitor": "attention"}, "loss")
    (True, False)
    >>> is_about({"monitor": "LossMonitor", "kind": "dead_gradient"}, "loss")
    False
    """
    ours = subject in str(event.get("monitor", "loss")).lower()
    return ours and (subject != "loss" or event.get("kind", "spike") in LOSS_NOUNS)


def layers(rows: Iterable[Record]) -> Layers:
    """Layer name -> (step, numbers) pairs in step order; layers in their natural order."""
    found: Layers = {}
    for row in rows:
        for name, numbers in row.detail.get("layers", {}).items():
            found.setdefault(name, []).append((row.step, numbers))
    return dict(sorted(found.items(), key=lambda item: _natural(item[0])))


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Every name without the parts that all of them share, but for the word before a bare number.

    >>> short_names(["model.blocks.0.attn", "model.blocks.1.attn"])
    {'model.blocks.0.attn': 'blocks.0', 'model.blocks.1.attn': 'blocks.1'}
    """
    names = list(names)
    split = [name.split(".") for name in names]
    shortest = min(map(len, split), default=0)
    front = 0
    while front < shortest - 1 and len({parts[front] for parts in split}) == 1:
        front += 1
    back = 0
    while back < shortest - 1 - front and len({parts[-1 - back] for parts in split}) == 1:
        back += 1
    if len(names) < 2:
        return {name: name for name in names}
    start = max(0, front - 1) if all(parts[front].isdigit() for parts in split) else front
    return {n: ".".join(p[start : len(p) - back]) for n, p in zip(names, split, strict=True)}


def _natural(name: str) -> list[tuple[bool, int, str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
