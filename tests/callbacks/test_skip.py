"""Action "skip": the update of a bad step is not made, whatever makes the updates."""

import copy
import math
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

import tiny
from stabilitykit import LossMonitor, WeightMonitor
from stabilitykit.runlog import read_records

STEPS, BAD = 16, 12


def scaled(**options):
    from pytorch_lightning.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4, **options)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def module_of(package="pytorch_lightning", factor=4.0, bad=(BAD,), accumulate=1, optimizers=1, **adam):
    class Spiky(tiny.module_class(package)):
        """The loss of the bad optimizer steps is `factor` times what it is."""

        def __init__(self):
            super().__init__(dropout=0.0)
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch, batch_idx):
            tokens, targets = batch
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
            if self.trainer.fit_loop.total_batch_idx // accumulate in bad:
                loss = loss * factor
            if not self.automatic_optimization:
                for optimizer in self.optimizers():
                    optimizer.zero_grad()
                self.manual_backward(loss)
                for optimizer in self.optimizers():
                    optimizer.step()
            return loss

        def configure_optimizers(self):
            halves = [self.model.embed.parameters(), [*self.model.blocks.parameters()]]
            if optimizers == 2:
                return [torch.optim.AdamW(halves[0], lr=1e-2), torch.optim.SGD(halves[1], 0.1, momentum=0.9)]
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, **adam)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    torch.manual_seed(3)
    return Spiky()


