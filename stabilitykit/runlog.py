"""A run's folder: append-and-flush JSONL records, attempts, and a reader that survives a crash."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stabilitykit.records import Record

FOLDER = "stability"
RECORDS = "records.jsonl"
META = "meta.json"


def claim_folder(base: Path) -> Path:
    """A new, empty `base/stability`, or `stability-1`, `-2`, ... when earlier runs hold the name."""
    for number in range(100_000):
        folder = base / (FOLDER if number == 0 else f"{FOLDER}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
    raise ValueError(f"expected a free name for a run folder in {base}, all are taken")


def find_folder(run: Path) -> Path:
    """The folder with records in or at `run`; of several, the newest.

    Raises:
        ValueError: none there, naming what was looked for.
    """
    if (run / RECORDS).is_file():
        return run
    found = [path for path in run.glob(f"{FOLDER}*") if (path / RECORDS).is_file()]
    if not found:
        found = [path.parent for path in run.glob(f"**/{FOLDER}*/{RECORDS}")]
    if not found:
        what = "a folder" if run.is_dir() else "an existing folder"
        raise ValueError(f"expected {what} with {RECORDS} or {FOLDER}/{RECORDS}, got {run}")
    return max(found, key=lambda path: (path / RECORDS).stat().st_mtime)


class RunLog:
    """Appends records to `folder/records.jsonl`, each line flushed to the system as it is written."""

    def __init__(self, folder: Path, rank: int = 0):
        self.folder = folder
        self.path = folder / (RECORDS if rank == 0 else f"records.rank{rank}.jsonl")
        self._mend_tail()

    def write(self, record: Record) -> None:
        """One line; a reader sees it at once, and a killed process loses nothing before it."""
        line = json.dumps(record.to_json(), separators=(",", ":"), allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _mend_tail(self) -> None:
        # A torn last line must not swallow the first record of the next attempt.
        if self.path.is_file() and self.path.stat().st_size:
            with self.path.open("rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")


def start_attempt(folder: Path, meta: dict[str, Any], resumed_at: int | None) -> int:
    """Adds an attempt to `meta.json` and returns its number, 1 for a fresh run.

    The number comes from the folder, not from the checkpoint: two resumes of one checkpoint differ.
    """
    before = read_meta(folder)
    attempts = before.get("attempts", [])
    number = 1 + max([row["attempt"] for row in attempts], default=0)
    row = {
        "attempt": number,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "resumed_at": resumed_at,
    }
    document = {**meta, "attempts": [*attempts, row]}
    beside = folder / f"{META}.part"
    beside.write_text(json.dumps(document, indent=1, default=str), encoding="utf-8")
    beside.replace(folder / META)
    return number


def read_meta(folder: Path) -> dict[str, Any]:
    """`meta.json` as written; {} when it is missing or torn."""
    try:
        return json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


@dataclass(slots=True)
class Records:
    """What a folder holds: records in step order, and what could not be read."""

    rows: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Record]:
        """The records of one kind, in step order."""
        return [row for row in self.rows if row.kind == kind]


def read_records(folder: Path) -> Records:
    """All records of a run, the last attempt's for each (step, kind, rank); torn lines are reported.

    An event has no counterpart in the attempt that took it back, so it goes with its stretch of steps.
    """
    result = Records()
    for path in [folder / RECORDS, *sorted(folder.glob("records.rank*.jsonl"))]:
        if path.is_file():
            result.rows += _last_attempts(list(_parse(path, result.problems)))
    result.rows.sort(key=lambda row: row.step)
    return result


def _parse(path: Path, problems: list[str]) -> Iterator[Record]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield Record.from_json(json.loads(line))
            except ValueError:
                what = "a torn last line" if not line.endswith("\n") else "an unreadable line"
                problems.append(f"{path.name}:{number}: {what} was skipped ({len(line)} characters)")


def _last_attempts(rows: list[Record]) -> list[Record]:
    stretch: dict[int, tuple[int, int]] = {}  # attempt -> first and last step it wrote
    for row in rows:
        first, last = stretch.get(row.attempt, (row.step, row.step))
        stretch[row.attempt] = (min(first, row.step), max(last, row.step))
    kept: dict[tuple, Record] = {}
    for row in rows:
        if row.kind != "event":
            kept[(row.step, row.kind)] = row
        elif not any(a > row.attempt and s <= row.step <= e for a, (s, e) in stretch.items()):
            kept[(row.step, row.kind, row.detail.get("id"), row.detail.get("end"))] = row
    return list(kept.values())
