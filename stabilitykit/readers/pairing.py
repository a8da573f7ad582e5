"""Which tensor of one checkpoint is which of another: wrappers' prefixes, tied weights, missing names."""

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from stabilitykit.readers.checkpoints import Checkpoint, Entry

# What torch.compile, FSDP and activation checkpointing put between the names of two modules.
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PREFIX = re.compile(r"^(module|model|state_dict)\.")
_DEPTH = 4  # prefixes in front of one another, as in state_dict.model.module.model.
_NAMED = 5

Entries = dict[str, Entry]
Pairs = dict[str, tuple[Entry, Entry]]


def paired(a: Checkpoint, b: Checkpoint, *, allow_missing: bool = False) -> tuple[Pairs, list[str]]:
    """The tensors that are in both, tied ones once, and in words what was left out.

    The prefixes `_orig_mod.`, `module.`, `model.` and those of other wrappers are taken off each side as
    far as it takes for most names to agree. Tied are tensors that share memory in one checkpoint and are
    equal in the other.

    Raises:
        ValueError: names in one only, unless `allow_missing`; none in both; shapes that differ.
    """
    ours, theirs = _agreeing(a.entries, b.entries)
    common = [name for name in ours if name in theirs]
    alone = [
        f"only in {checkpoint.path}: {_listed(names)}"
        for checkpoint, entries in ((a, ours), (b, theirs))
        if (names := _alone(entries, common))
    ]
    if not common:
        raise ValueError(f"expected names that are in both, got {'; '.join(alone)}")
    if alone and not allow_missing:
        advice = "compare what both have with --allow-missing"
        raise ValueError(f"expected the same names in both, got {'; '.join(alone)}; {advice}")
    differ = [
        f"{name}: {list(ours[name].shape)} and {list(theirs[name].shape)}"
        for name in common
        if ours[name].shape != theirs[name].shape
    ]
    if differ:
        raise ValueError(f"expected one shape under one name, got {_listed(differ)}")
    pairs, ties = _untied({name: (ours[name], theirs[name]) for name in common})
    left_out = [
        f"not compared in {checkpoint.path}: {_listed(checkpoint.left_out)}"
        for checkpoint in (a, b)
        if checkpoint.left_out
    ]
    return pairs, [*alone, *left_out, *ties]


def _agreeing(ours: Entries, theirs: Entries) -> tuple[Entries, Entries]:
    readings = product(enumerate(_readings(ours)), enumerate(_readings(theirs)))
    ranked = sorted(readings, key=lambda pair: pair[0][0] + pair[1][0])  # fewest prefixes taken off first
    (_, one), (_, other) = max(ranked, key=lambda pair: len(pair[0][1].keys() & pair[1][1].keys()))
    return one, other


def _readings(entries: Entries) -> Iterator[Entries]:
    """The entries as they are, without wrappers, then with one prefix more off wherever there is one."""
    yield entries
    names = {name: _WRAPPERS.sub("", name) for name in entries}
    for _ in range(_DEPTH):
        if len(set(names.values())) < len(names):
            return  # two became one
        yield {short: entries[name] for name, short in names.items()}
        names = {name: _PREFIX.sub("", short, count=1) for name, short in names.items()}


def _alone(entries: Entries, common: Collection[str]) -> list[str]:
    # A tied name that the other side does not have is there all the same, under its other name.
    there = {entries[name].memory for name in common}
    return [name for name, entry in entries.items() if name not in common and entry.memory not in there]


def _untied(pairs: Pairs) -> tuple[Pairs, list[str]]:
    kept: Pairs = {}
    ties: list[str] = []
    first: dict[tuple[int, Hashable], str] = {}
    for name, pair in pairs.items():
        known = [first.setdefault((side, entry.memory), name) for side, entry in enumerate(pair)]
        before = next((other for other in known if other in kept), None)
        if before is None:
            kept[name] = pair
        elif all(map(_same, kept[before], pair)):
            ties.append(f"{name} is tied to {before}: counted once")
        else:
            kept[name] = pair
            ties.append(f"{name} is tied to {before} in one checkpoint and not in the other")
    return kept, ties


def _same(one: Entry, other: Entry) -> bool:
    if one.memory == other.memory:
        return True
    return one.shape == other.shape and one.load().equal(other.load())


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def loaders(pairs: Pairs) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Per name what loads both tensors of a pair, one pair at a time, for `compared`."""
    return {name: partial(_both, *pair) for name, pair in pairs.items()}


def _both(a: Entry, b: Entry) -> tuple[Any, Any]:
    return a.load(), b.load()
