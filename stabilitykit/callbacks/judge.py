"""What the numbers of one step say: scores, events under ids of their own, whether to skip; no trainer."""

import math
from dataclasses import replace
from typing import Any

from stabilitykit.numerics.event import Event
from stabilitykit.numerics.gradients import GradientWatch, ScaleWatch
from stabilitykit.numerics.spike_score import SpikeScore
from stabilitykit.numerics.spikes import SpikeDetector

INITIAL = 1.3  # times ln(vocabulary): a first loss above it is no initialisation for that vocabulary
PATIENCE = 10  # spiking updates skipped in a row; a loss that stays up longer is not the data's


class Judge:
    """Watches loss, gradient norm and loss scale, each in a window of its own.

    `score` is the loss's, `spike_score` OLMo 2's, `finite` the last finite loss and its step.
    """

    def __init__(self) -> None:
        self._loss = SpikeDetector()
        self._gradients = GradientWatch()
        self._scale = ScaleWatch()
        self._spikes = SpikeScore()
        self._ids: dict[str, int] = {}  # of open events: "<watch> <its own id>" -> id
        self._next_id = 1
        self._spiking = False  # a sudden event of the loss is open
        self._skipped = 0  # updates skipped in it, in a row
        self.spike_score = 0.0
        self.finite: list[float] | None = None

    @property
    def score(self) -> float:
        """Robust sigmas of the last loss above its recent course."""
        return self._loss.score

    @property
    def gradients_available(self) -> bool:
        """Whether the gradient norm was ever anything but 0."""
        return self._gradients.available

    @property
    def pending(self) -> list[Event]:
        """Open events, in their present state."""
        watches = (("loss", self._loss), ("gradients", self._gradients), ("scale", self._scale))
        return [self._named(name, event) for name, watch in watches for event in watch.pending]

    def take_loss(self, step: int, loss: float) -> Event | None:
        """The loss's Event that opens or closes at this step."""
        self.spike_score = self._spikes.update(loss)
        event = self._loss.update(step, loss)
        if math.isfinite(loss):
            self.finite = [step, loss]
        if event is None:
            return None
        if event.kind != "nonfinite":
            self._spiking = event.end is None and event.kind in ("spike", "transient")
            self._skipped = 0
        return self._named("loss", event)

    def take_gradients(self, step: int, norm: float) -> Event | None:
        """The gradient norm's Event that opens or closes at this step."""
        event = self._gradients.update(step, norm)
        return event and self._named("gradients", event)

    def take_scale(self, step: int, scale: float) -> Event | None:
        """The loss scale's Event that opens or closes at this step."""
        event = self._scale.update(step, scale)
        return event and self._named("scale", event)

    def initial(self, step: int, loss: float, vocabulary: int) -> list[Event]:
        """An Event, opened and closed, when the first loss is far above ln(vocabulary); else nothing."""
        expected = math.log(vocabulary)
        if not INITIAL * expected < loss < math.inf:
            return []
        event = Event(0, "initial_loss", step, step, None, loss, step, expected, math.nan)
        return [self._named("initial", event), self._named("initial", replace(event, end=step))]

    def skip(self, loss: float, norm: float | None) -> str | None:
        """Why the update of the step just taken must be skipped, None when it may go on.

        A spike is skipped up to ten times in a row: the weights have not moved, so a loss that is
        still up on other batches is theirs.
        """
        if not math.isfinite(loss):
            return "nonfinite"
        if norm is not None and not math.isfinite(norm):
            return "gradient_nonfinite"
        if self._spiking and self._skipped < PATIENCE and self.score > self._loss.threshold:
            self._skipped += 1
            return "spike"
        return None

    @property
    def gave_up(self) -> bool:
        """Whether the open spike has used up its skipped updates."""
        return self._spiking and self._skipped == PATIENCE

    def _named(self, watch: str, event: Event) -> Event:
        """The event under an id that no other watch's event has."""
        name = f"{watch} {event.id}"
        if name not in self._ids:
            self._ids[name] = self._next_id
            self._next_id += 1
        number = self._ids[name] if event.end is None else self._ids.pop(name)
        return replace(event, id=number)

    _PARTS = ("_loss", "_gradients", "_scale", "_spikes")
    _PLAIN = ("_next_id", "_spiking", "_skipped", "spike_score", "finite")

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        parts = {name.strip("_"): getattr(self, name).state_dict() for name in self._PARTS}
        plain = {name.strip("_"): getattr(self, name) for name in self._PLAIN}
        return {**parts, **plain, "ids": dict(self._ids)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        for name in self._PARTS:
            getattr(self, name).load_state_dict(state[name.strip("_")])
        for name in self._PLAIN:
            setattr(self, name, state[name.strip("_")])
        self._ids = dict(state["ids"])
