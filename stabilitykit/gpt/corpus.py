"""Token arrays of a corpus, and batches that are a pure function of (seed, index)."""

import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

SEPARATOR = b"\0"  # between files; occurs in no source text
# Tests, and what Linux distributions ship apart, so that most installs hold the same text.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests"} | {"ensurepip", "idlelib", "tkinter", "turtledemo"}
)
_LEAST_LIBRARY_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """Token ids below vocab_size, uint8, uint16 or uint32, in two halves that share no token."""

    name: str
    vocab_size: int
    train: np.ndarray
    validation: np.ndarray


def read_corpus(
    path: str | Path | None = None,
    *,
    vocab_size: int | None = None,
    dtype: Literal["uint16", "uint32"] = "uint16",
    validation_fraction: float = 0.05,
) -> Corpus:
    """The corpus at `path`; None: the Python standard library's own source, as bytes.

    A `.bin` file, or a folder with `train.bin` (and `val.bin`), holds nanoGPT-style tokens of
    `dtype` and needs `vocab_size`. Any other file is read as bytes, a folder's in sorted order but
    the hidden ones. The last `validation_fraction` is the validation half. Single files are
    memory-mapped.

    Raises:
        ValueError: nothing there, nothing in it, or a vocabulary unfit for the kind of file.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"expected validation_fraction in (0, 1), got {validation_fraction}")
    root = None if path is None else Path(path)
    if root is not None and not root.exists():
        raise ValueError(f"expected a corpus at {root}, got no such file or folder")
    if root is not None and (root.suffix == ".bin" or (root / "train.bin").is_file()):
        return _token_corpus(root, vocab_size, np.dtype(dtype), validation_fraction)
    if vocab_size not in (None, 256):
        raise ValueError(f"expected vocab_size 256 (or none) for text read as bytes, got {vocab_size}")
    if root is None:
        return Corpus("python standard library", 256, *_split(_library(), validation_fraction))
    tokens = _mapped(root, np.dtype("uint8")) if root.is_file() else _joined(root, _files(root))
    return Corpus(root.name, 256, *_split(tokens, validation_fraction))


def starts(tokens: np.ndarray, context: int) -> int:
    """How many windows of context + 1 tokens there are.

    Raises:
        ValueError: none.
    """
    if len(tokens) <= context:
        raise ValueError(
            f"expected more than {context} tokens (the context) in each half of the corpus, got {len(tokens)}"
        )
    return len(tokens) - context


def drawn(
    tokens: np.ndarray,
    *,
    seed: int,
    index: int,
    batch_size: int,
    context: int,
    rank: int = 0,
    world: int = 1,
    skipped: Collection[int] = (),
) -> np.ndarray:
    """First tokens of a batch's random windows, int64 [batch_size]; none of them is `skipped`.

    A skipped window is replaced by another draw: all other windows, of this batch and of every other,
    are what they are without skipping.

    Raises:
        ValueError: every window is skipped.
    """
    count = starts(tokens, context)
    # SeedSequence hashes (seed, index): neighbouring indices or seeds give unrelated draws.
    generator = np.random.default_rng([seed, index])
    draw = generator.integers(count, size=world * batch_size)
    if skipped:
        listed = np.fromiter(skipped, np.int64)
        if len(np.unique(listed[(listed >= 0) & (listed < count)])) == count:
            raise ValueError(f"expected a window that is not in the skip list, got all {count} of them in it")
        while (bad := np.isin(draw, listed)).any():
            draw[bad] = generator.integers(count, size=int(bad.sum()))
    return draw[rank * batch_size : (rank + 1) * batch_size]


def batch(tokens: np.ndarray, *, context: int, **which: Any) -> tuple[Tensor, Tensor]:
    """(inputs, targets), int64 [batch_size, context]: random windows and their next tokens.

    The same arguments, those of `drawn`, give the same batch. The ranks' batches, one below the other,
    are the batch of a single rank with a batch_size world times as large.
    """
    firsts = drawn(tokens, context=context, **which)
    windows = np.stack([tokens[first : first + context + 1] for first in firsts])
    rows = torch.from_numpy(windows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


class Batches:
    """A loader whose pass is len(self) batches, with a state that Lightning saves and restores.

    A pass goes on where the last one ended: epochs differ, and a resume in mid-epoch is exact. With
    `rewind` every pass begins at batch 0, for validation.

    Raises:
        ValueError: a corpus shorter than a window, or, on reading, a token id >= vocab_size.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        seed: int,
        batch_size: int,
        context: int,
        vocab_size: int,
        rank: int = 0,
        world: int = 1,
        length: int | None = None,  # None: as many as it takes to see every token once, on average
        index: int = 0,
        rewind: bool = False,
        skipped: Collection[int] = (),
    ):
        starts(tokens, context)
        self.tokens = tokens
        self.seed, self.batch_size, self.context = seed, batch_size, context
        self.vocab_size = vocab_size
        self.rank, self.world = rank, world
        self.length = length or max(1, len(tokens) // (batch_size * context * world))
        self.index = index  # of the batch that comes next
        self.rewind = rewind
        self.skipped = skipped
        self._first = index  # of the present pass

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch(self.tokens, **self._which(index))
        largest = max(int(inputs.max()), int(targets.max()))
        if largest >= self.vocab_size:
            raise ValueError(
                f"expected token ids below vocab_size {self.vocab_size}, got {largest} in batch {index}"
            )
        return inputs, targets

    def _which(self, index: int) -> dict[str, Any]:
        names = ("seed", "batch_size", "context", "rank", "world", "skipped")
        return {"index": index, **{name: getattr(self, name) for name in names}}

    def sample_ids(self, position: int) -> list[int]:
        """Which windows the batch at a 0-based position of this pass has: their first tokens' places."""
        return drawn(self.tokens, **self._which(self._first + position)).tolist()

    def redrawn(self, index: int) -> bool:
        """Whether batch `index` of the run is another one because of what is skipped."""
        which = self._which(index)
        kept = drawn(self.tokens, **which) == drawn(self.tokens, **{**which, "skipped": ()})
        return not kept.all()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.rewind:
            self.index = 0
        self._first = self.index
        for _ in range(self.length):
            # Before the yield: a checkpoint written while a batch is in use must name the next one.
            self.index += 1
            yield self[self.index - 1]

    def state_dict(self) -> dict[str, int]:
        """The index of the next batch, counted over all passes."""
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on with the batch that `state_dict` named."""
        self.index = state["index"]


def _library() -> np.ndarray:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in _files(root, _LEFT_OUT)
        if path.suffix == ".py"
        and not path.name.startswith("_sysconfigdata")  # describes one machine's build
    ]
    tokens = _joined(root, files)
    if len(tokens) < _LEAST_LIBRARY_BYTES:
        raise ValueError(
            f"expected {_LEAST_LIBRARY_BYTES:,} bytes or more of the standard library's .py files "
            f"in {root}, got {len(tokens):,}; give a path to a corpus"
        )
    return tokens


def _files(root: Path, left_out: frozenset[str] = frozenset()) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and name[0] != "."]
        found += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _joined(root: Path, files: Iterable[Path]) -> np.ndarray:
    text = SEPARATOR.join(path.read_bytes() for path in files)
    if not text:
        raise ValueError(f"expected text in {root}, got no bytes")
    return np.frombuffer(text, np.uint8)


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise ValueError(f"expected a whole number of {dtype} tokens in {path}, got {size} bytes")
    return np.memmap(path, dtype, mode="r")


def _split(tokens: np.ndarray, validation_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    first = len(tokens) - int(len(tokens) * validation_fraction)
    return tokens[:first], tokens[first:]


def _token_corpus(root: Path, vocab_size: int | None, dtype: np.dtype, validation_fraction: float) -> Corpus:
    if vocab_size is None:
        raise ValueError(f"expected vocab_size with the .bin tokens in {root}, got none")
    if root.is_file():
        return Corpus(root.stem, vocab_size, *_split(_mapped(root, dtype), validation_fraction))
    train = _mapped(root / "train.bin", dtype)
    beside = root / "val.bin"
    halves = (train, _mapped(beside, dtype)) if beside.is_file() else _split(train, validation_fraction)
    return Corpus(root.name, vocab_size, *halves)
