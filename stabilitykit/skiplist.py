"""The skip list: which samples were in bad batches, and batches that do without them."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

SKIP_LIST = "skip.json"
REMEMBERED = 1024  # batches whose samples a sampler can still name: more than any loader prefetches


class SkipList:
    """Bad batches in the order they were found; each entry is `{step, reason, batches, samples}`.

    `step` is the optimizer step, `batches` the numbers of its batches, counted over the run from 0,
    `samples` the ids of what was in them on all ranks, None where the data does not say.
    """

    def __init__(self, entries: Iterable[dict[str, Any]] = ()):
        self.entries: list[dict[str, Any]] = []
        self.add(entries)

    @classmethod
    def read(cls, path: str | Path) -> "SkipList":
        """The list in a file that `write` wrote.

        Raises:
            ValueError: no such file, or something else in it.
        """
        try:
            entries = json.loads(Path(path).read_text(encoding="utf-8"))["skip"]
            if any(not isinstance(entry["samples"], list | None) for entry in entries):
                raise TypeError("samples are no list")
        except FileNotFoundError as problem:
            raise ValueError(f"expected a skip list at {path}, got no such file") from problem
        except (ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"expected a skip list, {{'skip': [...]}}, in {path}: {problem!r}") from problem
        return cls(entries)

    def write(self, path: Path) -> None:
        """Replaces the file at once: a reader sees the old list or the new one."""
        beside = path.with_suffix(".part")
        lines = ",\n  ".join(json.dumps(entry) for entry in self.entries)
        beside.write_text(f'{{"skip": [\n  {lines}\n]}}\n', encoding="utf-8")
        beside.replace(path)

    def add(self, entries: Iterable[dict[str, Any]]) -> bool:
        """Takes in what is not there yet, for whatever reason; whether anything was new."""
        before = len(self.entries)
        for entry in entries:
            if not any(_same(entry, other) for other in self.entries):
                self.entries.append(entry)
        return len(self.entries) > before

    @property
    def samples(self) -> frozenset[Any]:
        """The ids of all listed samples.

        >>> sorted(SkipList([{"step": 3, "reason": "spike", "batches": [3], "samples": [8, 5]}]).samples)
        [5, 8]
        """
        return frozenset(chain.from_iterable(entry["samples"] or () for entry in self.entries))


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(a[key] == b[key] for key in ("step", "batches", "samples"))


class SkippingBatchSampler:
    """A batch sampler without the listed samples, for `DataLoader(dataset, batch_sampler=...)`.

    Its ids are what `batches` yields, usually places in the dataset. A listed sample gives its place to
    another of its batch; a batch of nothing else is left out, and the pass ends with its first batches
    once more: batches keep their size and passes their length, so that ranks stay in step. It also
    tells LossMonitor which samples a batch had, with a skip list or without.

    >>> batches = SkippingBatchSampler([[0, 1], [2, 3], [4, 5]])
    >>> batches.skipped = frozenset({1, 2, 3})
    >>> list(batches)
    [[0, 0], [4, 5], [0, 0]]

    Args:
        batches: Any batch sampler.
        skip_list: The skip.json of a run's folder; None: nothing is left out yet.

    Raises:
        ValueError: a skip list that cannot be read; on reading, no sample that is not listed.
    """

    def __init__(self, batches: Any, skip_list: str | Path | None = None):
        self.batches = batches
        self.skipped: frozenset[Any] = frozenset() if skip_list is None else SkipList.read(skip_list).samples
        self._given: deque[list[Any]] = deque(maxlen=REMEMBERED)
        self._count = 0

    @property
    def sampler(self) -> Any:
        """The wrapped batch sampler's sampler: a Trainer looks here to set the epoch."""
        return getattr(self.batches, "sampler", None)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        self._given.clear()
        self._count = 0
        left_out, first = 0, []
        for batch in self.batches:
            kept = [sample for sample in batch if sample not in self.skipped]
            if not kept:
                left_out += 1
                continue
            whole = list(islice(cycle(kept), len(batch)))
            if len(first) <= left_out:
                first.append(whole)
            yield self._give(whole)
        if left_out and not first:
            raise ValueError("expected a sample that is not in the skip list, got none in the whole pass")
        for whole in islice(cycle(first), left_out):
            yield self._give(whole)

    def _give(self, batch: list[Any]) -> list[Any]:
        self._given.append(batch)
        self._count += 1
        return batch

    def sample_ids(self, position: int) -> list[Any] | None:
        """What the batch at a 0-based position of this pass had in it; None when it is long ago."""
        at = position - (self._count - len(self._given))
        return list(self._given[at]) if 0 <= at < len(self._given) else None
