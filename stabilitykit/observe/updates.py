"""Updates: what the optimizers get and do in one step, per parameter: gradient, moment, weight, change."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stabilitykit.numerics.precursors import (
    corrected,
    each,
    largest,
    norms,
    rms,
    sample,
    sampled,
    small_shares,
)

_SQUARED = ("grad", "update", "weight", "rms")  # norms and roots of means: their squares add up
_SUMMED = (*_SQUARED, "small")


class _Part(NamedTuple):
    """What one optimizer has on one device: parameters with a gradient, and a sample of their weights."""

    at: list[int]
    params: list[Tensor]
    own: list[Tensor]  # what this rank holds of them
    grads: list[Tensor]
    sizes: list[int]
    before: Tensor


class Updates:
    """Numbers of one optimizer step, per parameter, on their device until they are read.

    `watch` is for an optimizer that is about to step, with gradients complete and not yet clipped; the
    rest is taken by a hook when it has stepped. One that does not step (a GradScaler that met an
    overflow) leaves its parameters without an update. Price: one read of all gradients and weights, and
    a copy of `SAMPLE` weights of each tensor until the step is done.

    Args:
        parameters: by name; of one that is sharded (a DTensor) every rank measures its own part.
        world: how many ranks there are, all of which measure.
    """

    def __init__(self, parameters: Mapping[str, Tensor], world: int):
        self.parameters = dict(parameters)
        self._at = {id(p): i for i, p in enumerate(parameters.values())}
        self._sizes = [sampled(_local(p)) for p in parameters.values()]
        self._factors = [_factors(*of, world) for of in zip(parameters.values(), self._sizes, strict=True)]
        # By signal, the numbers of some parameters.
        self._found: dict[str, list[tuple[list[int], Tensor]]] = {}
        self._handles: list[Any] = []
        self.untold: set[str] = set()  # optimizers that tell nobody when they have stepped

    def watch(self, optimizer: Optimizer, scale: Tensor | None = None) -> None:
        """Takes the gradients of `optimizer`, still multiplied by `scale`, and waits for its step."""
        parts = list(self._parts(optimizer))
        for part in parts:
            found = norms(part.grads)
            self._note("grad", part.at, found if scale is None else found / scale.to(found.device))

        @torch.no_grad()
        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            while parts:  # a manual loop may step once more in this batch; torch forbids removal here
                part = parts.pop()
                self._changes(part)
                self._against_moments(optimizer, part)

        try:
            self._handles.append(optimizer.register_step_post_hook(after))
        except AttributeError:  # a wrapper that has an optimizer and is none
            self.untold.add(type(optimizer).__name__)

    def close(self) -> None:
        """Waits no longer for a step."""
        for handle in self._handles:
            handle.remove()

    def _parts(self, optimizer: Optimizer) -> Iterator[_Part]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        held = [p for p in held if id(p) in self._at and p.grad is not None and p.numel()]
        for device in dict.fromkeys(p.device for p in held):
            params = [p for p in held if p.device == device]
            at = [self._at[id(p)] for p in params]
            own, grads = [_local(p) for p in params], [_local(p.grad) for p in params]
            yield _Part(at, params, own, grads, [self._sizes[i] for i in at], sample(own))

    def _changes(self, part: _Part) -> None:
        now = sample(part.own)
        self._note("update", part.at, norms((part.before - now).split(part.sizes)))
        self._note("weight", part.at, norms(now.split(part.sizes)))
        self._note("peak", part.at, largest(part.own))

    def _against_moments(self, optimizer: Optimizer, part: _Part) -> None:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        kinds: dict[bool, list[int]] = {}
        for i, p in enumerate(part.params):
            if isinstance(groups[id(p)].get("eps"), float | int | Tensor):  # Adafactor has two
                moment = optimizer.state.get(p, {}).get("exp_avg_sq")  # Adam-mini has one number of it
                kinds.setdefault(_alike(moment, part.own[i]), []).append(i)
        for has_moment, chosen in kinds.items():
            at, sizes = [part.at[i] for i in chosen], [part.sizes[i] for i in chosen]
            of = [groups[id(part.params[i])] for i in chosen]
            grads = sample([part.grads[i] for i in chosen])
            eps = each(_sent([float(group["eps"]) for group in of], grads.device), sizes).float()
            self._note("small", at, small_shares(grads, eps, sizes))
            if has_moment:
                states = [optimizer.state[part.params[i]] for i in chosen]
                self._note("rms", at, rms(grads, _moments(of, states, sizes), eps, sizes))

    def _note(self, what: str, at: list[int], values: Tensor) -> None:
        self._found.setdefault(what, []).append((at, values))

    # What adds up over the ranks, what is largest of all, and how they are read.

    def sums(self, device: torch.device) -> Tensor:
        """Float64 [parameters x 5]: each rank's part of what `read` expects the sum of."""
        columns = [self._column(what, device) for what in _SUMMED]
        columns = [c.square() if what in _SQUARED else c for what, c in zip(_SUMMED, columns, strict=True)]
        factors = torch.tensor(self._factors, dtype=torch.float64).view(-1, len(_SUMMED))
        return (torch.stack(columns, 1) * factors.to(device, non_blocking=True)).flatten()

    def peaks(self, device: torch.device) -> Tensor:
        """Float64 [parameters]: of each rank what `read` expects the largest of."""
        return self._column("peak", device)

    def _column(self, what: str, device: torch.device) -> Tensor:
        column = torch.zeros(len(self.parameters), dtype=torch.float64, device=device)
        for at, values in self._found.get(what, []):
            column[torch.tensor(at).to(device, non_blocking=True)] = values.to(device).double()
        return column

    def read(self, sums: Sequence[float], peaks: Sequence[float]) -> dict[str, dict[str, float]]:
        """Per parameter with a gradient what was measured: norms grad, update, weight; rms, small, peak."""
        seen = {what: {i for at, _ in found for i in at} for what, found in self._found.items()}
        result = {}
        for i, (name, p) in enumerate(self.parameters.items()):
            if i not in seen.get("grad", ()):
                continue
            grad, update, weight, scaled, small = sums[5 * i : 5 * i + 5]
            count = p.numel() * (2 if p.is_complex() else 1)
            numbers = {
                "grad": math.sqrt(grad),
                "update": math.sqrt(update),
                "weight": math.sqrt(weight),
                "rms": math.sqrt(scaled / count),
                "small": small / count,
                "peak": peaks[i],
            }
            result[name] = {what: numbers[what] for what in seen if i in seen[what]}
        return result


