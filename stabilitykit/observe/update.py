"""The optimizers of a twin: copied, and stepped with the arm's learning rates, clipping and beta2."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stabilitykit.observe.arm import Arm


def refuse_lacking(arm: Arm, optimizers: Sequence[Optimizer], *, scaled: bool = False) -> None:
    """ValueError where no optimizer has the setting that `arm` changes, or one steps by a closure."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ValueError("expected optimizers that step without a closure, got LBFGS")
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "no optimizer"
    adam = arm.beta2 is not None or arm.rms_clip
    needs = {"lr": arm.steps_otherwise, "betas": adam, "eps": arm.rms_clip}
    for key in (key for key, needed in needs.items() if needed):
        if not any(key in group for optimizer in optimizers for group in optimizer.param_groups):
            raise ValueError(f"arm {arm.text!r}: expected an optimizer with a setting {key!r}, got {names}")
    scaled = scaled or bool(arm.scaled)
    fused = any(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)
    if scaled and fused and (arm.rms_clip or arm.clip is not None):
        raise ValueError(
            f"arm {arm.text!r}: expected an optimizer that gets unscaled gradients, got {names}, fused, "
            "which unscales them in its own step"
        )


def learning_rates(optimizer: Optimizer) -> list[Any]:
    """Those of its groups, copied: a schedule may change a tensor in place."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def forked(optimizer: Optimizer, memo: dict[int, Any], arm: Arm, held: list[Any]) -> Optimizer:
    """A copy with its state in the arm's format; `memo` has the parameters that take the place of others."""
    # Hooks, and the `step` that a scheduler patches into the instance, belong to the run; what
    # subclasses add stays (copy.deepcopy of an Optimizer would drop that too).
    kept = {k: v for k, v in vars(optimizer).items() if k != "step" and not k.endswith("_hooks")}
    own = object.__new__(type(optimizer))
    # Not by __setstate__: it would put hooks into the `step` of a class whose objects may have none.
    hooks = {k: type(v)() for k, v in vars(optimizer).items() if k.endswith("_hooks")}
    vars(own).update({**copy.deepcopy(kept, dict(memo)), **hooks})
    for state in own.state.values():
        # The count of steps keeps its format, as in Optimizer.load_state_dict.
        tensors = {k: v for k, v in state.items() if k != "step" and isinstance(v, Tensor)}
        state.update({k: arm.cast(v) for k, v in tensors.items()})
    if arm.steps_otherwise:
        vars(own)["step"] = ArmedStep(arm, own, held)
    return own


def changed_groups(own: Sequence[Optimizer], main: Sequence[Optimizer]) -> str | None:
    """Words for parameter groups that are no longer those that were copied; None when they are."""

    def sizes(optimizers: Sequence[Optimizer]) -> list[list[int]]:
        return [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]

    return None if sizes(own) == sizes(main) else "other parameter groups"


def own_scaler(arm: Arm, main: Any, device: torch.device) -> Any:
    """A twin's GradScaler: that of the run once more, a fresh one, or none."""
    if arm.scaled is False:
        return None
    if arm.scaled and main is None:
        return torch.amp.GradScaler(device.type)
    return copy.deepcopy(main)


class ArmedStep:
    """In place of an optimizer's `step`: the same, with what the arm says of learning rates and gradients.

    The optimizer's settings are the run's before and after it. `held` are the learning rates of its
    groups at the fork.
    """

    def __init__(self, arm: Arm, optimizer: Optimizer, held: list[Any]):
        self._arm, self._optimizer, self._held = arm, optimizer, held
        self._step: Callable[[], Any] = optimizer.step

    def __call__(self, closure: Callable[[], Any] | None = None) -> Any:
        """The closure's loss; gradients are those it leaves, hooks and clipping of the trainer done."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self._optimizer.param_groups
        if self._arm.clip is not None:
            nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], self._arm.clip)
        before = [{key: group[key] for key in ("lr", "betas") if key in group} for group in groups]
        for group, held in zip(groups, self._held, strict=True):
            self._set(group, held)
        if self._arm.rms_clip:
            self._optimizer.param_groups = list(self._tensor_by_tensor(groups))
        try:
            self._step()
        finally:
            self._optimizer.param_groups = groups
            for group, settings in zip(groups, before, strict=True):
                group.update(settings)
        return loss

    def _set(self, group: dict[str, Any], held: Any) -> None:
        arm = self._arm
        if "lr" in group:
            rate = held if arm.lr_held else group["lr"]
            group["lr"] = rate if arm.lr is None else rate * arm.lr
        if arm.beta2 is not None and "betas" in group:
            first, _, *rest = group["betas"]
            group["betas"] = (first, arm.beta2, *rest)

    def _tensor_by_tensor(self, groups: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Each tensor as a group of its own, so that it has its own learning rate."""
        for group in groups:
            if "betas" not in group or "eps" not in group:
                yield group
                continue
            for p in (p for p in group["params"] if p.grad is not None):
                size = update_rms(p, group, self._optimizer.state[p])
                over = size if size > 1 + 1e-9 else 1.0  # at the first step it is 1, but for rounding
                yield {**group, "params": [p], "lr": group["lr"] / over}


def update_rms(p: Tensor, group: dict[str, Any], state: dict[str, Any]) -> float:
    """sqrt(mean(g^2 / max(v, eps^2))) of one tensor before its step, v with this g and bias-corrected.

    Well above 1 where v is stale: StableAdamW, arXiv 2304.13013, Alg. 2. An Adam that adds weight decay
    to its gradient has it in g.
    """
    assert p.grad is not None
    grad = p.grad.detach().double()
    if not group.get("decoupled_weight_decay", True):
        grad = grad + group["weight_decay"] * p.detach().double()
    square, beta2 = grad.square(), float(group["betas"][1])
    old = state["exp_avg_sq"].double() if "exp_avg_sq" in state else torch.zeros_like(square)
    steps = int(state.get("step", 0)) + 1
    v = (beta2 * old + (1 - beta2) * square) / (1 - beta2**steps)
    return float((square / v.clamp(min=group["eps"] ** 2)).mean().sqrt())
