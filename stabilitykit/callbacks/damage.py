"""Blocks that were damaged on their way between ranks, as events: at once, with the ranks and the hop."""

from typing import Any

from stabilitykit.numerics.event import Event

SHOWN = 3


class Damaged:
    """One `ring` event for as long as every due step finds a block damaged."""

    def __init__(self) -> None:
        self._next_id = 1
        self._open: dict[str, Any] | None = None

    def update(
        self, step: int, layers: dict[str, list[dict[str, Any]]], hosts: list[str]
    ) -> list[dict[str, Any]]:
        """The event that opens or closes at `step`; `layers`: the hops at which a block changed."""
        places = [{"layer": name, **hop} for name, hops in layers.items() for hop in hops]
        if bool(places) == (self._open is not None):
            return []
        if not places:
            closed, self._open = self._open, None
            assert closed is not None
            message = f"{closed['message']}; whole again at step {step}"
            return [{**closed, "end": step, "message": message}]
        count = float(len(places))
        event = Event(self._next_id, "ring", step, step, None, count, step, 0.0, count)
        self._next_id += 1
        texts = [_text(place, hosts) for place in places[:SHOWN]]
        more = [f"{len(places) - SHOWN} more"] * (len(places) > SHOWN)
        self._open = {
            **event.to_dict(),
            "monitor": "ring transport",
            "message": f"a block of keys and values did not arrive as it was sent: {'; '.join(texts + more)}",
            "places": places,
        }
        return [self._open]

    def pending(self) -> list[dict[str, Any]]:
        """The open event, if any."""
        return [self._open] if self._open else []

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"next_id": self._next_id, "open": self._open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._next_id, self._open = state["next_id"], state["open"]


def _text(place: dict[str, Any], hosts: list[str]) -> str:
    ends = [f"rank {place[end]} on {hosts[place[end]]}" for end in ("sender", "receiver")]
    return (
        f"{place['layer']}, {place['pass']}, hop {place['hop']}, from {' to '.join(ends)} "
        f"(the block of rank {place['owner']})"
    )
