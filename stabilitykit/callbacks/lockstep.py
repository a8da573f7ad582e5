"""Runs twins beside a Trainer: each does what the main run does, a moment before it, with its own tensors."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from operator import is_not
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.optim import Optimizer

from stabilitykit.callbacks.monitor import AnyCallback
from stabilitykit.callbacks.run import world
from stabilitykit.callbacks.training import drop_update
from stabilitykit.observe.apart import sharded
from stabilitykit.observe.arm import Arm
from stabilitykit.observe.twin import Twin

_SHARDED = ("fsdp", "deepspeed", "modelparallel")


class Lockstep:
    """Twins that take every training step of a LightningModule, inside its own `training_step`.

    Forward and backward run before the main ones, where learning rates, steps and random streams are
    still the main run's; the optimizer steps when the main one is about to, through the Trainer's own
    code: unscaling, the module's `on_before_optimizer_step` and `configure_gradient_clipping`. Under
    manual optimisation the whole `training_step` runs with the twin's optimizers. `step` tells the
    0-based index of the optimizer step in progress.
    """

    def __init__(self, trainer: Any, module: Any, twins: Mapping[str, Twin], step: Callable[[], int]):
        self.twins = twins
        self._trainer = trainer
        self._module = module
        self._optimizers = list(trainer.optimizers)
        self._step_index = step
        self._losses: dict[str, Tensor | None] = {}
        self._again: str | None = None  # an optimizer that wanted its closure's gradients once more
        self._open = ExitStack()

    def open(self, timed: Callable[[], Any]) -> None:
        """From here on `training_step` runs the twins first, inside `timed()`."""
        original = self._module.training_step

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with timed():
                for name, twin in self.twins.items():
                    with self._acting(name, twin):
                        self._losses[name] = self._pass(twin, original, args, kwargs)
            return original(*args, **kwargs)

        self._open.enter_context(_holding(self._module, training_step=training_step))

    def close(self) -> None:
        """`training_step` is the module's own again."""
        self._open.close()

    def outdated(self) -> str | None:
        """What the run has had since the fork that twins cannot follow; None as long as they can."""
        if self._again is not None:
            return f"an optimizer that runs its closure more than once ({self._again})"
        now = self._trainer.optimizers
        if len(now) != len(self._optimizers) or any(map(is_not, now, self._optimizers)):
            return "other optimizers"
        return next(iter(self.twins.values())).outdated()

    def step(self, *, vetoed: bool = False) -> None:
        """Automatic optimisation: every twin's optimizer steps; the main gradients are complete.

        A `vetoed` update is not made by the twins either.
        """
        for name, twin in self.twins.items():
            with self._acting(name, twin, [_Veto()] if vetoed else []):
                _average(twin)
                twin.step(functools.partial(self._optimizer_step, self._losses[name]))

    @property
    def _plugin(self) -> Any:
        return self._trainer.precision_plugin  # the twin's, while it acts

    def _optimizer_step(self, loss: Tensor | None, optimizer: Any) -> None:
        runs = 0

        def closure() -> Tensor | None:
            nonlocal runs
            runs += 1
            return loss

        self._plugin.optimizer_step(optimizer, model=self._module, closure=closure)
        if runs > 1:
            self._again = type(optimizer).__name__

    def _pass(self, twin: Twin, original: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
        self._share_buffers(twin)
        own_args, own_kwargs = twin.own((args, kwargs))
        if not self._module.automatic_optimization:
            twin.follow()
            return twin.forward_backward(lambda: _loss(original(*own_args, **own_kwargs)), _done)

        def forward() -> Tensor | None:
            loss = _loss(original(*own_args, **own_kwargs))
            self._zero_grad(twin)
            return None if loss is None else loss / self._trainer.accumulate_grad_batches

        return twin.forward_backward(forward, self._backward)

    def _share_buffers(self, twin: Twin) -> None:
        # DDP has just done this for the main run's, where it does so at all.
        ddp = self._trainer.strategy.model
        if getattr(ddp, "broadcast_buffers", False) and ddp.require_forward_param_sync:
            for buffer in twin.buffers():
                dist.broadcast(buffer, 0)

    def _zero_grad(self, twin: Twin) -> None:
        # Through the module's own hook: gradients of zero and none at all are not the same to Adam.
        batch = self._trainer.fit_loop.batch_idx
        if batch % self._trainer.accumulate_grad_batches == 0:
            self._module.optimizer_zero_grad(self._trainer.current_epoch, batch, twin.optimizers[0])

    def _backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        scaled = self._plugin.pre_backward(loss, self._module)
        self._plugin.backward(scaled, self._module, None, *args, **kwargs)
        self._plugin.post_backward(scaled, self._module)

    @contextmanager
    def _acting(self, name: str, twin: Twin, callbacks: Sequence[Any] = ()) -> Iterator[None]:
        """The Trainer has the twin's scaler and optimizers, and no callbacks but these."""
        trainer, module, strategy = self._trainer, self._module, self._trainer.strategy
        twin.at = self._step_index()
        with ExitStack() as stack:
            stack.enter_context(_holding(trainer, callbacks=list(callbacks), should_stop=trainer.should_stop))
            if hasattr(self._plugin, "scaler"):
                stack.enter_context(_holding(self._plugin, scaler=twin.scaler))
            elif twin.scaler is not None:
                plugin = _scaling(self._plugin, twin.scaler, module.device.type)
                stack.enter_context(_holding(strategy, _precision_plugin=plugin))
            if twin.arm.clip is not None:  # in place of the run's own clipping
                nothing = {"configure_gradient_clipping": _nothing, "clip_gradients": _nothing}
                stack.enter_context(_holding(module, **nothing))
            if not module.automatic_optimization:
                stack.enter_context(_holding(strategy, _optimizers=[], _lightning_optimizers=[]))
                strategy.optimizers = twin.optimizers
                overrides = {
                    "manual_backward": functools.partial(self._manual_backward, twin),
                    "lr_schedulers": functools.partial(_idle, module.lr_schedulers()),
                }
                stack.enter_context(_holding(module, **overrides))
            try:
                yield
            except Exception as problem:
                problem.add_note(f"in the twin {name!r} of WeightMonitor")
                raise

    def _manual_backward(self, twin: Twin, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self._backward(loss, *args, **kwargs)
        # Before the user clips; a strategy that holds back its own synchronisation says so here.
        if getattr(self._trainer.strategy.model, "require_backward_grad_sync", True):
            _average(twin)


def spread(trainer: Any, module: Any) -> str | None:
    """The strategy by which parameters are spread over ranks, None where every rank has all of them."""
    strategy = type(trainer.strategy).__name__
    if sharded(module):
        return f"{strategy} with sharded parameters"
    return strategy if any(word in strategy.lower() for word in _SHARDED) else None


def refuse_sharded(trainer: Any, module: Any) -> None:
    """ValueError where parameters are spread over ranks: a twin would silently use the run's own."""
    what = spread(trainer, module)
    if what is not None:
        raise ValueError(
            f"WeightMonitor: expected whole parameters on every rank, got {what}; save checkpoints of two "
            "runs and compare them with `stabilitykit compare A B`"
        )


def twin_bytes(module: Any, optimizers: Sequence[Optimizer], arm: Arm) -> int:
    """What a twin takes beside its activations: weights, gradients, optimizer state, buffers."""

    def size(tensor: Tensor) -> int:
        item = arm.dtype.itemsize if arm.dtype and tensor.is_floating_point() else tensor.element_size()
        return tensor.numel() * item

    held = sum(map(size, [*module.parameters(), *module.buffers()]))
    trained = sum(size(p) for p in module.parameters() if p.requires_grad)
    states = sum(
        size(p) * _states(group) for o in optimizers for group in o.param_groups for p in group["params"]
    )
    return held + trained + states


def _states(group: dict[str, Any]) -> int:
    # State is made on the first step, so before it the settings must tell; two is what most keep.
    if "betas" in group or "momentum" not in group:
        return 3 if group.get("amsgrad") else 2
    return 1 if group["momentum"] else 0


class _Veto(AnyCallback):
    """Stands beside a twin's optimizer step that is not to be made."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        drop_update(trainer, optimizer)


class _Idle:
    """A learning-rate scheduler that can be read but does not step: the main run steps it."""

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def _scaling(plugin: Any, scaler: Any, device: str) -> Any:
    """MixedPrecision with a scaler, of whichever Lightning package the run's plugin comes from."""
    (home, *_) = (kind.__module__ for kind in type(plugin).__mro__ if kind.__name__ == "Precision")
    mixed = import_module(home.rpartition(".")[0] + ".amp").MixedPrecision
    return mixed("16-mixed", device, scaler)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of the run's clipping: the arm clips."""


def _idle(schedulers: Any) -> Any:
    if isinstance(schedulers, list):
        return [_Idle(scheduler) for scheduler in schedulers]
    return None if schedulers is None else _Idle(schedulers)


def _loss(outputs: Any) -> Tensor | None:
    return outputs.get("loss") if isinstance(outputs, Mapping) else outputs


def _done(loss: Tensor) -> None:
    """Under manual optimisation `training_step` itself has run the backward."""


def _average(twin: Twin) -> None:
    """Averages the twin's gradients over the ranks, as DDP does: those that any rank has."""
    if world() == 1:
        return
    has = [grad is not None for grad in twin.gradients()]
    device = next(iter(twin.pairs()[1].values())).device
    used = torch.tensor(has, dtype=torch.int32, device=device)
    dist.all_reduce(used, dist.ReduceOp.MAX)
    for grad in twin.fill_gradients(used.bool().tolist()):
        dist.all_reduce(grad.div_(world()))


@contextmanager
def _holding(owner: Any, **values: Any) -> Iterator[None]:
    """`owner` has these instance attributes for a while, and then what it had before."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(owner).pop(name, None)
        vars(owner).update(before)
