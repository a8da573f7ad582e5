"""Scalars of TensorBoard event files, one event at a time, without TensorBoard."""

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stabilitykit.readers.protobuf import fields, signed, unpack

PATTERN = "*tfevents*"
# Numbers of the fields, from tensorflow/core: util/event.proto, framework/{summary,tensor}.proto.
_STEP, _SUMMARY = 2, 5
_VALUE, _TAG, _SIMPLE, _TENSOR = 1, 1, 2, 8
_DTYPE, _CONTENT, _FLOATS, _DOUBLES = 1, 4, 5, 6
_FORMS = {1: "f", 2: "d", 19: "e"}  # struct's letter of DT_FLOAT, DT_DOUBLE, DT_HALF

Note = Callable[[str], None]


def scalars(files: Sequence[Path], note: Note) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number of an event and {"step": step, tag: value} of each scalar in it, file after file.

    Both spellings are read: a plain number, and a tensor of one. What is broken is told to `note`.
    """
    for file in files:
        for number, event in enumerate(_records(file, note), 1):
            try:
                found = list(_scalars_of(event))
            except ValueError as problem:
                note(f"{file.name}: event {number} was skipped: {problem}")
                continue
            for row in found:
                yield number, row


def _records(file: Path, note: Note) -> Iterator[bytes]:
    """The TFRecords of a file: length, its checksum, the bytes, their checksum; the last may be torn."""
    left = file.stat().st_size
    with file.open("rb") as stream:
        while head := stream.read(12):
            size = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else left
            left -= 16 + size
            if left < 0:
                note(f"{file.name}: the last event is torn or foreign and was skipped")
                return
            yield stream.read(size)
            stream.read(4)


def _scalars_of(event: bytes) -> Iterator[dict[str, Any]]:
    step, summaries = 0, []
    for number, value in fields(event):
        if number == _STEP and isinstance(value, int):
            step = signed(value)
        elif number == _SUMMARY and isinstance(value, bytes):
            summaries.append(value)
    for summary in summaries:
        for number, value in fields(summary):
            if number == _VALUE and isinstance(value, bytes):
                yield from _tagged(step, dict(fields(value)))


def _tagged(step: int, value: dict[int, int | bytes]) -> Iterator[dict[str, Any]]:
    simple, tensor, tag = value.get(_SIMPLE), value.get(_TENSOR), value.get(_TAG)
    if not isinstance(tag, bytes):
        return
    number = None
    if isinstance(simple, bytes):
        number = unpack("f", simple)
    elif isinstance(tensor, bytes):
        number = _one_number(dict(fields(tensor)))
    if number is not None:
        yield {"step": step, tag.decode(errors="replace"): number}


def _one_number(tensor: dict[int, int | bytes]) -> float | None:
    """The number in a tensor of one, None for any other: texts and histograms are tensors too."""
    dtype = tensor.get(_DTYPE)
    form = _FORMS.get(dtype) if isinstance(dtype, int) else None
    packed = tensor.get(_CONTENT) or tensor.get(_FLOATS if form == "f" else _DOUBLES)
    if form is None or not isinstance(packed, bytes) or len(packed) != struct.calcsize("<" + form):
        return None
    return unpack(form, packed)
