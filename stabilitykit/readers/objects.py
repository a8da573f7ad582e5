"""The objects of a JSON log: one per line, or a document that lists them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stabilitykit.readers.lines import lines

Note = Callable[[str], None]
HISTORY = "log_history"  # of transformers' trainer_state.json


def objects(path: Path, note: Note) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line or place of each object, and it with the keys of nested ones joined by dots.

    >>> _flat({"step": 1, "train": {"loss": 2.5}})
    {'step': 1, 'train.loss': 2.5}
    """
    listed = _document(path) if path.suffix == ".json" else None
    for number, row in _lines(path, note) if listed is None else enumerate(listed, 1):
        if isinstance(row, dict):
            yield number, _flat(row)
        else:
            note(f"{path.name}:{number}: not a JSON object, skipped")


def _document(path: Path) -> list[Any] | None:
    """The list that a file is, or has under HISTORY; None for any other file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return None
    return document.get(HISTORY) if isinstance(document, dict) else document


def _lines(path: Path, note: Note) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(lines(path), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError:
                note(f"{path.name}:{number}: not a JSON object, the line was skipped")


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        inner = _flat(value) if isinstance(value, dict) else None
        flat |= {key: value} if inner is None else {f"{key}.{name}": one for name, one in inner.items()}
    return flat
