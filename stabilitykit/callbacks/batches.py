"""Bad batches: which samples they had, on all ranks, and the skip list they are put in."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import distributed as dist

from stabilitykit.callbacks.run import rank, say, world
from stabilitykit.skiplist import SKIP_LIST, SkipList

STEPS = 16  # an event that began longer ago is no single batch's


@dataclass(frozen=True, slots=True)
class _Batch:
    step: int
    number: int  # counted over the run
    position: int  # counted over the present pass through the data
    ids: Any  # as the batch itself says


class BadBatches:
    """Remembers what is needed to name the samples of the last steps, and lists those of bad ones.

    A batch says itself (`batch["sample_ids"]` or `batch.sample_ids`), or the training data does:
    `sample_ids(position)` of the loader or of its batch sampler, for a 0-based place in this pass.
    Asked only when a batch was bad.
    """

    def __init__(self) -> None:
        self.listed = SkipList()
        self._file: Path | None = None
        self._batches: deque[_Batch] = deque()
        self._position = 0

    def start(self, folder: Path | None) -> None:
        """Takes up the list that an earlier attempt left in the run's folder."""
        self._batches.clear()  # of an earlier fit
        self._file = folder and folder / SKIP_LIST
        if self._file and rank() == 0 and self._file.is_file():
            self.listed.add(SkipList.read(self._file).entries)
        if self.listed.entries:
            self._write()

    @property
    def file(self) -> Path | None:
        """The skip list's file, once it names samples."""
        return self._file if self.listed.samples else None

    def begin_pass(self) -> None:
        """The data is read from its loader's beginning, or from where a resume takes it up."""
        self._position = 0

    def note(self, step: int, number: int, batch: Any) -> None:
        """A batch of the step in progress; the oldest steps are forgotten."""
        ids = batch.get("sample_ids") if isinstance(batch, Mapping) else getattr(batch, "sample_ids", None)
        self._batches.append(_Batch(step, number, self._position, ids))
        self._position += 1
        while self._batches[0].step <= step - STEPS:
            self._batches.popleft()

    def add(self, first: int, last: int, reason: str, loader: Any) -> int:
        """Lists the batches of the steps from `first` to `last`; how many. With ranks: one collective."""
        if not self._batches or first < self._batches[0].step:
            return 0
        steps: dict[int, list[_Batch]] = {step: [] for step in range(first, last + 1)}
        for batch in self._batches:
            if batch.step in steps:
                steps[batch.step].append(batch)
        mine = {step: _joined([_ids(batch, loader) for batch in found]) for step, found in steps.items()}
        everyone: list[Any] = [mine]
        if world() > 1:
            everyone = [None] * world()
            dist.all_gather_object(everyone, mine)
        entries = [
            {
                "step": step,
                "reason": reason,
                "batches": [batch.number for batch in found],
                "samples": _joined([part[step] for part in everyone]),
            }
            for step, found in steps.items()
        ]
        if self.listed.add(entries):
            self._write()
        return sum(len(entry["batches"]) for entry in entries)

    def _write(self) -> None:
        if self._file is None or rank() > 0:
            return
        try:
            self.listed.write(self._file)
        except OSError as problem:
            self._file = None
            say(f"the skip list is not kept on disk, training goes on: {problem}")


def _joined(parts: list[list[Any] | None]) -> list[Any] | None:
    known = [part for part in parts if part is not None]
    # Once each: where ranks share out sequences, all of them read the same.
    return list(dict.fromkeys(item for part in known for item in part)) if known else None


def _ids(batch: _Batch, loader: Any) -> list[Any] | None:
    if batch.ids is not None:
        return batch.ids.flatten().tolist() if isinstance(batch.ids, Tensor) else list(batch.ids)
    for source in (loader, getattr(loader, "batch_sampler", None)):
        say_which = getattr(source, "sample_ids", None)
        if say_which is not None:
            return say_which(batch.position)
    return None
