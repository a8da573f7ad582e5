"""Loss logs of any trainer, one row at a time: tables, JSONL, our records, TensorBoard, W&B, text."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from stabilitykit.readers import offline, tensorboard
from stabilitykit.readers.columns import ROW, choose, find_loss, no_loss
from stabilitykit.readers.lines import first_line, lines
from stabilitykit.readers.objects import objects
from stabilitykit.readers.presets import expression_of
from stabilitykit.readers.tables import Cells, table
from stabilitykit.runlog import RECORDS, find_folder, read_records

MOST_PROBLEMS = 20
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")


@dataclass(slots=True)
class Losses:
    """The rows of a log as (step, loss), read from the file as they are taken.

    `problems` says which lines were skipped and why; it is complete once the rows are taken.
    """

    rows: Iterator[tuple[float, float]]
    loss_column: str
    step_column: str
    problems: list[str] = field(default_factory=list)


def read_losses(
    path: str | Path,
    *,
    loss: str | None = None,
    step: str | None = None,
    nan: str = "value",
    pattern: str | None = None,
    preset: str | None = None,
) -> Losses:
    """The losses of a log, of which no more than a row is held in memory (our records, JSON documents: all).

    Args:
        path: a table with a header (commas, tabs, semicolons, spaces), a file of one JSON object per line,
            a .json list of objects or trainer_state.json, a TensorBoard event file, a .wandb file, our
            records, a folder that holds one of these, or with `pattern` or `preset` any text.
        loss: the loss column, keys of nested objects joined by dots; by default the first of LOSS_NAMES
            that is there, also with a unit or with the run's name before it.
        step: the step column; by default one of STEP_NAMES, else the first.
        nan: whether a NaN is a "value", or "missing" and skipped. Empty cells are always skipped.
        pattern: a regular expression with groups named step and loss, searched for in each line.
        preset: the pattern of a known trainer, a key of PRESETS.

    Raises:
        ValueError: a log that is missing, empty or without a loss (the columns found are listed), and
            text in place of a number (the line and what came), in later rows as they are taken.
    """
    path = Path(path)
    if nan not in ("value", "missing"):
        raise ValueError(f"expected nan to be 'value' or 'missing', got {nan!r}")
    if not path.exists():
        raise ValueError(f"expected an existing log, got {path}")
    problems: list[str] = []
    if pattern is not None or preset is not None:
        if loss is not None or step is not None:
            raise ValueError("expected either columns or a pattern, got both")
        names, cells = _text_cells(path, expression_of(pattern, preset))
    elif path.is_dir():
        names, cells = _folder_cells(path, loss, step, problems)
    elif path.name == RECORDS:
        names, cells = _own_cells(path.parent, loss or "loss/value", problems)
    elif path.match(tensorboard.PATTERN):
        names, cells = _board_cells(path, [path], loss, step, problems)
    elif path.match(offline.PATTERN):
        names, cells = _wandb_cells(path, loss, step, problems)
    elif path.suffix == ".json" or first_line(path).startswith("{"):
        names, cells = _row_cells(objects(path, partial(_note, problems)), path, loss, step)
    else:
        names, cells = table(path, loss, step, partial(_note, problems))
    rows = _note_attempts(_numbers(cells, names, path, skip_nan=nan == "missing"), path, problems)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"expected rows with a loss in {path}, found none")
    return Losses(chain([first], rows), *names, problems)


def _numbers(
    cells: Cells, names: tuple[str, str], path: Path, *, skip_nan: bool
) -> Iterator[tuple[float, float]]:
    loss_column, step_column = names
    for line, step_cell, loss_cell in cells:
        if loss_cell is None or loss_cell == "":
            continue
        loss = _number(loss_cell, loss_column, line, path)
        if skip_nan and math.isnan(loss):
            continue
        if isinstance(step_cell, str) and THOUSANDS.fullmatch(step_cell):
            step_cell = step_cell.replace(",", "")  # in a loss it may be a decimal comma
        step = _number(step_cell, step_column, line, path)
        if not math.isfinite(step):
            raise _not_a_number(step_cell, step_column, line, path)
        yield (int(step) if step.is_integer() else step), loss


def _note_attempts(
    rows: Iterator[tuple[float, float]], path: Path, problems: list[str]
) -> Iterator[tuple[float, float]]:
    last = -math.inf
    for step, loss in rows:
        if step <= last:
            _note(problems, f"{path.name}: step {step} after {last}: taken as a new attempt")
        last = step
        yield step, loss


def _number(cell: Any, column: str, line: int, path: Path) -> float:
    try:
        return float(cell)
    except (TypeError, ValueError):
        raise _not_a_number(cell, column, line, path) from None


def _not_a_number(cell: Any, column: str, line: int, path: Path) -> ValueError:
    return ValueError(f"expected a number in column {column!r} of {path}, got {cell!r} in line {line}")


def _note(problems: list[str], problem: str) -> None:
    # A damaged log of gigabytes must not fill the memory.
    if len(problems) < MOST_PROBLEMS:
        problems.append(problem)
    elif len(problems) == MOST_PROBLEMS:
        problems.append("more problems are not listed")


def _row_cells(
    rows: Iterator[tuple[int, dict[str, Any]]], path: Path, loss: str | None, step: str | None
) -> tuple[tuple[str, str], Cells]:
    """Of rows that each bring their own keys, the first with a loss tells the columns."""
    seen: dict[str, None] = {}  # keys in order; rows without a loss may come first
    for first in rows:
        seen |= dict.fromkeys(first[1])
        if find_loss(list(first[1]), loss) is not None:
            break
    else:
        raise no_loss(list(seen), loss, path)
    names = loss_column, step_column = choose(list(first[1]), loss, step, path)
    counted = step_column == ROW

    def cells() -> Cells:
        for number, (line, row) in enumerate(chain([first], rows)):
            yield line, number if counted else row.get(step_column), row.get(loss_column)

    return names, cells()


def _folder_cells(
    path: Path, loss: str | None, step: str | None, problems: list[str]
) -> tuple[tuple[str, str], Cells]:
    """Our records, else TensorBoard events, a W&B run, Lightning's metrics.csv; of several the newest."""
    if any(path.rglob(RECORDS)):
        return _own_cells(path, loss or "loss/value", problems)
    for pattern in (tensorboard.PATTERN, offline.PATTERN, "metrics.csv"):
        found = sorted(path.rglob(pattern), key=lambda file: (file.stat().st_mtime, file.name))
        if not found:
            continue
        folder = found[-1].parent
        if any(file.parent != folder for file in found):
            _note(problems, f"{path}: several runs, the newest was read: {folder}")
        files = sorted(file for file in found if file.parent == folder)
        if pattern == tensorboard.PATTERN:
            return _board_cells(folder, files, loss, step, problems)
        if pattern == offline.PATTERN:
            return _wandb_cells(files[-1], loss, step, problems)
        return table(files[-1], loss, step, partial(_note, problems))
    inside = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
    wanted = f"{RECORDS}, TensorBoard events, a .wandb file or metrics.csv"
    raise ValueError(f"expected {wanted} in {path}, found {inside}")


