"""Twin: the same training run once more, in the same module, differing in one respect (its arm)."""

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from stabilitykit.observe.apart import (
    as_written,
    autocast,
    copied,
    mute,
    precision,
    refuse_incomplete,
    seed_streams,
    streams_kept,
    unseen,
)
from stabilitykit.observe.arm import Arm
from stabilitykit.observe.replacement import attending, replacement
from stabilitykit.observe.update import changed_groups, forked, learning_rates, own_scaler, refuse_lacking

_INTERNAL = frozenset(vars(nn.Module()))  # what every module has; all else in it is its author's


class Twin:
    """The weights, buffers and optimizers of `module` once more, stepped by running that very module.

    For the length of a pass the twin's tensors stand in the module in place of the run's (by identity,
    so ties hold); everything is put back after it. The run is unchanged, bit for bit: its random
    streams, gradients, plain attributes and log are not touched. A twin whose arm is "same" stays at
    distance exactly 0. The module is the only state it shares with the run; what the module reaches
    through closures or objects that are no modules is not the twin's own.

    Args:
        module: the module of the run.
        optimizers: those of the run; copied with their state, without hooks.
        arm: what differs, an `Arm` or its text.
        scaler: the run's GradScaler; copied, for arms that leave its precision alone or scale as well.
        seed: of the jitter's directions.
        at: 0-based index of the optimizer step that comes first, for arms that skip some.

    Raises:
        ValueError: an arm that does not parse, or that changes what no optimizer has; an optimizer that
            steps by a closure; parameters sharded over ranks; and from any pass, a parameter of the run
            that the pass changed, for the module holds a reference to it, or no attention to replace.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        arm: Arm | str,
        *,
        scaler: Any = None,
        seed: int = 0,
        at: int = 0,
    ):
        self.arm = Arm.parse(arm) if isinstance(arm, str) else arm
        self.at = at
        self.unreplaced: dict[str, str] = {}  # by module: why an arm's attention is not in its place
        self._module = module
        refuse_incomplete(module, f"twin {self.arm.text!r}")
        refuse_lacking(self.arm, optimizers, scaled=scaler is not None)
        self._mains = dict(module.named_parameters())
        generators = {p.device: torch.Generator(p.device).manual_seed(seed) for p in module.parameters()}
        self._params = {id(p): self._parameter(p, generators[p.device]) for p in self._mains.values()}
        self._buffers = {
            name: {key: self._own(b) for key, b in child._buffers.items() if b is not None}
            for name, child in module.named_modules()
        }
        self._main_optimizers = list(optimizers)
        self._held = [learning_rates(optimizer) for optimizer in optimizers]
        memo: dict[int, Any] = {id(p): self._params[id(p)] for p in self._mains.values()}
        self.optimizers = [
            forked(o, memo, self.arm, held) for o, held in zip(optimizers, self._held, strict=True)
        ]
        self._devices = {p.device for p in self._mains.values()}
        self.scaler = own_scaler(self.arm, scaler, next(iter(self._devices)))
        self._attention = None if self.arm.attention is None else replacement(self.arm.attention)
        self._passes = 0

    # A training step.

    def forward_backward(
        self, loss_fn: Callable[[], Tensor | None], backward: Callable[[Tensor], object] | None = None
    ) -> Tensor | None:
        """The twin's loss, detached; its gradients are added to those it has.

        Both callables run with the twin's tensors in the module, the random stream where the run's is
        (or at the arm's seed), no open `Tap` watching; `loss_fn` in the arm's precision. In a step that
        the arm skips they do not run, and the loss is None.
        """
        if self.arm.skips(self.at):
            return None
        attention = attending(self._module, self._attention, self.arm.text)
        with self._guarded(), as_written(self.arm.eager), attention as self.unreplaced:
            self._seed()
            with precision(self._devices, self.arm.autocast, self.arm.dtype):
                loss = loss_fn()
            if loss is not None:
                with autocast(self._devices, False):
                    (backward or self._backward)(loss)
        self._passes += 1
        return None if loss is None else loss.detach()

    def step(self, apply: Callable[[Optimizer], object] | None = None) -> None:
        """Each of the twin's optimizers steps, with the learning rates the run's have now.

        `apply` replaces the plain step (unscale, step, zero_grad); it may clip, and runs under the swap.
        """
        self.follow()
        if not self.arm.skips(self.at):
            with self._guarded():
                for optimizer in self.optimizers:
                    (apply or self._step)(optimizer)
                if apply is None and self.scaler is not None:
                    self.scaler.update()
        self.at += 1

    def outdated(self) -> str | None:
        """What the run has had since the fork that no twin can follow; None as long as one can."""
        if any(self._params[id(p)].requires_grad != p.requires_grad for p in self._mains.values()):
            return "frozen or unfrozen parameters"
        now = dict(self._module.named_parameters())
        if now.keys() != self._mains.keys() or any(now[name] is not p for name, p in self._mains.items()):
            return "other parameters"
        return changed_groups(self.optimizers, self._main_optimizers)

    def follow(self) -> None:
        """Learning rates and every other setting of the parameter groups become those of the run."""
        if change := self.outdated():
            raise ValueError(f"twin {self.arm.text!r}: the run has {change} since the fork")
        for own, main in zip(self.optimizers, self._main_optimizers, strict=True):
            for group, model in zip(own.param_groups, main.param_groups, strict=True):
                group.update({key: value for key, value in model.items() if key != "params"})

    def own(self, batch: Any) -> Any:
        """A copy of a batch in the arm's format, for a pass that may change it in place."""
        return tree_map(
            lambda leaf: self._own(leaf) if isinstance(leaf, Tensor) else copy.deepcopy(leaf), batch
        )

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each trainable parameter, None where it has none."""
        return [self._params[id(p)].grad for p in self._mains.values() if p.requires_grad]

    def fill_gradients(self, used: Sequence[bool]) -> list[Tensor]:
        """The gradients of the trainable parameters that are `used`, zeros where there was none."""
        chosen = [self._params[id(p)] for p in self._mains.values() if p.requires_grad]
        for p in (p for p, has in zip(chosen, used, strict=True) if has and p.grad is None):
            p.grad = torch.zeros_like(p)
        return [p.grad for p, has in zip(chosen, used, strict=True) if has and p.grad is not None]

    def buffers(self) -> list[Tensor]:
        """The twin's buffers, in the order of the module."""
        return [buffer for own in self._buffers.values() for buffer in own.values()]

    def pairs(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Trainable parameters of run and twin by name, tied ones once; none empty, complex as real."""
        main = {name: p for name, p in self._mains.items() if p.requires_grad and p.numel()}
        own = {name: self._params[id(p)] for name, p in main.items()}
        return {name: _real(p) for name, p in main.items()}, {name: _real(p) for name, p in own.items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that a twin built anew from the same run needs to go on bit for bit."""
        return {
            "parameters": {name: self._params[id(p)].detach() for name, p in self._mains.items()},
            "buffers": self._buffers,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "passes": self._passes,
            "at": self.at,
            "held": self._held,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; tensors come to the devices of the run."""
        with torch.no_grad():
            for name, saved in state["parameters"].items():
                self._params[id(self._mains[name])].copy_(saved)
        for name, saved in state["buffers"].items():
            own = self._buffers[name]
            own.update({key: value.to(own[key].device, copy=True) for key, value in saved.items()})
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._passes, self.at = state["passes"], state["at"]
        for own, saved in zip(self._held, state["held"], strict=True):
            own[:] = saved

    # The twin's tensors in the run's module.

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """While open, the module holds the twin's tensors and copies of its plain attributes."""
        with ExitStack() as undo:
            for name, child in self._module.named_modules():
                undo.callback(self._restore, name, child, *(dict(d) for d in _holdings(child)))
                self._swap(name, child)
            mute(self._module)
            yield

    def _swap(self, name: str, child: nn.Module) -> None:
        parameters, buffers, attributes = _holdings(child)
        for key, p in parameters.items():
            if p is not None and id(p) not in self._params:
                raise ValueError(
                    f"twin {self.arm.text!r}: parameter {f'{name}.{key}'.lstrip('.')!r} was made after the "
                    "twin was forked, so the twin has none"
                )
            if p is not None:
                parameters[key] = self._params[id(p)].requires_grad_(p.requires_grad)
        for key, buffer in buffers.items():
            if buffer is not None:
                own = self._buffers[name].get(key)
                buffers[key] = self._own(buffer) if own is None else own
        attributes.update(
            {key: self._own(value) for key, value in attributes.items() if key not in _INTERNAL}
        )

    def _restore(self, name: str, child: nn.Module, parameters: Any, buffers: Any, attributes: Any) -> None:
        self._buffers[name] = {k: b.detach() for k, b in child._buffers.items() if b is not None}
        for now, before in zip(_holdings(child), (parameters, buffers, attributes), strict=True):
            now.clear()
            now.update(before)

    def _own(self, value: Any) -> Any:
        return copied(value, self._own_leaf)

    def _own_leaf(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return self._params.get(id(value), value)
        if isinstance(value, Tensor):
            return self.arm.cast(value.detach().clone())
        if isinstance(value, torch.dtype):
            return self.arm.dtype if self.arm.dtype and value.is_floating_point else value
        return value

    # What is copied of the run, once.

    def _parameter(self, main: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
        own = self.arm.moved(main, generator) if main.requires_grad else self._own(main.detach())
        twin = nn.Parameter(own, main.requires_grad)
        vars(twin).update(vars(main))
        for hook in (main._backward_hooks or {}).values():
            twin.register_hook(hook)
        for hook in (main._post_accumulate_grad_hooks or {}).values():
            twin.register_post_accumulate_grad_hook(hook)
        return twin

    # The surroundings of a pass.

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        before = {name: _mark(p) for name, p in self._mains.items()}
        with unseen(), streams_kept(self._devices), self.swapped():
            yield
        for name, p in self._mains.items():
            if _mark(p) != before[name]:
                raise ValueError(
                    f"twin {self.arm.text!r} changed parameter {name!r} of the run (or its gradient): the "
                    "module keeps a raw reference to it outside its parameters; look it up by attribute"
                )

    def _seed(self) -> None:
        # Each pass has its own stream, or every step would draw one and the same dropout mask.
        if self.arm.seed is not None:
            seed_streams(zlib.crc32(f"{self.arm.seed}/{self._passes}".encode()))

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _step(self, optimizer: Optimizer) -> None:
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
        optimizer.zero_grad()


def _holdings(child: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return child._parameters, child._buffers, vars(child)


def _real(p: Tensor) -> Tensor:
    return torch.view_as_real(p.detach()) if p.is_complex() else p.detach()


def _mark(p: nn.Parameter) -> tuple[int, int, int]:
    return p._version, id(p.grad), -1 if p.grad is None else p.grad._version
