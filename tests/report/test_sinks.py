import math
import subprocess
import sys
from typing import Any

import pytest

from stabilitykit.report.images import paint
from stabilitykit.report.sinks import Sinks


class Kept:
    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((metrics, step))


class Greedy(Kept):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        metrics["epoch"] = 0.0
        super().log_metrics(metrics, step)


class Down:
    calls = 0

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls += 1
        raise OSError("disk full")


def test_every_logger_gets_one_dict_per_step() -> None:
    first, second = Kept(), Kept()
    sinks = Sinks([first, second])
    sinks.log({"loss/value": 2.0, "loss/score": 0.1}, 7)
    assert first.rows == second.rows == [({"loss/value": 2.0, "loss/score": 0.1}, 7)]


def test_numbers_that_are_not_finite_pass_as_they_are() -> None:
    logger = Kept()
    Sinks([logger]).log({"a": math.nan, "b": -math.inf}, 0)
    values, _ = logger.rows[0]
    assert math.isnan(values["a"])
    assert values["b"] == -math.inf


def test_a_logger_that_fails_is_said_once_and_dropped_while_the_others_go_on() -> None:
    down, kept = Down(), Kept()
    sinks = Sinks([down, kept])
    with pytest.warns(UserWarning, match=r"Down failed at step 3 .*OSError\('disk full'\)") as said:
        sinks.log({"a": 1.0}, 3)
    assert len(said) == 1
    sinks.log({"a": 2.0}, 4)  # a second warning would be an error here
    assert down.calls == 1
    assert [step for _, step in kept.rows] == [3, 4]


def test_what_a_logger_adds_reaches_neither_the_caller_nor_the_next_logger() -> None:
    values, kept = {"a": 1.0}, Kept()
    Sinks([Greedy(), kept]).log(values, 0)
    assert values == {"a": 1.0}
    assert kept.rows == [({"a": 1.0}, 0)]


class Experiment:
    """What the adapters call, written down; `broken` names what raises."""

    def __init__(self, broken: str = ""):
        self.calls: list[tuple[Any, ...]] = []
        self.broken = broken

    def _take(self, name: str, *what: Any) -> None:
        self.calls.append((name, *what))
        if name == self.broken:
            raise OSError("no such service")

    def alert(self, *, title: str, text: str, level: str) -> None:
        self._take("alert", title, text, level)

    def add_image(self, key: str, pixels: Any, step: int, *, dataformats: str) -> None:
        self._take("add_image", key, pixels, step, dataformats)

    def add_text(self, key: str, text: str, step: int) -> None:
        self._take("add_text", key, text, step)


class WandbLogger(Kept):
    def __init__(self, broken: str = "") -> None:
        super().__init__()
        self.experiment = Experiment(broken)


class TensorBoardLogger(Kept):
    def __init__(self, broken: str = "") -> None:
        super().__init__()
        self.experiment = Experiment(broken)


class Mine(TensorBoardLogger):
    """A user's own, made from Lightning's."""


def event(id: int, start: int, end: int | None = None, kind: str = "spike") -> dict[str, Any]:
    return {
        "id": id, "kind": kind, "start": start, "end": end, "peak": "nan",
        "monitor": "LossMonitor", "message": f"loss {kind} at step {start}",
    }  # fmt: skip


def attention(*heads: tuple[int, float]) -> dict[str, Any]:
    rows = [{"head": head, "roundoff_ratio": ratio} for head, ratio in heads]
    return {"layers": {"h.0": {"dtype": "bfloat16", "heads": rows}}}


def test_an_event_is_told_when_it_opens_and_once(caplog: pytest.LogCaptureFixture) -> None:
    wandb, board = WandbLogger(), Mine()
    sinks = Sinks([wandb, Kept(), board])
    sinks.show("loss", 6, {})
    sinks.show("event", 7, event(1, 7))
    sinks.show("event", 9, event(1, 7, end=9))
    sinks.show("event", 11, event(2, 10, kind="nonfinite"))  # raised one row late, behind another
    sinks.show("event", 20, event(2, 10, kind="divergence"))
    assert wandb.experiment.calls == [
        ("alert", "spike at step 7", "loss spike at step 7", "WARN"),
        ("alert", "nonfinite at step 10", "loss nonfinite at step 10", "ERROR"),
    ]
    assert board.experiment.calls == [
        ("add_text", "loss/events", "loss spike at step 7", 7),
        ("add_text", "loss/events", "loss nonfinite at step 10", 11),
    ]
    assert caplog.messages == [
        f"stabilitykit: loss {what}" for what in ("spike at step 7", "nonfinite at step 10")
    ]


def test_after_a_resume_an_event_that_was_open_is_not_told_again() -> None:
    logger = WandbLogger()
    sinks = Sinks([logger])
    sinks.show("loss", 50, {})
    sinks.show("event", 60, event(1, 40))
    assert logger.experiment.calls == []