def _board_cells(
    path: Path, files: Sequence[Path], loss: str | None, step: str | None, problems: list[str]
) -> tuple[tuple[str, str], Cells]:
    return _row_cells(tensorboard.scalars(files, partial(_note, problems)), path, loss, step)


def _wandb_cells(
    path: Path, loss: str | None, step: str | None, problems: list[str]
) -> tuple[tuple[str, str], Cells]:
    return _row_cells(offline.history(path, partial(_note, problems)), path, loss, step)


def _own_cells(path: Path, key: str, problems: list[str]) -> tuple[tuple[str, str], Cells]:
    records = read_records(find_folder(path))
    problems += records.problems
    with_key = [record for record in records.rows if key in record.values]
    if not with_key:
        keys = sorted({key for record in records.rows for key in record.values})
        raise no_loss(keys, key, path)
    cells = ((line, record.step, record.values[key]) for line, record in enumerate(with_key, 1))
    return (key, "step"), cells


def _text_cells(path: Path, expression: re.Pattern[str]) -> tuple[tuple[str, str], Cells]:
    first = first_line(path)
    matches = ((line, expression.search(text)) for line, text in enumerate(lines(path), 1))
    cells = ((line, match["step"], match["loss"]) for line, match in matches if match is not None)
    found = next(cells, None)
    if found is None:
        raise ValueError(
            f"expected lines that match {expression.pattern!r} in {path}, found none; "
            f"the first is {first[:80]!r}"
        )
    return ("loss", "step"), chain([found], cells)
