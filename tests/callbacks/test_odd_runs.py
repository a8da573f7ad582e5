"""Runs as few users have them: watching changes nothing, and what cannot be measured is said."""

import math

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import LearningRateFinder
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import tiny
from stabilitykit import AttentionMonitor, LossMonitor, PrecursorMonitor, RingMonitor, WeightMonitor
from stabilitykit.runlog import read_meta, read_records

PLAIN = tiny.module_class("pytorch_lightning")


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


class Odd(PLAIN):
    """A model with one odd parameter, or an odd optimizer."""

    def __init__(self, extra=None, optimizer=adam):
        super().__init__()
        self.extra = None if extra is None else nn.Parameter(extra)
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.extra is None else loss + self.extra.abs().square().sum()

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Sparse(PLAIN):
    """Manual optimisation, an embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.model.embed = nn.Embedding(tiny.VOCAB, 16, sparse=True)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self):
        rest = [*self.model.blocks.parameters(), *self.model.head.parameters()]
        return [torch.optim.SparseAdam(self.model.embed.parameters()), adam(rest)]


class Wrapping(torch.optim.Optimizer):
    """As schedule-free's wrapper: it has an optimizer, and never called its base class."""

    def __init__(self, inner):
        self.inner = inner

    defaults = property(lambda self: self.inner.defaults)
    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def state_dict(self):
        return self.inner.state_dict()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.inner.step(closure)


def parametrised():
    module = PLAIN()
    spectral_norm(module.model.blocks[0].qkv)  # each look at its weight changes it
    weight_norm(module.model.head)
    return module


def hooked():
    module = PLAIN()
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(_halve)
    return module


def _halve(parameter):
    parameter.grad.mul_(0.5)


RUNS = {
    "parametrised": (parametrised, {}),
    "gradients that hooks change": (hooked, {}),
    "float64": (Odd, {"precision": "64-true"}),
    "complex": (lambda: Odd(torch.ones(3, dtype=torch.complex64)), {}),
    "empty": (lambda: Odd(torch.zeros(0, 3)), {}),
    "sparse": (Sparse, {}),
    "Adafactor": (lambda: Odd(optimizer=torch.optim.Adafactor), {}),
    "a wrapper": (lambda: Odd(optimizer=lambda parameters: Wrapping(adam(parameters))), {}),
}


def every_monitor():
    twins = WeightMonitor(2, window=2, arms=["same", "float64"], floor_seeds=1)
    return [LossMonitor(), AttentionMonitor(2), PrecursorMonitor(2), twins]


def fit(folder, module, monitors, batches=6, **options):
    torch.manual_seed(3)
    run = tiny.trainer(folder, monitors, max_epochs=1, **options)
    run.fit(module, tiny.batches(batches))
    return read_records(folder / "stability") if monitors else None


def steps(records, *kinds):
    return [[record.step for record in records.of(kind)] for kind in kinds]


@pytest.mark.parametrize("row", RUNS)
@pytest.mark.filterwarnings("ignore:stabilitykit. PrecursorMonitor does not measure")
def test_watching_changes_nothing_and_every_due_step_is_recorded(tmp_path, row):
    make, options = RUNS[row]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    watched = make()
    fit(tmp_path, plain, [], **options)
    records = fit(tmp_path, watched, every_monitor(), **options)
    assert watched.losses == plain.losses
    for one, other in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    every, due, windows = steps(records, "loss", "precursors", "weights")
    assert every[:3] == [0, 1, 2] and due[:1] == [1] and windows[:1] == [2]
    assert records.of("weights")[0].values["weights/same/max_abs"] == 0.0


def test_an_optimizer_that_does_not_tell_when_it_stepped_is_named_in_every_record(tmp_path):
    module = Odd(optimizer=lambda parameters: Wrapping(adam(parameters)))
    with pytest.warns(UserWarning, match="update_ratio, rms, eps_share, max_weight: Wrapping does not tell"):
        records = fit(tmp_path, module, [PrecursorMonitor(2)]).of("precursors")
    assert [len(record.detail["skipped"]) for record in records] == [4, 4, 4]
    assert all("overflow" not in record.detail for record in records)


def test_lazy_parameters_are_measured_once_they_have_a_shape(tmp_path):
    module = PLAIN()
    module.model.head = nn.LazyLinear(tiny.VOCAB)
    with pytest.warns(UserWarning) as said:
        first, *others = fit(tmp_path, module, [PrecursorMonitor(1)]).of("precursors")
    assert any("grad_norm, update_ratio, rms, eps_share, max_weight: lazy" in str(w.message) for w in said)
    assert "grad_norm" in first.detail["skipped"]
    assert all("model.head" in record.detail["layers"] for record in others)
    module.model.head = nn.LazyLinear(tiny.VOCAB)
    with pytest.raises(ValueError, match="expected parameters that have a shape, got 'model.head.weight'"):
        fit(tmp_path / "twins", module, [WeightMonitor(1, window=1)])


class Closure(PLAIN):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    def on_before_optimizer_step(self, optimizer):
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.norm = torch.nn.utils.get_total_norm(grads).item()


def test_a_norm_is_of_one_gradient_however_often_an_optimizer_asks(tmp_path):
    module = Closure()
    records = fit(tmp_path, module, [LossMonitor()])
    assert records.of("loss")[-1].values["loss/grad_norm"] == pytest.approx(module.norm)
    with pytest.raises(ValueError, match="without a closure, got LBFGS"):  # before its first window
        fit(tmp_path / "twins", Closure(), [WeightMonitor(1000)])


