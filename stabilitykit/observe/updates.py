"""Updates: what the optimizers get and do in one step, per parameter: gradient, moment, weight, change."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stabilitykit.numerics.precursors import corrected, largest, norms, rms, sampled, small_shares, spread

_SQUARED = ("grad", "update", "weight", "rms")  # norms and roots of means: their squares add up


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
        self.names = {id(p): name for name, p in parameters.items()}
        self.parameters = dict(parameters)
        self._factors = {name: _factors(p, world) for name, p in parameters.items()}
        self._found: dict[str, dict[str, Tensor]] = {}
        self._handles: list[Any] = []

    def watch(self, optimizer: Optimizer, scale: Tensor | None = None) -> None:
        """Takes the gradients of `optimizer`, still multiplied by `scale`, and waits for its step."""
        params = {name: p for name, p in self._params(optimizer) if p.grad is not None}
        if not params:
            return
        grads = [_local(p.grad) for p in params.values() if p.grad is not None]
        before = [spread(_local(p)) for p in params.values()]
        for name, norm in zip(params, norms(grads), strict=True):
            self._found[name] = {"grad": norm if scale is None else norm / scale}

        @torch.no_grad()
        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if before:  # a manual loop may step once more in this batch; torch forbids removal here
                self._changes(params, before)
                self._against_moments(optimizer, params, [spread(grad) for grad in grads])
                before.clear()

        self._handles.append(optimizer.register_step_post_hook(after))

    def close(self) -> None:
        """Waits no longer for a step."""
        for handle in self._handles:
            handle.remove()

    def _params(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return [(self.names[id(p)], p) for p in held if id(p) in self.names]

    def _changes(self, params: Mapping[str, Tensor], before: list[Tensor]) -> None:
        now = [spread(_local(p)) for p in params.values()]
        self._note("update", params, norms([old - new for old, new in zip(before, now, strict=True)]))
        self._note("weight", params, norms(now))
        self._note("peak", params, largest([_local(p) for p in params.values()]))

    def _against_moments(
        self, optimizer: Optimizer, params: Mapping[str, Tensor], grads: Sequence[Tensor]
    ) -> None:
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        chosen = [
            (name, grad, groups[id(p)], optimizer.state.get(p, {}))
            for (name, p), grad in zip(params.items(), grads, strict=True)
            if "eps" in groups[id(p)]
        ]
        names, samples = [name for name, *_ in chosen], [grad for _, grad, *_ in chosen]
        eps = [float(group["eps"]) for *_, group, _ in chosen]
        self._note("small", names, small_shares(samples, eps))
        kept = [i for i, (*_, state) in enumerate(chosen) if "exp_avg_sq" in state]
        moments = [_moment(*chosen[i][2:]) for i in kept]
        found = rms([samples[i] for i in kept], moments, [eps[i] for i in kept])
        self._note("rms", [names[i] for i in kept], found)

    def _note(self, what: str, names: Mapping[str, Any] | Sequence[str], values: Sequence[Tensor]) -> None:
        for name, value in zip(names, values, strict=True):
            self._found[name][what] = value

    # What adds up over the ranks, what is largest of all, and how they are read.

    def sums(self, device: torch.device) -> Tensor:
        """Float64 [parameters x 5]: each rank's part of what `read` expects the sum of."""
        columns = [self._column(what, device) for what in ("grad", "update", "weight", "rms", "small")]
        columns = [c.square() if i < len(_SQUARED) else c for i, c in enumerate(columns)]
        factors = torch.tensor(list(self._factors.values()), dtype=torch.float64)
        return (torch.stack(columns, 1) * factors.to(device, non_blocking=True)).flatten()

    def peaks(self, device: torch.device) -> Tensor:
        """Float64 [parameters]: of each rank what `read` expects the largest of."""
        return self._column("peak", device)

    def _column(self, what: str, device: torch.device) -> Tensor:
        none = torch.zeros((), device=device)
        held = [self._found.get(name, {}).get(what, none).to(device) for name in self.parameters]
        return torch.stack([value.float() for value in held]).double()

    def read(self, sums: Sequence[float], peaks: Sequence[float]) -> dict[str, dict[str, float]]:
        """Per parameter with a gradient what was measured: norms grad, update, weight; rms, small, peak."""
        result = {}
        for i, (name, p) in enumerate(self.parameters.items()):
            grad, update, weight, scaled, small = sums[5 * i : 5 * i + 5]
            numbers = {
                "grad": math.sqrt(grad),
                "update": math.sqrt(update),
                "weight": math.sqrt(weight),
                "rms": math.sqrt(scaled / p.numel()),
                "small": small / p.numel(),
                "peak": peaks[i],
            }
            if name in self._found:
                result[name] = {what: numbers[what] for what in self._found[name]}
        return result


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _factors(p: Tensor, world: int) -> list[float]:
    """What a rank's squares of grad, update, weight and rms, and its small, count in the sum over ranks."""
    parts = 1
    if isinstance(p, DTensor):
        sizes = zip(p.device_mesh.shape, p.placements, strict=True)
        parts = math.prod(size for size, placement in sizes if placement.is_shard())
    own, copies = _local(p).numel(), world / parts
    each = own / max(sampled(_local(p)), 1)
    return [1 / copies, each / copies, each / copies, own / copies, own / copies]


def _moment(group: dict[str, Any], state: dict[str, Any]) -> Tensor:
    moment = spread(_local(state["exp_avg_sq"]))
    if "betas" not in group or "step" not in state:
        return moment.float()
    step = state["step"]
    return corrected(moment, group["betas"][1], _local(step) if isinstance(step, Tensor) else step)