def witness(package):
    class Witness(import_module(package).Callback):
        """Weights, optimizer states and learning rate after every optimizer step."""

        def __init__(self):
            self.seen = []

        def on_train_batch_end(self, trainer, pl_module, *_):
            if (trainer.fit_loop.total_batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                weights = [p.detach().clone() for p in pl_module.parameters()]
                states = [copy.deepcopy(o.state_dict()["state"]) for o in trainer.optimizers]
                rate = trainer.optimizers[0].param_groups[0]["lr"]
                self.seen.append((weights, states, rate))

    return Witness()


def run(folder, module, package="pytorch_lightning", monitors=(), **options):
    seen = witness(package)
    accumulate = options.get("accumulate_grad_batches", 1)
    monitors = [LossMonitor(action="skip"), *monitors]
    trainer = tiny.trainer(folder, [*monitors, seen], package, max_steps=-1, **{"max_epochs": 1, **options})
    trainer.fit(module, tiny.batches(STEPS * accumulate))
    return seen.seen, read_records(folder / "stability")


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_only_the_bad_steps_are_skipped(seen, records, bad, reason):
    rows = records.of("loss")
    assert [row.step for row in rows] == list(range(STEPS))
    assert [row.step for row in rows if row.values["loss/skipped"]] == bad
    assert [row.detail.get("skipped") for row in rows if row.step in bad] == [reason] * len(bad)
    for step in range(1, STEPS):
        unmoved = [same(seen[step][part], seen[step - 1][part]) for part in (0, 1)]
        assert unmoved == [step in bad] * 2, step


@pytest.mark.parametrize("factor", [4.0, math.nan])
@pytest.mark.parametrize(
    ("package", "options", "module"),
    [
        ("pytorch_lightning", {"precision": "32-true"}, {}),
        ("lightning.pytorch", {"precision": "32-true"}, {}),
        ("lightning.pytorch", {"precision": "bf16-mixed", "gradient_clip_val": 0.5}, {}),
        ("pytorch_lightning", {"precision": "bf16-true"}, {}),
        ("pytorch_lightning", {"accumulate_grad_batches": 4}, {"accumulate": 4}),
        ("pytorch_lightning", {"scaled": True, "gradient_clip_val": 0.5}, {}),
        ("pytorch_lightning", {"scaled": True}, {"fused": True}),
        ("pytorch_lightning", {}, {"optimizers": 2}),
    ],
    ids=str,
)
def test_the_update_of_a_bad_step_is_not_made(tmp_path, package, options, module, factor):
    if options.pop("scaled", False):
        options = {**options, **scaled()}
    seen, records = run(tmp_path, module_of(package, factor, **module), package, **options)
    reason = "nonfinite" if math.isnan(factor) else "spike"
    assert_only_the_bad_steps_are_skipped(seen, records, [BAD], reason)
    event = records.of("event")[0]
    assert (event.step, event.detail["skipped"]) == (BAD, reason)
    assert "its update was skipped" in event.detail["message"]
    if module.get("optimizers") != 2:  # the schedule goes on: a skipped step is a step
        rates = [rate for _, _, rate in seen]
        assert rates == pytest.approx([1e-2 * 0.9 ** (step + 1) for step in range(STEPS)])


def test_the_scaler_keeps_its_scale_through_a_skipped_spike(tmp_path):
    _, records = run(tmp_path, module_of(), **scaled())
    scales = [row.values["loss/scale"] for row in records.of("loss")]
    assert scales == [2.0 ** (10 + (step + 1) // 4) for step in range(STEPS)]


def test_what_is_recorded_is_what_flag_records(tmp_path):
    module = module_of(bad=())
    _, records = run(tmp_path / "skip", module, **scaled())
    trainer = tiny.trainer(tmp_path / "flag", [LossMonitor()], max_epochs=1, **scaled())
    trainer.fit(module_of(bad=()), tiny.batches(STEPS))
    rows = [[row.values for row in read_records(tmp_path / "flag" / "stability").of("loss")]]
    assert rows == [[row.values for row in records.of("loss")]]


def test_a_gradient_that_is_not_finite_is_skipped_where_no_scaler_does_it(tmp_path):
    class Infinite(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * math.inf

    module = module_of(bad=())
    plain = module.training_step

    def training_step(batch, batch_idx):
        loss = plain(batch, batch_idx)
        return Infinite.apply(loss) if batch_idx == BAD else loss

    module.training_step = training_step
    seen, records = run(tmp_path, module)
    assert_only_the_bad_steps_are_skipped(seen, records, [BAD], "gradient_nonfinite")
    assert records.of("event")[0].detail["kind"] == "gradient_nonfinite"


def test_ten_spiking_updates_in_a_row_are_the_most_that_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("stabilitykit.callbacks.judge.PATIENCE", 3)
    module = module_of(bad=range(9, STEPS))
    with pytest.warns(UserWarning, match="updates in a row were skipped and the loss is still up"):
        seen, records = run(tmp_path, module)
    assert_only_the_bad_steps_are_skipped(seen, records, [9, 10, 11], "spike")


def test_twins_do_not_make_a_skipped_update_either(tmp_path):
    twins = WeightMonitor(1, window=None, arms=["same"], floor_seeds=0)
    _, records = run(tmp_path, module_of(), monitors=[twins])
    distances = [row.values["weights/same/max_abs"] for row in records.of("weights")]
    assert distances == [0.0] * STEPS
    _, records = run(tmp_path / "scaled", module_of(fused=True), monitors=[copy_of(twins)], **scaled())
    assert {row.values["weights/same/max_abs"] for row in records.of("weights")} == {0.0}


def copy_of(twins):
    return WeightMonitor(twins.every_n_steps, window=None, arms=twins.arms, floor_seeds=0)


def test_twins_of_manual_optimisation_cannot_follow_and_are_refused(tmp_path):
    twins = WeightMonitor(1, window=None, arms=["same"], floor_seeds=0)
    with pytest.raises(ValueError, match="expected automatic optimisation for action 'skip' beside Weight"):
        run(tmp_path, module_of(optimizers=2), monitors=[twins])


# torch's own, of a schedule whose first step's update overflowed.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_float16_overflow_is_the_scalers_skip_and_no_trouble(tmp_path):
    """Case 16: the first six updates overflow while the scaler finds its place."""

    class Starts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return torch.where(grad > 2.0**4, math.inf, grad)

    module = module_of(bad=())
    plain = module.training_step
    module.training_step = lambda batch, batch_idx: Starts.apply(plain(batch, batch_idx))
    trainer = tiny.trainer(tmp_path, [LossMonitor()], max_epochs=1, **scaled())
    trainer.fit(module, tiny.batches(11))
    records = read_records(tmp_path / "stability")
    assert records.of("event") == []
    rows = records.of("loss")
    assert [row.step for row in rows if row.values["loss/skipped"]] == [0, 1, 2, 3, 4, 5, 10]
    assert {row.detail["skipped"] for row in rows if row.values["loss/skipped"]} == {"overflow"}
    assert not math.isfinite(rows[0].values["loss/grad_norm"])
    assert rows[7].values["loss/grad_norm"] < 10
