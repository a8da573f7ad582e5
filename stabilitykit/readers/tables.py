"""Tables with a header: commas, tabs, semicolons or spaces between the cells."""

import csv
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from stabilitykit.readers.columns import ROW, choose, find_loss, no_loss
from stabilitykit.readers.lines import lines

Note = Callable[[str], None]
Cells = Iterator[tuple[int, Any, Any]]  # line number, step and loss as they were found


def table(path: Path, loss: str | None, step: str | None, note: Note) -> tuple[tuple[str, str], Cells]:
    """The names of the loss and step columns, and their cells row by row.

    Lines that begin with # are comments, but for a header that does: numpy writes such. What is skipped
    after the header is told to `note`.

    Raises:
        ValueError: no loss column, or no table.
    """
    text = enumerate(lines(path), 1)
    first, header = next(((n, line) for n, line in text if _is_header(line, loss)), (0, ""))
    mark = _mark(header)
    if not header or (mark == " " and any(map(_is_number, header.split()))):
        raise no_loss(header.split(), loss, path)  # a sentence is no header
    body = chain([header.lstrip("# ")], (line for _, line in text))
    rows = _rows(csv.reader(body, delimiter=mark, skipinitialspace=mark == " "), first - 1, path)
    columns = [cell.strip() for cell in next(rows)[1]]
    names = choose(columns, loss, step, path)
    return names, _cells(rows, columns, names, path, note)


def _mark(header: str) -> str:
    mark = max(",\t;", key=header.count)
    return mark if mark in header else " "  # a name may have a space in it


def _is_number(cell: str) -> bool:
    return cell.rstrip(":,").replace(".", "", 1).isdecimal()


def _is_header(line: str, loss: str | None) -> bool:
    if not line.startswith("#"):
        return bool(line.strip())
    return find_loss([cell.strip() for cell in line.lstrip("# ").split(_mark(line))], loss) is not None


def _rows(reader: Any, above: int, path: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        for row in reader:
            if row:
                yield above + reader.line_num, row
    except csv.Error as problem:
        line = above + reader.line_num
        raise ValueError(f"expected a table in {path}, got in line {line}: {problem}") from problem


def _cells(
    rows: Iterator[tuple[int, list[str]]], columns: list[str], names: tuple[str, str], path: Path, note: Note
) -> Cells:
    loss_at = columns.index(names[0])
    step_at = columns.index(names[1]) if names[1] != ROW else None
    number = 0
    for line, row in rows:
        bare = [cell.strip() for cell in row]
        if bare[0].startswith("#"):
            note(f"{path.name}:{line}: a comment, the line was skipped")
        elif bare == columns:
            note(f"{path.name}:{line}: the header once more, the line was skipped")
        elif len(bare) < len(columns):
            note(f"{path.name}:{line}: {len(bare)} of {len(columns)} cells, the row was skipped")
        else:
            yield line, number if step_at is None else bare[step_at], bare[loss_at]
            number += 1
