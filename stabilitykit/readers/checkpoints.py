"""Checkpoints of any trainer as named tensors, each read from its file when it is asked for; weights only."""

import json
import pickle
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stabilitykit.readers.distributed import METADATA, distributed_tensors
from stabilitykit.readers.refusals import BROKEN, refusal

if TYPE_CHECKING:
    from torch import Tensor

# Where trainers keep the weights beside the rest: Lightning, nanoGPT, many scripts, DeepSpeed.
STATES = ("state_dict", "model", "model_state_dict", "module")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
FILES = ("model.safetensors", "pytorch_model.bin")
# Buffers that follow from the configuration: old checkpoints hold them, new ones do not.
DERIVED = re.compile(r"(^|\.)((original_)?inv_freq|(cos|sin)_cached|masked_bias)$")
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # of torch.save, now and until 1.5
_SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint that is not read yet; tied ones have one `memory`."""

    shape: tuple[int, ...]
    dtype: str
    memory: Hashable
    load: Callable[[], "Tensor"]


@dataclass(slots=True)
class Checkpoint:
    """The floating-point tensors of a checkpoint; `left_out` names what else was there."""

    path: Path
    entries: dict[str, Entry]
    left_out: list[str] = field(default_factory=list)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """What a checkpoint holds, without its values: Lightning, a torch state dict, safetensors, a folder.

    A folder is Hugging Face's (one file, or an index and its shards) or a torch distributed checkpoint.
    Left out are tensors that are not floating-point, those without values and buffers that follow from
    the configuration (rotary frequencies).

    Raises:
        ValueError: a file that is missing, truncated, foreign, or would run code when it is loaded; no
            weights in it, quantised ones (int8), or ones on the meta device.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"expected an existing checkpoint, got {path}")
    found = dict(_folder(path) if path.is_dir() else _file(path))
    checkpoint = Checkpoint(path, {})
    for name, entry in found.items():
        if entry.dtype == "int8":
            raise ValueError(f"expected floating-point weights in {path}, got int8 in {name}")
        if not entry.dtype.startswith(("float", "bfloat")) or not prod(entry.shape) or DERIVED.search(name):
            checkpoint.left_out.append(f"{name} ({entry.dtype}{list(entry.shape)})")
        else:
            checkpoint.entries[name] = entry
    if not checkpoint.entries:
        raise ValueError(f"expected floating-point weights in {path}, found none among {len(found)} tensors")
    return checkpoint


def _folder(path: Path) -> Iterator[tuple[str, Entry]]:
    if (path / METADATA).is_file():
        return _distributed(path)
    for index in INDEXES:
        if (path / index).is_file():
            return _shards(path / index)
    for name in FILES:
        if (path / name).is_file():
            return _file(path / name)
    alone = sorted(path.glob("*.safetensors"))
    if len(alone) != 1:
        raise ValueError(
            f"expected a checkpoint in {path}: {', '.join((METADATA, *INDEXES, *FILES))}; found none of them"
        )
    return _file(alone[0])


def _file(path: Path) -> Iterator[tuple[str, Entry]]:
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(_ZIP) or head.startswith(_LEGACY):
        return _torch(path, mapped=head.startswith(_ZIP))
    if head[8:9] == b"{":
        return _safetensors(path)
    raise ValueError(f"expected a torch or safetensors file, got {path}, which is neither or is truncated")


def _shards(index: Path) -> Iterator[tuple[str, Entry]]:
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"expected a weight_map in {index}, got a file without: {problem}") from problem
    for name in sorted(set(files.values())):
        path = index.parent / name
        if not path.is_file():
            raise ValueError(f"expected the shard {name} that {index} names, found no such file")
        held = dict(_file(path))
        listed = {tensor for tensor, shard in files.items() if shard == name}
        if not listed <= held.keys():
            lost = sorted(listed - held.keys())
            raise ValueError(f"expected {lost[0]} in {path}, as {index.name} says; it is not there")
        yield from ((tensor, held[tensor]) for tensor in sorted(listed))


def _torch(path: Path, *, mapped: bool) -> Iterator[tuple[str, Entry]]:
    import torch

    for name, value in _state(_load(path, mapped=mapped), path).items():
        if value.is_meta:
            raise ValueError(f"expected values in {path}, got a meta tensor without any: {name}")
        dtype = str(value.dtype if value.layout == torch.strided else value.layout).removeprefix("torch.")
        memory = None
        if value.layout == torch.strided:
            memory = (value.data_ptr(), tuple(value.shape), value.stride())
        yield name, Entry(tuple(value.shape), dtype, memory, partial(_itself, value))


def _itself(value: "Tensor") -> "Tensor":
    return value


def _load(path: Path, *, mapped: bool) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickle protocols and storages: nothing the reader can mend
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except (pickle.UnpicklingError, *BROKEN) as problem:
            raise refusal(problem, path, "a whole torch file") from problem


def _state(loaded: Any, path: Path) -> dict[str, "Tensor"]:
    import torch

    if not isinstance(loaded, Mapping):
        raise ValueError(f"expected a state dict in {path}, got {type(loaded).__name__}")
    state = next((loaded[key] for key in STATES if isinstance(loaded.get(key), Mapping)), loaded)
    tensors = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        keys = ", ".join(map(str, list(state)[:5])) or "nothing"
        raise ValueError(f"expected a state dict in {path}, or one under {', '.join(STATES)}, got {keys}")
    return tensors  # what is left is a module's extra state


def _safetensors(path: Path) -> Iterator[tuple[str, Entry]]:
    # huggingface/safetensors README: u64 length of the header, JSON, then the values.
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if 8 + length <= size else b""
    try:
        header = {name: value for name, value in json.loads(text).items() if name != "__metadata__"}
        parts = {name: (one["dtype"], one["shape"], one["data_offsets"]) for name, one in header.items()}
        whole = 8 + length + max((end for _, _, (_, end) in parts.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"expected a safetensors file, got {path}, truncated or foreign") from problem
    if whole != size:
        raise ValueError(f"expected {whole} bytes in {path}, as its header says, got {size}")
    for name, (code, shape, (begin, end)) in parts.items():
        if code not in _SAFETENSORS:
            raise ValueError(f"expected a dtype of {', '.join(_SAFETENSORS)} in {path}, got {code} in {name}")
        begin, end = 8 + length + begin, 8 + length + end
        load = partial(_mapped, path, size, begin, end, _SAFETENSORS[code], tuple(shape))
        yield name, Entry(tuple(shape), _SAFETENSORS[code], (str(path), begin), load)


def _mapped(path: Path, size: int, begin: int, end: int, dtype: str, shape: tuple[int, ...]) -> "Tensor":
    import torch

    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[begin:end]
    kind: torch.dtype = getattr(torch, dtype)
    if raw.numel() != prod(shape) * kind.itemsize:
        raise ValueError(
            f"expected {prod(shape) * kind.itemsize} bytes for {list(shape)} in {path}, got {raw.numel()}"
        )
    return (raw if begin % kind.itemsize == 0 else raw.clone()).view(kind).view(shape)


def _distributed(path: Path) -> Iterator[tuple[str, Entry]]:
    for name, shape, dtype, load in distributed_tensors(path):
        yield name, Entry(shape, dtype, (str(path), name), load)
