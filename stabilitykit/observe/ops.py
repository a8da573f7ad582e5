"""What hand-written attention does to its scores between q k^T and the values, op by op."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stabilitykit.observe.calls import version
from stabilitykit.observe.chain import HIDES, LOOSE, Chain, forked, note, noted, relaid, strayed


def follow(calls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Runs an op that a chain may go through, and carries the chain on."""
    if "input" in kwargs:
        args, kwargs = (kwargs["input"], *args), {k: v for k, v in kwargs.items() if k != "input"}
    at = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor) and noted(arg)), None)
    if at is None:
        return func(*args, **kwargs)
    chain, shape = noted(args[at]), args[at].shape
    result = func(*args, **kwargs)
    assert chain is not None
    step = _STEPS[func]
    others = [arg for arg in args if _apart(arg, chain)]
    forked(calls, others, result, getattr(args[at], LOOSE, ()), in_place=result is args[0])
    if step is _softmax and chain.batched:
        calls.suspect()
    if chain.unknown:
        return note(result, replace(chain, soft=chain.soft or step in _SOFT))
    return note(result, step(_Step(chain, at, args, kwargs, shape, result)))


def _apart(arg: Any, chain: Chain) -> bool:
    other = noted(arg) if isinstance(arg, Tensor) else None
    return other is not None and other.fate is not chain.fate


@dataclass(frozen=True, slots=True)
class _Step:
    chain: Chain
    at: int  # which argument the scores are
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size  # of the scores
    result: Tensor

    def get(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    def other(self) -> Any:
        return self.args[0] if self.at == 1 else self.get(1, "other")


def _scaled(step: _Step, *, inverse: bool = False) -> Chain:
    chain, factor = step.chain, step.other()
    if chain.soft or (inverse and step.at) or "rounding_mode" in step.kwargs:
        return chain.lost("a product or quotient that no attention has")
    if isinstance(factor, Tensor) and factor.numel() > 1:
        return chain.lost("its scores are scaled by a tensor")
    learned = chain.learned or (isinstance(factor, Tensor) and factor.requires_grad)
    value = float(factor.detach() if isinstance(factor, Tensor) else factor)
    value = 1 / value if inverse else value
    mask = chain.mask if chain.mask is None or chain.mask.dtype == torch.bool else chain.mask * value
    if chain.softcap is None:
        return replace(chain, scale=chain.scale * value, mask=mask, learned=learned)
    return replace(chain, softcap=chain.softcap * value, mask=mask, learned=learned)


def _divided(step: _Step) -> Chain:
    return _scaled(step, inverse=True)


def _tanh(step: _Step) -> Chain:
    chain = step.chain
    if chain.soft or chain.softcap is not None or chain.mask is not None:
        return chain.lost("a tanh after the mask or after another")
    return replace(chain, softcap=1.0)


def _added(step: _Step, *, sign: int = 1) -> Chain:
    chain, other, alpha = step.chain, step.other(), sign * step.kwargs.get("alpha", 1)
    if chain.soft or (step.at and alpha != 1) or step.result.shape != step.shape:
        return chain.lost("a sum or difference that no attention has")
    if _made_of(other, chain):
        return chain.lost("a bias made of its own scores")
    bias = other if isinstance(other, Tensor) else step.result.new_tensor(other)
    bias = bias if alpha == 1 else bias * alpha
    if chain.mask is None:
        if bias is other and not hasattr(bias, LOOSE):
            chain.fate.still.append((bias, version(bias)))  # kept as it is, it must stay as it is
        return replace(chain, mask=bias if bias.is_floating_point() else bias.to(step.result.dtype))
    if chain.mask.dtype == torch.bool:
        return replace(chain, mask=torch.where(chain.mask, bias, -inf))
    return replace(chain, mask=chain.mask + bias)


def _made_of(other: Any, chain: Chain) -> bool:
    # Such a bias has a share in the gradients of q and k; only what is one number per row has none.
    if not isinstance(other, Tensor) or not other.requires_grad:
        return False
    if other.dim() == 0 or other.shape[-1] == 1:
        for fate, hook in getattr(other, LOOSE, ()):
            if fate is chain.fate:
                hook.remove()
        return False
    own = noted(other)
    return own is not None and own.q.tensor is chain.q.tensor


def _taken_off(step: _Step) -> Chain:
    return _added(step, sign=-1)


def _filled(step: _Step) -> Chain:
    return _hidden(step, step.get(1, "mask").bool(), step.get(2, "value"))


def _where(step: _Step) -> Chain:
    if step.at == 0:  # scores.where(keep, value)
        return _hidden(step, ~step.args[1], step.get(2, "other"))
    keep = step.args[0] if step.at == 1 else ~step.args[0]
    return _hidden(step, ~keep, step.get(2, "other") if step.at == 1 else step.args[1])


def _hidden(step: _Step, hidden: Tensor, value: Any) -> Chain:
    chain = step.chain
    value = float(value.detach().max()) if isinstance(value, Tensor) else float(value)
    if step.result.shape != step.shape or value > (0 if chain.soft else HIDES):
        return chain.lost(f"a fill with {value:g}")
    if chain.soft:
        return replace(chain, kept=~hidden if chain.kept is None else chain.kept & ~hidden)
    if value == -inf and (chain.mask is None or chain.mask.dtype == torch.bool):
        return replace(chain, mask=~hidden if chain.mask is None else chain.mask & ~hidden)
    # Finite: a row that is hidden as a whole attends to all its keys alike. A float64 sum keeps nothing
    # of the score beside this number either.
    wide = step.result.dtype == torch.float64
    floor = torch.finfo(torch.float64 if wide else torch.bfloat16).min
    bias = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=hidden.device)
    if chain.mask is not None:
        bias = chain.mask if chain.mask.dtype != torch.bool else torch.where(chain.mask, bias, -inf)
    mask = torch.where(hidden, floor if value > -inf else -inf, bias)
    return replace(chain, mask=mask, filled=chain.filled or value > -inf)


