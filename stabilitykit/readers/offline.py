"""The history of a W&B run from its local .wandb file, one row at a time, without W&B."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stabilitykit.readers.protobuf import fields, signed, unpack

PATTERN = "*.wandb"
# The file is a log in LevelDB's format (its doc/log_format.md) after a header of seven bytes.
_BLOCK, _HEADER, _MAGIC = 32768, 7, b":W&B"
_FULL, _FIRST, _LAST = 1, 2, 4
# Numbers of the fields, from wandb/proto/wandb_internal.proto.
_HISTORY, _ITEM, _STEP = 2, 1, 2
_KEY, _NESTED, _INTEGER, _NUMBER, _JSON = 1, 2, 5, 6, 16
# The trainer's step is the x axis; W&B's own counts calls of log().
_STEPS = ("trainer/global_step", "train/global_step", "_step")

Note = Callable[[str], None]


def history(file: Path, note: Note) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of a row and what was logged in it, the step first. What is broken is told to `note`.

    Raises:
        ValueError: a file that is no W&B run.
    """
    count = 0
    for record in _records(file, note):
        try:
            for number, value in fields(record):
                if number == _HISTORY and isinstance(value, bytes):
                    count += 1
                    yield count, _row(value)
        except ValueError as problem:
            note(f"{file.name}: row {count} was skipped: {problem}")


def _records(file: Path, note: Note) -> Iterator[bytes]:
    with file.open("rb") as stream:
        if not stream.read(_HEADER).startswith(_MAGIC):
            raise ValueError(f"expected a W&B run, got {file}")
        room, parts = _BLOCK - _HEADER, b""
        while True:
            if room < _HEADER:
                stream.read(room)  # the rest of a block is too short for a record
                room = _BLOCK
            head = stream.read(_HEADER)
            size, kind = int.from_bytes(head[4:6], "little"), head[6] if len(head) == _HEADER else 0
            data = stream.read(size)
            if kind == 0 or len(data) < size:
                if head.strip(b"\0") or parts:
                    note(f"{file.name}: the last row is torn and was skipped")
                return
            room -= _HEADER + size
            parts = data if kind in (_FULL, _FIRST) else parts + data
            if kind in (_FULL, _LAST):
                yield parts
                parts = b""


def _row(record: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for number, value in fields(record):
        if number == _ITEM and isinstance(value, bytes):
            key, found = _item(value)
            row[key] = found
        elif number == _STEP and isinstance(value, bytes):
            row["_step"] = next((signed(n) for _, n in fields(value) if isinstance(n, int)), 0)
    steps = [name for name in _STEPS if name in row][:1]
    return {name: row[name] for name in [*steps, *(name for name in row if name not in steps)]}


def _item(item: bytes) -> tuple[str, Any]:
    keys: list[str] = []
    found: Any = None
    for number, value in fields(item):
        if number in (_KEY, _NESTED) and isinstance(value, bytes):
            keys.append(value.decode(errors="replace"))
        elif number == _JSON and isinstance(value, bytes):
            found = json.loads(value)
        elif number == _NUMBER and isinstance(value, bytes):
            found = unpack("d", value)
        elif number == _INTEGER and isinstance(value, int):
            found = value >> 1 ^ -(value & 1)  # a zigzag int
    return ".".join(keys), found