def test_a_step_without_a_gradient_says_nothing_of_the_optimizer(tmp_path):
    class Absent(PLAIN):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx % 2 else None

    with pytest.warns(UserWarning) as said:
        first, second = fit(tmp_path, Absent(), [PrecursorMonitor(1)], batches=2).of("precursors")
    assert not any("second moment" in str(warning.message) for warning in said)
    assert first.detail["skipped"]["grad_norm"] == "no parameter had a gradient"
    assert "rms" not in first.detail["skipped"]
    assert "skipped" not in second.detail and "precursors/rms" in second.values


class Failing(PLAIN):
    """Fails in its second step, between the forward and the backward."""

    def on_before_backward(self, loss):
        if len(self.losses) == 2:
            raise RuntimeError("the user's")


def test_a_step_that_an_exception_cut_off_is_not_recorded_by_the_next_fit(tmp_path):
    monitors = [LossMonitor("skip"), AttentionMonitor(2), RingMonitor(2)]
    with pytest.raises(RuntimeError, match="the user's"):
        fit(tmp_path / "first", Failing(), monitors)
    module = PLAIN()
    with pytest.warns(UserWarning, match="RingMonitor measured nothing"):
        records = fit(tmp_path / "second", module, monitors)
    assert steps(records, "attention", "ring") == [[1, 3, 5], [1, 3, 5]]
    told = [record.values["loss/value"] for record in records.of("loss")]
    assert told == pytest.approx(module.losses)


class Scripted(LightningModule):
    """The loss of a batch is what the batch says."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        return batch.sum() + F.mse_loss(self.weight, self.weight.detach() + 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_monitor_used_again_stops_again_and_has_not_learnt_from_another_run(tmp_path):
    monitor, low = LossMonitor("stop"), [1.0 + 0.01 * math.sin(step) for step in range(120)]
    for name, series, taken in (
        ("spike", [*low, 9.0, *low], 122),
        ("higher", [value + 4 for value in low], 120),
        ("again", [*low, 9.0, *low], 122),
    ):
        run = tiny.trainer(tmp_path / name, [monitor], max_epochs=1)
        run.fit(Scripted(), tiny.Loader(torch.tensor([value]) for value in series))
        assert run.global_step == taken, name


class Changing(Callback):
    """At the fifth step, inside the second window, the run becomes another."""

    def __init__(self, change):
        self.change = change

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 4:
            self.change(pl_module)


def freeze(module):
    module.model.embed.requires_grad_(False)


def replace(module):
    module.model.head.weight = nn.Parameter(module.model.head.weight.detach().clone())


def regroup(module):
    module.trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def renew(module):
    module.trainer.strategy.setup_optimizers(module.trainer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (freeze, "frozen or unfrozen parameters"),
        (replace, "other parameters"),
        (regroup, "other parameter groups"),
        (renew, "other optimizers"),
    ],
)
@pytest.mark.parametrize("window", [2, None])
def test_twins_that_cannot_follow_are_dropped_and_new_ones_forked(tmp_path, change, words, window):
    start = 3 if window else 0
    twins = WeightMonitor(2, window=window, arms=["same"], floor_seeds=0)
    with pytest.warns(UserWarning, match=f"the run has {words} at step 4; its twins, forked at step {start}"):
        records = fit(tmp_path, PLAIN(), [Changing(change), twins], batches=7).of("weights")
    assert [record.step for record in records] == ([2, 6] if window else [1, 3, 5])
    assert records[-1].detail["forked_at"] == (5 if window else 4)
    assert all(record.values["weights/same/max_abs"] == 0.0 for record in records)


class Searching(PLAIN):
    def __init__(self):
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def test_a_search_for_a_learning_rate_before_the_run_is_no_run_to_resume(tmp_path):
    # It saves and restores a checkpoint of its own before the first step; any warning is an error here.
    monitors = [LossMonitor(), PrecursorMonitor(2)]
    search = LearningRateFinder(num_training_steps=4)
    records = fit(tmp_path, Searching(), [search, *monitors], enable_checkpointing=True)
    assert steps(records, "loss") == [[0, 1]]  # the search took four of the six batches
    assert read_meta(tmp_path / "stability")["attempts"][0]["resumed_at"] is None


class Twice(torch.optim.SGD):
    """As sharpness-aware minimisation: a second gradient within one step."""

    def step(self, closure=None):
        assert closure is not None
        loss = closure()
        closure()
        super().step()
        return loss


@pytest.mark.parametrize("window", [1, 2, None])
def test_twins_of_an_optimizer_that_takes_two_gradients_in_a_step_are_not_recorded(tmp_path, window):
    module = Odd(optimizer=lambda parameters: Twice(parameters, lr=0.1))
    twins = WeightMonitor(2, window=window, arms=["same"], floor_seeds=0)
    with pytest.warns(UserWarning, match=r"runs its closure more than once \(Twice\) at step"):
        assert fit(tmp_path, module, [LossMonitor(), twins]).of("weights") == []


def test_steps_that_lightning_does_not_take_are_said_to_be_unseen(tmp_path):
    class Raw(PLAIN):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.optimizers(use_pl_optimizer=False).step()

    with pytest.warns(UserWarning, match="no optimizer has stepped in the last 6 batches, so nothing"):
        records = fit(tmp_path, Raw(), [PrecursorMonitor(2)])
    assert records.rows == []
