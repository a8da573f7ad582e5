"""First movers: which signals had left their own band when a loss event was raised, and how long before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stabilitykit.records import Record
from stabilitykit.report.panels import name_of
from stabilitykit.report.reading import counted, number, show
from stabilitykit.runlog import Records

# A signal counts while it is outside its band, and for so many steps after it came back: spikes follow
# a stale second moment within 1 to 8 steps (arXiv 2304.13013).
MEMORY = 8
COLUMNS = ("signal", "steps before", "since step", "where", "value", "usual")


@dataclass(frozen=True, slots=True)
class Mover:
    """A signal outside its band since `since`, in `layers`, the first and farthest in front.

    `value` and `usual` (the band's median) are those of the first layer when it was first seen outside.
    """

    key: str
    since: int
    lead: int  # steps before the event was raised; 0: at the same step
    layers: tuple[str, ...]
    value: float
    usual: float

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table, in the order of `COLUMNS`."""
        where = self.layers[0] + (f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else "")
        return (name_of(self.key), str(self.lead), str(self.since), where, show(self.value), show(self.usual))


def first_movers(records: Records, event: dict[str, Any]) -> list[Mover] | None:
    """The signals that moved up to the event's start, the earliest first; None where none were looked at."""
    start, onset = number(event["start"]), number(event.get("onset", event["start"]))
    looks = [row for row in records.of("precursors") if row.step <= start]
    if not looks:
        return None
    since = onset - max(MEMORY, int(looks[-1].detail.get("every", 1)))
    found: dict[str, list[tuple[int, float, str, float, float]]] = {}
    for row in looks:
        if row.step >= since:
            for signal, outside in _outside(row):
                found.setdefault(signal, []).append(outside)
    movers = [_mover(signal, rows, int(start)) for signal, rows in found.items()]
    return sorted(movers, key=lambda mover: -mover.lead)


def _outside(row: Record) -> Iterator[tuple[str, tuple[int, float, str, float, float]]]:
    for signal, layers in row.detail.get("moved", {}).items():
        for layer, at in layers.items():
            sigmas, value, usual = (number(at[name]) for name in ("sigmas", "value", "usual"))
            yield signal, (int(at["since"]), -sigmas, layer, value, usual)


def _mover(signal: str, rows: list[tuple[int, float, str, float, float]], start: int) -> Mover:
    rows = sorted(rows, key=lambda row: row[:3])
    since, _, _, value, usual = rows[0]
    layers = tuple(dict.fromkeys(layer for _, _, layer, _, _ in rows))
    return Mover(f"precursors/{signal}", since, start - since, layers, value, usual)


def told(records: Records, event: dict[str, Any]) -> str:
    """The first movers of an event in one sentence, "" where none were looked at."""
    movers = first_movers(records, event)
    if movers is None:
        return ""
    what = f"Before the {event['kind']} at step {event['start']}"
    if not movers:
        every = counted(int(records.of("precursors")[-1].detail.get("every", 1)), "step")
        return f"{what} no signal had left its band (looked at every {every})."
    parts = [f"{name_of(mover.key)} {_when(mover.lead)} in {mover.layers[0]}" for mover in movers[:3]]
    more = f", and {counted(len(movers) - 3, 'more signal')}" if len(movers) > 3 else ""
    return f"{what}, outside their own band: {'; '.join(parts)}{more}."


def _when(lead: int) -> str:
    return f"{counted(lead, 'step')} before" if lead else "at the same step"
