"""Loss logs of any trainer, one row at a time: tables, JSONL, our records, TensorBoard, W&B, text."""

import csv
import json
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
from stabilitykit.readers.presets import expression_of
from stabilitykit.runlog import RECORDS, find_folder, read_records

MOST_PROBLEMS = 20
LONGEST = 1 << 20  # characters of a line: a file without line breaks must not fill the memory

Cells = Iterator[tuple[int, Any, Any]]  # line number, step and loss as they were found


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
    """The losses of a log, of which no more than a row is held in memory (our own records: all).

    Args:
        path: a CSV or TSV file with a header, a file of one JSON object per line, a TensorBoard event
            file, a .wandb file, our records, a folder that holds one of these, or with `pattern` or
            `preset` any text.
        loss: the loss column; by default the first of LOSS_NAMES that is there.
        step: the step column; by default one named step, else the first.
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
    elif _first_line(path).startswith("{"):
        names, cells = _json_cells(path, loss, step, problems)
    else:
        names, cells = _csv_cells(path, loss, step, problems)
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


def _first_line(path: Path) -> str:
    for line in _lines(path):
        if line.strip():
            return line.strip()
    raise ValueError(f"expected a log, got the empty file {path}")


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        while line := file.readline(LONGEST):
            if len(line) == LONGEST:
                raise ValueError(f"expected lines in {path}, got one longer than {LONGEST:,} characters")
            yield line


def _note(problems: list[str], problem: str) -> None:
    # A damaged log of gigabytes must not fill the memory.
    if len(problems) < MOST_PROBLEMS:
        problems.append(problem)
    elif len(problems) == MOST_PROBLEMS:
        problems.append("more problems are not listed")


def _csv_cells(
    path: Path, loss: str | None, step: str | None, problems: list[str]
) -> tuple[tuple[str, str], Cells]:
    rows = _table(path, delimiter=max(",\t;", key=_first_line(path).count))
    columns = [cell.strip() for cell in next(rows)[1]]
    names = choose(columns, loss, step, path)
    loss_at = columns.index(names[0])
    step_at = columns.index(names[1]) if names[1] != ROW else None

    def cells() -> Cells:
        for number, (line, row) in enumerate(rows):
            if len(row) < len(columns):
                found = f"{len(row)} of {len(columns)} cells"
                _note(problems, f"{path.name}:{line}: {found}, the row was skipped")
            else:
                yield line, number if step_at is None else row[step_at], row[loss_at]

    return names, cells()


def _table(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(_lines(path), delimiter=delimiter)
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except csv.Error as problem:
        raise ValueError(f"expected a table in {path}, got in line {reader.line_num}: {problem}") from problem


def _json_cells(
    path: Path, loss: str | None, step: str | None, problems: list[str]
) -> tuple[tuple[str, str], Cells]:
    return _row_cells(_objects(path, problems), path, loss, step)


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


def _objects(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            yield number, row
        else:
            _note(problems, f"{path.name}:{number}: not a JSON object, the line was skipped")


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
        return _csv_cells(files[-1], loss, step, problems)
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
    first = _first_line(path)
    matches = ((line, expression.search(text)) for line, text in enumerate(_lines(path), 1))
    cells = ((line, match["step"], match["loss"]) for line, match in matches if match is not None)
    found = next(cells, None)
    if found is None:
        raise ValueError(
            f"expected lines that match {expression.pattern!r} in {path}, found none; "
            f"the first is {first[:80]!r}"
        )
    return ("loss", "step"), chain([found], cells)