def test_a_divergence_is_an_error() -> None:
    logger = WandbLogger()
    Sinks([logger]).show("event", 0, event(1, 0, kind="divergence"))
    assert logger.experiment.calls[0][-1] == "ERROR"


def test_longest_title_is_below_wandbs_limit() -> None:
    logger = WandbLogger()
    Sinks([logger]).show("event", 10**12, event(1, 10**12, kind="divergence"))
    assert len(logger.experiment.calls[0][1]) < 64


def test_a_heat_map_shows_every_head_as_it_was_last_seen() -> None:
    logger = TensorBoardLogger()
    sinks = Sinks([logger])
    sinks.show("attention", 9, attention((0, 1.5), (2, 3.0)))
    sinks.show("attention", 19, attention((2, 6.0)))
    sinks.show("attention", 29, {"layers": {}})  # nothing measured: the same image again
    sinks.show("precursors", 39, {})
    cells = {("h.0", 0): 0.5, ("h.0", 2): 2.0}
    shown = logger.experiment.calls
    assert [(key, step, form) for _, key, _, step, form in shown] == [
        ("attention/heat_map", step, "HWC") for step in (9, 19, 29)
    ]
    assert (shown[1][2] == paint(cells, -2, 1)).all() and (shown[2][2] == shown[1][2]).all()
    assert not (shown[0][2] == shown[1][2]).all()


def test_nothing_measured_yet_is_no_image() -> None:
    logger = TensorBoardLogger()
    Sinks([logger]).show("attention", 9, {"layers": {}})
    assert logger.experiment.calls == []


def test_wandb_gets_images_and_the_table_in_the_row_of_their_step() -> None:
    pytest.importorskip("wandb")
    logger, kept = WandbLogger(), Kept()
    sinks = Sinks([logger, kept])
    sinks.show("attention", 9, attention((0, 1.5)))
    sinks.show("event", 10, event(1, 10))
    for step in (8, 9, 10):
        if step == 10:
            sinks.tabulate(step)
        sinks.log({"a": 1.0}, step)
    assert [(step, list(row)) for row, step in logger.rows] == [
        (8, ["a"]),
        (9, ["a", "attention/heat_map"]),
        (10, ["a", "loss/events"]),
    ]
    table = logger.rows[-1][0]["loss/events"]
    assert table.columns == list(event(1, 10))
    assert [str(cell) for cell in table.data[0]] == [str(cell) for cell in event(1, 10).values()]
    assert [row for row, _ in kept.rows] == [{"a": 1.0}] * 3


def test_numbers_sent_before_leave_the_table_a_row_of_its_own_and_others_none() -> None:
    pytest.importorskip("wandb")
    wandb, kept = WandbLogger(), Kept()
    sinks = Sinks([wandb, kept])
    sinks.show("event", 10, event(1, 10))
    sinks.tabulate(10)
    sinks.log({}, 10)
    assert [(list(row), step) for row, step in wandb.rows] == [(["loss/events"], 10)]
    assert kept.rows == []


def test_without_events_there_is_no_table() -> None:
    logger = WandbLogger()
    sinks = Sinks([logger])
    sinks.tabulate(3)
    sinks.log({}, 3)
    assert logger.rows == []


@pytest.mark.parametrize("broken", ["add_image", "add_text"])
def test_an_image_that_fails_is_said_once_and_the_numbers_go_on(broken: str) -> None:
    logger, other = TensorBoardLogger(broken), WandbLogger()
    sinks = Sinks([logger, other])
    kind, detail = ("event", event(1, 3)) if broken == "add_text" else ("attention", attention((0, 1.0)))
    with pytest.warns(UserWarning, match="Logger failed at step 3 and gets no more images, alerts") as said:
        sinks.show(kind, 3, detail)
    assert len(said) == 1
    before = len(logger.experiment.calls)
    sinks.show("attention", 4, attention((0, 2.0)))
    sinks.show("event", 4, event(2, 4))  # a second warning would be an error here
    sinks.log({"a": 1.0}, 4)
    assert len(logger.experiment.calls) == before
    assert logger.rows == [({"a": 1.0}, 4)]
    assert other.experiment.calls[-1][0] == "alert"  # nothing of the one reaches the other


def test_a_detail_that_cannot_be_drawn_does_not_end_training() -> None:
    sinks = Sinks([TensorBoardLogger()])
    with pytest.warns(UserWarning, match="gets no more images.*KeyError"):
        sinks.show("attention", 3, {})


def test_wandb_is_not_imported_for_other_loggers() -> None:
    source = """
import sys
from stabilitykit.report.sinks import Sinks
class CSVLogger:
    def log_metrics(self, metrics, step=None): pass
sinks = Sinks([CSVLogger()])
heads = [{"head": 0, "roundoff_ratio": 1.0}]
sinks.show("attention", 0, {"layers": {"a": {"dtype": "bfloat16", "heads": heads}}})
sinks.log({"a": 1.0}, 0)
print([name for name in ("wandb", "numpy", "torch") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
