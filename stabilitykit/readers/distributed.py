"""Folders of torch.distributed.checkpoint, read tensor by tensor; their index is unpickled without code."""

import io
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stabilitykit.readers.refusals import BROKEN, refusal

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
_OTHERS = re.compile(r"optim|lr_?sched|schedul|dataloader|train_state|rng|callbacks|loops|hyper_parameters")
_PLAIN = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
}

Part = tuple[tuple[int, ...], Path, int, int]  # offsets in the tensor; file, first byte and bytes
Found = tuple[str, tuple[int, ...], str, Callable[[], "Tensor"]]  # name, shape, dtype, how to read it


def distributed_tensors(folder: Path) -> Iterator[Found]:
    """The tensors of a distributed checkpoint but those of its optimizer and other state.

    Raises:
        ValueError: an index that is truncated, foreign or wants to run code; a shard that is missing or,
            when a tensor of it is read, truncated.
    """
    tensors, storage = _index(folder / METADATA)
    stored = {(at.fqn, tuple(at.offset or ())): info for at, info in storage}
    for name, about in tensors:
        if not hasattr(about, "chunks") or _OTHERS.match(name):
            continue
        parts = [_part(folder, name, chunk, stored) for chunk in about.chunks]
        shape, dtype = tuple(about.size), about.properties.dtype
        if sum(prod(chunk.sizes) for chunk in about.chunks) != prod(shape):
            raise ValueError(f"expected chunks that fill {list(shape)} in {folder}, {name} has gaps")
        text = str(dtype).removeprefix("torch.")
        yield name, shape, text, partial(_assembled, name, shape, dtype, parts)


def _part(folder: Path, name: str, chunk: Any, stored: dict[Any, Any]) -> Part:
    info = stored.get((name, tuple(chunk.offsets)))
    if info is None or not (folder / info.relative_path).is_file():
        raise ValueError(f"expected the shards that {folder / METADATA} names, one of {name} is missing")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"expected plain shards in {folder}, got {info.transform_descriptors} in {name}")
    return tuple(chunk.offsets), folder / info.relative_path, info.offset, info.length


class _PlainUnpickler(pickle.Unpickler):
    """Builds what an index is made of, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _index(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            index = _PlainUnpickler(file).load()
        return index.state_dict_metadata.items(), index.storage_data.items()
    except (pickle.UnpicklingError, *BROKEN) as problem:
        raise refusal(problem, path, "a distributed checkpoint's index") from problem


def _assembled(name: str, shape: tuple[int, ...], dtype: Any, parts: list[Part]) -> "Tensor":
    import torch

    whole = None
    for offsets, path, begin, length in parts:
        part = _chunk(name, path, begin, length)
        if tuple(part.shape) == shape:
            return part
        whole = torch.empty(shape, dtype=dtype) if whole is None else whole
        whole[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    assert whole is not None
    return whole


def _chunk(name: str, path: Path, begin: int, length: int) -> "Tensor":
    import torch

    with path.open("rb") as file:
        file.seek(begin)
        raw = file.read(length)
    try:
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True).detach()
    except (pickle.UnpicklingError, *BROKEN) as problem:
        raise refusal(problem, path, f"the shard of {name}") from problem
