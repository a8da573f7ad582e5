"""Hands a step's numbers to every logger; images, alerts and a table of events to those that take them."""

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from stabilitykit.report.images import HEAT_MAPS, HeatMap, paint

EVENTS = "loss/events"
_LOG = logging.getLogger(__name__)  # of an event: training goes on, and Python shows a warning once per place
GRAVE = ("nonfinite", "divergence")  # kinds of events that do not pass


class MetricLogger(Protocol):
    """What a sink needs of a logger; every Lightning logger has it."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Takes the numbers of one step."""
        ...


class Sinks:
    """Loggers that get one dict per step, unchanged, non-finite numbers included, and what else they take.

    What fails is warned about once and not tried again: without images a logger still gets numbers.
    """

    def __init__(self, loggers: Iterable[MetricLogger]):
        self._views = [_view_of(logger) for logger in loggers]
        self._cells: dict[str, dict[tuple[str, int], float]] = {}
        self._events: dict[tuple[str, int], dict[str, Any]] = {}
        self._began: int | None = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One call per logger, each with its own copy of the numbers."""
        for view, problem in _failed(self._views, lambda view: view.log(values, step)):
            self._views.remove(view)
            _say(view, step, "numbers", problem)

    def show(self, kind: str, step: int, detail: Mapping[str, Any]) -> None:
        """What a record has beside numbers: a heat map, or of an event that opens an alert and a line."""
        if self._began is None:
            self._began = step
        if kind == "event":
            self._event(step, dict(detail))
        elif kind in HEAT_MAPS:
            self._beside(step, lambda view: self._image(view, HEAT_MAPS[kind], step, detail))

    def tabulate(self, step: int) -> None:
        """All events so far as one table, with the numbers of `step`."""
        rows = list(self._events.values())
        if rows:
            self._beside(step, lambda view: view.table(rows, step))

    def _event(self, step: int, event: dict[str, Any]) -> None:
        name = str(event["monitor"]), event["id"]
        # An event is told again when it closes and at the end of training, there also after a resume.
        opens = event["end"] is None and name not in self._events and event["start"] >= (self._began or 0)
        self._events[name] = event
        if opens:
            _LOG.warning("stabilitykit: %s", event["message"])
            self._beside(step, lambda view: view.alert(event, step))

    def _image(self, view: "_View", heat_map: HeatMap, step: int, detail: Mapping[str, Any]) -> None:
        # A head that was not sampled this time keeps the colour of the last time it was.
        cells = self._cells.setdefault(heat_map.key, {})
        cells |= heat_map.cells(detail)
        if cells:
            view.image(heat_map, paint(cells, heat_map.low, heat_map.high), step)

    def _beside(self, step: int, call: Callable[["_View"], None]) -> None:
        for view, problem in _failed([view for view in self._views if view.rich], call):
            view.rich = False
            _say(view, step, "images, alerts and tables", problem)


def _failed(views: Iterable["_View"], call: Callable[["_View"], None]) -> list[tuple["_View", Exception]]:
    failed = []
    for view in views:
        try:
            call(view)
        except Exception as problem:  # whatever a view raises, the run it shows must not die of it
            failed.append((view, problem))
    return failed


def _say(view: "_View", step: int, what: str, problem: Exception) -> None:
    name = type(view.logger).__name__
    warnings.warn(f"{name} failed at step {step} and gets no more {what}: {problem!r}", stacklevel=3)


class _View:
    """A logger that takes numbers only."""

    rich = False

    def __init__(self, logger: Any):
        self.logger = logger

    def log(self, values: Mapping[str, float], step: int) -> None:
        # A copy each: loggers are known to add keys of their own to what they are given.
        if values:
            self.logger.log_metrics(dict(values), step=step)

    def image(self, heat_map: HeatMap, pixels: Any, step: int) -> None: ...

    def alert(self, event: Mapping[str, Any], step: int) -> None: ...

    def table(self, rows: list[dict[str, Any]], step: int) -> None: ...


class _Wandb(_View):
    """Media wait for the numbers of their step: W&B never merges two calls, and draws one row per call."""

    rich = True

    def __init__(self, logger: Any):
        super().__init__(logger)
        self._waiting: dict[int, dict[str, Any]] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        super().log({**values, **self._waiting.pop(step, {})}, step)

    def image(self, heat_map: HeatMap, pixels: Any, step: int) -> None:
        import wandb

        self._waiting.setdefault(step, {})[heat_map.key] = wandb.Image(pixels, caption=heat_map.caption)

    def alert(self, event: Mapping[str, Any], step: int) -> None:
        level = "ERROR" if event["kind"] in GRAVE else "WARN"
        title = f"{event['kind']} at step {event['start']}"
        self.logger.experiment.alert(title=title, text=event["message"], level=level)

    def table(self, rows: list[dict[str, Any]], step: int) -> None:
        import wandb

        columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
        data = [[_number(row.get(column)) for column in columns] for row in rows]
        self._waiting.setdefault(step, {})[EVENTS] = wandb.Table(columns=columns, data=data)


class _TensorBoard(_View):
    rich = True

    def image(self, heat_map: HeatMap, pixels: Any, step: int) -> None:
        self.logger.experiment.add_image(heat_map.key, pixels, step, dataformats="HWC")

    def alert(self, event: Mapping[str, Any], step: int) -> None:
        self.logger.experiment.add_text(EVENTS, event["message"], step)


# By the name of the class or of one it is made from: both Lightning packages have one of each.
_VIEWS: dict[str, type[_View]] = {"WandbLogger": _Wandb, "TensorBoardLogger": _TensorBoard}


def _view_of(logger: Any) -> _View:
    names = [base.__name__ for base in type(logger).__mro__]
    return next((_VIEWS[name] for name in names if name in _VIEWS), _View)(logger)


def _number(value: Any) -> Any:
    # JSON's words for numbers that are not finite: a column of a table has one type.
    return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(value, value)
