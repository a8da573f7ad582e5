"""What became of the scores of hand-written attention so far, known by a note on the tensor itself."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stabilitykit.observe.calls import Operand, version

_NOTE = "_stabilitykit_chain"  # an attribute of the scores lives exactly as long as they do
LOOSE = "_stabilitykit_loose"  # of what else was made of scores: the hooks that wait for its gradient
_SHARED = "its scores are used elsewhere too, and dq is that of both"
HIDES = -1e3  # a score this low gets probability 0
_DROWNS = -1e30  # beside a number this low nothing is left of a score, in any format


@dataclass(slots=True)
class Fate:
    """What all chains of one q k^T share."""

    calls: list[Any] = field(default_factory=list)  # what each product with values recorded
    still: list[tuple[Tensor, int]] = field(default_factory=list)  # not to be written to, and the version
    shared: bool = False  # gradients come from elsewhere too


@dataclass(frozen=True, slots=True)
class Chain:
    """What became of one q k^T so far, in the terms of `exact_attention`.

    `q` and `k` have a form that makes [*lead, n, d] of them, `mask` and `kept` broadcast to the scores.
    """

    q: Operand
    k: Operand
    batch: int | None  # once a shape has told the sequences from the heads
    scale: float = 1.0
    softcap: float | None = None
    mask: Tensor | None = None
    soft: bool = False  # probabilities, no longer scores
    dropout_p: float = 0.0
    kept: Tensor | None = None  # by dropout
    learned: bool = False  # the scale gets gradients
    filled: bool = False  # a finite number was put in place of scores, and no gradient passes it
    fate: Fate = field(default_factory=Fate)
    batched: bool = True  # no factor of q k^T may be a weight, which has two axes
    unknown: str | None = None  # the first thing that was not understood

    def blind(self) -> bool:
        """Whether a finite number hides all keys of a row: filled in it stops gradients, added it rounds."""
        if self.mask is None or (self.mask.dtype in (torch.bool, torch.float64) and not self.filled):
            return False
        top = self.mask.amax(-1)
        return bool(((top <= HIDES) & (self.filled | (top > _DROWNS))).any())

    def lost(self, why: str) -> "Chain":
        """The chain with the reason why nobody can tell what it computes."""
        return self if self.unknown else replace(self, mask=None, kept=None, unknown=why)


_NOTHING = Operand(torch.empty(0))


def opaque(why: str, batched: bool) -> Chain:
    """The chain of a product that is not understood."""
    return Chain(_NOTHING, _NOTHING, None, batched=batched, unknown=why)


def note(tensor: Tensor, chain: Chain) -> Tensor:
    """The tensor, which from now on is known as the end of `chain`."""
    setattr(tensor, _NOTE, (chain, version(tensor), tensor.requires_grad))
    return tensor


def noted(tensor: Any) -> Chain | None:
    """The chain that ends in this tensor, if any; lost if it was written to where nobody could see."""
    found = getattr(tensor, _NOTE, None)
    if found is None:
        return None
    chain, before, required = found
    if required != tensor.requires_grad:
        return chain.lost("a part of it inside an autograd function, as a checkpoint is")
    if any(version(held) != then for held, then in [(tensor, before), *chain.fate.still]):
        return chain.lost("a write into its scores or mask that went another way")
    return chain.lost(_SHARED) if chain.fate.shared else chain


def strayed(calls: Any, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """After any other op: what came out is lost to the chains that went in, and its gradient told them."""
    into = [arg for arg in _tensors((*args, *kwargs.values())) if hasattr(arg, _NOTE)]
    loose = [one for arg in _tensors(args) for one in getattr(arg, LOOSE, ())]
    for out in _tensors((result,)) if into or loose else ():
        forked(calls, into, out, loose, in_place=any(out is arg for arg in _tensors(args)))
        for arg in into:
            chain = noted(arg)
            assert chain is not None
            if _name(func) == "data":
                chain.fate.still.append((out, version(out)))
            elif out.dim() == arg.dim() and func is not F.linear:
                note(out, chain.lost(f"{_name(func)} on its {'probabilities' if chain.soft else 'scores'}"))


def forked(
    calls: Any, into: list[Tensor], out: Tensor, loose: Iterable[tuple[Fate, Any]] = (), *, in_place: bool
) -> None:
    """Should `out` get a gradient, dq of the chains that went into it is not that of attention alone."""
    if not out.requires_grad:
        return
    fates = [chain.fate for chain in map(noted, into) if chain]
    if in_place:  # a hook on a view that was written to crashes torch 2.13: take it that a gradient comes
        for fate in fates:
            _elsewhere(calls, fate)
        return
    hooks = [(fate, out.register_hook(partial(_elsewhere, calls, fate))) for fate in fates]
    if hooks or loose:
        setattr(out, LOOSE, [*loose, *hooks])


def _elsewhere(calls: Any, fate: Fate, grad: Tensor | None = None) -> None:
    fate.shared = True
    for call in fate.calls:
        calls.take_back(call, _SHARED)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))


def _name(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return func.__self__.__name__ if name == "__get__" else name


def relaid(tensor: Tensor | None, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor | None:
    """What broadcast to [*old, n, m] so that it broadcasts to [*new, n, m]."""
    if tensor is None or tensor.dim() <= 2 or tuple(old) == tuple(new):
        return tensor
    rows_keys = tensor.shape[-2:]
    if all(size == 1 for size in tensor.shape[:-2]):
        return tensor.reshape(rows_keys)
    return tensor.expand(*old, *rows_keys).reshape(*new, *rows_keys)
