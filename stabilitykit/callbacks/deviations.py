"""When an attention kernel's deviation is an event: several looks at one head over the limit, or a NaN."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stabilitykit.catalog import CATALOG
from stabilitykit.numerics.event import Event
from stabilitykit.records import spell

LOOKS, OVER = 5, 3  # of the last five looks at one number of one head, three over its limit

WHOLE = -1  # stands for a head where a number is of a layer's heads together


class Judged(NamedTuple):
    """The catalog's key that judges a number of a head's row, its name, whether one look is enough."""

    key: str
    words: str
    at_once: bool = False


ATTENTION: dict[str, Judged] = {
    "roundoff_ratio": Judged("attention/roundoff_ratio", "output roundoff ratio"),
    "nonfinite": Judged("attention/nonfinite", "NaN or inf in the output", True),
    "delta_bias": Judged("attention/delta_bias", "delta bias"),
    **{
        f"{grad}_roundoff_ratio": Judged("attention/grad_roundoff_ratio", f"{grad} roundoff ratio")
        for grad in ("dq", "dk", "dv")
    },
    **{
        f"{grad}_nonfinite": Judged("attention/grad_nonfinite", f"NaN or inf in {grad}", True)
        for grad in ("dq", "dk", "dv")
    },
}

Place = tuple[str, int]  # layer, head


@dataclass(slots=True)
class _Open:
    """An event that is not over, the worst seen at each of its places, and which of them still are."""

    event: Event
    worst: dict[Place, dict[str, Any]] = field(default_factory=dict)
    now: set[Place] = field(default_factory=set)


class Deviations:
    """Turns the numbers of due steps into events, one for all heads that went over together.

    Args:
        monitor: the events' monitor; `says` begins their message.
        judged: which numbers of a head's row are looked at.
    """

    def __init__(
        self,
        monitor: str = "attention",
        says: str = "attention differs from exact attention",
        judged: Mapping[str, Judged] = ATTENTION,
    ):
        self._monitor, self._says, self._judged = monitor, says, judged
        self._looks: dict[tuple[str, int, str], list[tuple[int, bool]]] = {}
        self._open: list[_Open] = []
        self._next_id = 1

    def suspects(self, layer: str) -> list[int]:
        """Heads of `layer` with a number over its limit in the last looks: worth a look each time."""
        found = (at for at, looks in self._looks.items() if at[0] == layer and any(o for _, o in looks))
        return sorted({head for _, head, _ in found})

    def update(self, step: int, layers: dict[str, Any]) -> list[dict[str, Any]]:
        """The events, as records hold them, that open or close with the numbers of `step`."""
        fresh: dict[Place, dict[str, Any]] = {}
        for name, row in layers.items():
            for head in row["heads"]:
                for number in self._judged:
                    if number in head:
                        self._look(step, name, row, head, number, fresh)
        told = self._opened(step, fresh)
        return [*told, *self._closed(step)]

    def pending(self) -> list[dict[str, Any]]:
        """Events still open, as they stand."""
        return [self._told(open_) for open_ in self._open]

    def _look(
        self,
        step: int,
        name: str,
        row: dict[str, Any],
        head: dict[str, Any],
        number: str,
        fresh: dict[Place, dict[str, Any]],
    ) -> None:
        key, words, at_once = self._judged[number]
        limit = CATALOG[key].limit(row["dtype"])
        if limit is None:
            return
        value = abs(head[number])
        at, over = (name, head["head"], number), value >= limit
        looks = [*self._looks.get(at, []), (step, over)][-LOOKS:]
        if not any(over for _, over in looks):
            self._looks.pop(at, None)
            return
        self._looks[at] = looks
        since = next(step for step, over in looks if over)
        found = {
            "number": words,
            "value": head[number],
            "limit": limit,
            "share": value / limit,
            "step": step,
            "since": since,
            "dtype": row["dtype"],
            "rank": head.get("rank"),
        }
        place = at[:2]
        certain = at_once or sum(over for _, over in looks) >= OVER
        if over and (open_ := self._home(place)) is not None and (place in open_.worst or certain):
            _worsen(open_.worst, place, found)
            open_.now.add(place)
        elif over and certain:
            _worsen(fresh, place, found)

    def _home(self, place: Place) -> _Open | None:
        # Heads of a layer in an open event belong to it: they come into view one after the other.
        return next((o for o in self._open if any(layer == place[0] for layer, _ in o.worst)), None)

    def _opened(self, step: int, fresh: dict[Place, dict[str, Any]]) -> list[dict[str, Any]]:
        if not fresh:
            return []
        worst = max(fresh.values(), key=lambda found: found["share"])
        onset = min(found["since"] for found in fresh.values())
        event = Event(
            self._next_id, "deviation", step, onset, None,
            worst["value"], step, worst["limit"], worst["share"],
        )  # fmt: skip
        self._next_id += 1
        self._open.append(_Open(event, fresh, set(fresh)))
        return [self._told(self._open[-1])]

    def _closed(self, step: int) -> list[dict[str, Any]]:
        told = []
        for open_ in self._open:
            open_.now = {place for place in open_.now if place[1] in self.suspects(place[0])}
            worst = max(open_.worst.values(), key=lambda found: found["share"])
            if worst["share"] > open_.event.score:
                open_.event.peak, open_.event.score = worst["value"], worst["share"]
                open_.event.peak_step, open_.event.baseline = worst["step"], worst["limit"]
            if not open_.now:
                open_.event.end = step
                told.append(self._told(open_))
        self._open = [open_ for open_ in self._open if open_.event.end is None]
        return told

    def _told(self, open_: _Open) -> dict[str, Any]:
        """The event's fields, the monitor, a message, and every place."""
        ranked = sorted(open_.worst.items(), key=lambda item: -item[1]["share"])
        texts = [_text(place, found) for place, found in ranked[:3]]
        more = [f"{len(ranked) - 3} more heads"] * (len(ranked) > 3)
        end = open_.event.end
        over = "" if end is None else f"; within the limits again at step {end:.0f}"
        places = [
            {"layer": layer, "head": None if head == WHOLE else head, **found}
            for (layer, head), found in ranked
        ]
        return {
            **open_.event.to_dict(),
            "monitor": self._monitor,
            "message": f"{self._says}: {'; '.join([*texts, *more])}{over}",
            "places": spell(places),
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "next_id": self._next_id,
            "looks": [[*at, [list(look) for look in looks]] for at, looks in self._looks.items()],
            "open": [
                {
                    "event": open_.event.to_dict(),
                    "worst": [[*place, found] for place, found in open_.worst.items()],
                    "now": sorted(open_.now),
                }
                for open_ in self._open
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._next_id = state["next_id"]
        self._looks = {
            (layer, head, number): [(step, over) for step, over in looks]
            for layer, head, number, looks in state["looks"]
        }
        self._open = [
            _Open(
                Event.from_dict(row["event"]),
                {(layer, head): found for layer, head, found in row["worst"]},
                {(layer, head) for layer, head in row["now"]},
            )
            for row in state["open"]
        ]


def _worsen(worst: dict[Place, dict[str, Any]], place: Place, found: dict[str, Any]) -> None:
    if place not in worst or found["share"] > worst[place]["share"]:
        worst[place] = found


def _text(place: Place, found: dict[str, Any]) -> str:
    layer, head = place
    where = layer if head == WHOLE else f"{layer} head {head}"
    where += "" if found["rank"] is None else f" on rank {found['rank']}"
    if "NaN" in found["number"]:
        return f"{where}, {found['value']:.0f} {found['number']}"
    return f"{where}, {found['number']} {found['value']:.4g} (limit {found['limit']:g} for {found['dtype']})"