def _softmax(step: _Step) -> Chain:
    if step.chain.soft or step.get(1, "dim") not in (-1, len(step.shape) - 1):
        return replace(step.chain.lost("a softmax that is not over the keys, once"), soft=True)
    return replace(step.chain, soft=True)


def _weighing(step: _Step) -> Chain:
    return replace(step.chain.lost("its weights do not come from a call of softmax"), soft=True)


def _dropped(step: _Step) -> Chain:
    chain, p, on = step.chain, step.get(1, "p", 0.5), step.get(2, "training", step.kwargs.get("train", True))
    if not on or p == 0:
        return chain
    if not chain.soft or chain.dropout_p or p == 1:
        return chain.lost("a dropout that is not of its probabilities, once")
    kept = step.result != 0  # a probability of 0 contributes nothing, kept or not
    return replace(chain, dropout_p=float(p), kept=kept if chain.kept is None else chain.kept & kept)


def _reshaped(step: _Step) -> Chain:
    chain, shape = step.chain, step.result.shape
    if shape[-2:] != step.shape[-2:]:
        return chain.lost("a shape that mixes rows or keys with something else")
    laid = {
        name: relaid(tensor, step.shape[:-2], shape[:-2])
        for name, tensor in (("mask", chain.mask), ("kept", chain.kept))
    }
    return replace(chain, **laid, batch=shape[0] if len(shape) > 3 else chain.batch)


def _same(step: _Step) -> Chain:
    return step.chain


def spelled(*names: str) -> list[Any]:
    """The functions of these names, as functions of torch, of F and as methods."""
    owners = (torch, F, Tensor, torch.special)
    return [getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)]


def _table() -> dict[Any, Callable[[_Step], Chain]]:
    steps: dict[Callable[[_Step], Chain], tuple[str, ...]] = {
        _scaled: ("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
        _divided: ("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"),
        _tanh: ("tanh", "tanh_"),
        _added: ("add", "add_", "__add__", "__radd__", "__iadd__"),
        _taken_off: ("sub", "sub_", "subtract", "__sub__", "__isub__"),
        _filled: ("masked_fill", "masked_fill_"),
        _where: ("where",),
        _softmax: ("softmax",),
        _weighing: ("exp", "exp_", "exp2", "log_softmax", "softmin", "gumbel_softmax", "sigmoid", "sigmoid_"),
        _dropped: ("dropout",),
        _reshaped: ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
        _same: ("to", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone"),
    }  # fmt: skip
    return {func: step for step, names in steps.items() for func in spelled(*names)}


def _assigned(calls: Any, func: Any, args: Any, kwargs: Any) -> None:
    chain = noted(args[0])
    func(*args, **kwargs)
    strayed(calls, func, args, kwargs, args[0])
    if chain is not None:
        note(args[0], chain.lost("an assignment into its scores"))


_SOFT = (_softmax, _weighing)
_STEPS = _table()
HANDLERS: dict[Any, Any] = {**dict.fromkeys(_STEPS, follow), Tensor.__setitem__: _assigned}