def _local(tensor: Tensor) -> Tensor:
    """What this rank holds, as plain real numbers: of a complex one both parts, of a sparse one all."""
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    own = own if own.layout is torch.strided else own.to_dense()
    return torch.view_as_real(own.resolve_conj()) if own.is_complex() else own


def _alike(moment: Any, own: Tensor) -> bool:
    return isinstance(moment, Tensor) and _local(moment).shape == own.shape


def _factors(p: Tensor, taken: int, world: int) -> list[float]:
    """What a rank's squares of grad, update, weight and rms, and its small, count in the sum over ranks."""
    parts = 1
    if isinstance(p, DTensor):
        sizes = zip(p.device_mesh.shape, p.placements, strict=True)
        parts = math.prod(size for size, placement in sizes if placement.is_shard())
    own, copies = _local(p).numel(), world / parts
    each = own / max(taken, 1)
    return [1 / copies, each / copies, each / copies, own / copies, own / copies]


def _moments(groups: Sequence[Any], states: Sequence[Any], sizes: Sequence[int]) -> Tensor:
    """A sample of the second moments that the step divided by, one tensor after the other."""
    found = sample([_local(state["exp_avg_sq"]) for state in states])
    counts = [state.get("step", group.get("step")) for group, state in zip(groups, states, strict=True)]
    known = ["betas" in group and n is not None for group, n in zip(groups, counts, strict=True)]
    # 1 - 0^1 = 1: nothing to correct.
    beta2 = [group["betas"][1] if k else 0.0 for group, k in zip(groups, known, strict=True)]
    steps = [_step(n) if k else torch.ones(()) for n, k in zip(counts, known, strict=True)]
    where = {step.device for step in steps}
    if len(where) > 1:
        steps = [step.to(found.device, non_blocking=True) for step in steps]
    return corrected(found, _sent(beta2, found.device), torch.stack(steps).to(found.device), sizes)


def _step(count: Any) -> Tensor:
    count = _local(count) if isinstance(count, Tensor) else torch.tensor(float(count))
    return count.float().view(())


def _sent(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)
