"""Arms inside a Trainer: each twin equals a run that a user would have trained so."""

import logging

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.plugins import MixedPrecision
from torch import nn

import tiny
from stabilitykit.callbacks.weights import WeightMonitor
from stabilitykit.observe.exactly import attend_exactly
from stabilitykit.observe.tap import Tap
from stabilitykit.runlog import read_records

STEPS = 5


class Plain(LightningModule):
    """Its options are what the arms of these tests change."""

    def __init__(self, lr=1e-2, beta2=0.999, exact=False, decays=True):
        super().__init__()
        self.model = tiny.Model(layers=1, dropout=0.1)
        self.lr, self.beta2, self.exact, self.decays = lr, beta2, exact, decays
        self.steps = 0

    def loss(self, batch):
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.loss(batch)

    def on_before_backward(self, loss):
        if self.exact:
            self.tap.__exit__(None, None, None)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, betas=(0.9, self.beta2))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5 if self.decays else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Exact(Plain):
    """Attends exactly, forward and backward."""

    def training_step(self, batch, batch_idx):
        self.tap = Tap(self.model, replace=attend_exactly)
        with self.tap:
            return super().training_step(batch, batch_idx)


class Manual(Plain):
    automatic_optimization = False

    def __init__(self, clip=0.3, **options):
        super().__init__(**options)
        self.clip = clip

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()


class Keeps(Callback):
    """The twins' weights after the last step, before they are dropped."""

    def __init__(self, monitor):
        self.monitor = monitor

    def on_train_batch_end(self, *_):
        if self.monitor._lockstep is not None:
            self.twins = {
                twin.arm.text: {name: p.clone() for name, p in twin.pairs()[1].items()}
                for twin in self.monitor._lockstep.twins.values()
            }


def trained(folder, module, callbacks=(), **options):
    torch.manual_seed(3)
    tiny.trainer(folder, callbacks, max_steps=STEPS, **options).fit(module, tiny.batches(40, size=2))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def made(kind=Plain, **options):
    torch.manual_seed(5)
    return kind(**options)


def twins_of(folder, module, arms, **options):
    monitor = WeightMonitor(STEPS, window=None, arms=arms, floor_seeds=0)
    keeps = Keeps(monitor)
    trained(folder, module, [monitor, keeps], **options)
    return keeps.twins


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


def half(scaler):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


# Arm: the main run's options, what a run must have in their place to be that twin.
AUTOMATIC = {
    "lr*0.5": ({}, {"lr": 5e-3}),
    "lr_hold": ({}, {"decays": False}),
    "beta2=0.9": ({}, {"beta2": 0.9}),
    "clip=0.1": ({"gradient_clip_val": 0.5}, {"gradient_clip_val": 0.1}),
    "clip=0.4": ({"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, {"gradient_clip_val": 0.4}),
    "lr_hold+lr*0.5+beta2=0.9+clip=0.2": (
        {"accumulate_grad_batches": 2},
        {"lr": 5e-3, "decays": False, "beta2": 0.9, "gradient_clip_val": 0.2},
    ),
    "exact_attention": ({}, {"kind": Exact}),
    "exact_attention+lr*0.5": ({}, {"kind": Exact, "lr": 5e-3}),
}
OF_THE_MODULE = ("lr", "beta2", "decays", "kind", "clip")


def split(options):
    own = {name: options[name] for name in OF_THE_MODULE if name in options}
    return own, {name: value for name, value in options.items() if name not in own}


@pytest.mark.parametrize("arm", AUTOMATIC)
def test_an_arm_equals_a_run_that_is_trained_so(tmp_path, arm):
    options, changes = AUTOMATIC[arm]
    twin = twins_of(tmp_path / "a", made(), [arm], **options)[arm]
    own, others = split({**options, **changes})
    assert equal(twin, trained(tmp_path / "b", made(**own), **others))


@pytest.mark.parametrize(
    ("arm", "changes"),
    [
        ("lr*0.5", {"lr": 5e-3}),
        ("clip=0.1", {"clip": 0.1}),
        ("beta2=0.9+lr_hold", {"beta2": 0.9, "decays": False}),
    ],
)
def test_under_manual_optimisation_too(tmp_path, arm, changes):
    twin = twins_of(tmp_path / "a", made(Manual), [arm])[arm]
    assert equal(twin, trained(tmp_path / "b", made(Manual, **changes)))


@pytest.mark.parametrize("main", ["32-true", "bf16-mixed", "bf16-true"])
def test_float16_equals_a_float16_run(tmp_path, main):
    if main == "bf16-true":  # its weights are not those of a float16-mixed run: it need only work
        twins = twins_of(tmp_path, made(), ["float16", "float16=unscaled"], precision=main)
        assert all(torch.isfinite(p).all() for twin in twins.values() for p in twin.values())
        return
    twins = twins_of(tmp_path / "a", made(), ["float16", "float16=unscaled+clip=0.1"], precision=main)
    scaled = trained(tmp_path / "b", made(), **half(torch.amp.GradScaler("cpu")))
    unscaled = trained(
        tmp_path / "c", made(), gradient_clip_val=0.1, **half(torch.amp.GradScaler("cpu", enabled=False))
    )
    assert equal(twins["float16"], scaled)
    assert equal(twins["float16=unscaled+clip=0.1"], unscaled)
    assert not equal(scaled, unscaled)


def test_float16_under_manual_optimisation(tmp_path):
    arms = ["float16", "float16+clip=0.1"]
    twins = twins_of(tmp_path / "a", made(Manual, clip=1e9), arms)
    for arm, clip in zip(arms, (1e9, 0.1 * 2**16), strict=True):  # the module clips what is scaled by 2^16
        expected = trained(tmp_path / arm, made(Manual, clip=clip), **half(torch.amp.GradScaler("cpu")))
        for name, p in expected.items():
            torch.testing.assert_close(twins[arm][name], p, rtol=1e-5, atol=1e-7)
    plain = trained(tmp_path / "c", made(Manual, clip=1e9), **half(torch.amp.GradScaler("cpu")))
    assert equal(twins["float16"], plain)


@pytest.mark.parametrize("package", tiny.PACKAGES)
def test_both_packages_scale_with_a_plugin_of_their_own(tmp_path, package):
    monitor = WeightMonitor(3, window=3, arms=["float16"], floor_seeds=0)
    tiny.trainer(tmp_path, [monitor], package, max_steps=5).fit(tiny.module_class(package)(), tiny.batches(8))
    (record,) = read_records(tmp_path / "stability").of("weights")
    assert 0 < record.values["weights/float16/rel_l2"] < 0.1


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [Plain, Manual])
def test_a_skipped_step_is_one_that_never_was(tmp_path, kind, accumulate):
    if kind is Manual and accumulate == 2:
        pytest.skip("Lightning accumulates nothing under manual optimisation")
    twin = twins_of(tmp_path, made(kind), ["skip=1-2"], accumulate_grad_batches=accumulate)["skip=1-2"]
    torch.manual_seed(3)
    module = made(kind).train()
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(module.model.parameters(), lr=1e-2)
    batches = list(tiny.batches(40, size=2))
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-2 * 0.5 ** (step // 2)
        for batch in batches[step * accumulate : (step + 1) * accumulate]:
            loss = module.loss(batch) / accumulate  # draws dropout in skipped steps too, as the run does
            if step not in (1, 2):
                loss.backward()
        if step not in (1, 2):
            if kind is Manual:
                nn.utils.clip_grad_norm_(module.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    assert equal(twin, dict(module.named_parameters()))


def test_an_arm_without_effect_is_said_in_the_record_and_once_on_the_console(tmp_path, caplog):
    arms = ["lr_hold", "clip=100", "skip=900", "beta2=0.999", "same", "lr*0.5"]
    monitor = WeightMonitor(2, window=2, arms=arms, floor_seeds=1)
    module = made(decays=False)
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, module, [monitor])
    records = read_records(tmp_path / "stability").of("weights")
    assert len(records) == 2
    for record in records:
        assert record.detail["no_effect"] == arms[:4]
        assert {record.detail["verdict"][arm] for arm in arms[:4]} == {"this arm had no effect"}
        assert record.detail["verdict"]["same"] == "not distinguishable from the floor"
    for arm in arms:
        told = [line for line in caplog.messages if f"arm {arm!r}, step" in line and "no effect" in line]
        assert len(told) == (arm in arms[:4])


@pytest.mark.parametrize("arm", ["beta2=0.9", "update_rms_clip"])
def test_what_the_optimizer_lacks_is_refused_before_the_first_step(tmp_path, arm):
    class Simple(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Simple()
    with pytest.raises(
        ValueError, match=f"arm '{arm}': expected an optimizer with a setting 'betas', got SGD"
    ):
        trained(tmp_path, module, [WeightMonitor(2, window=1, arms=[arm])])
    assert module.steps == 0


def test_no_attention_to_replace_is_said(tmp_path):
    class Without(Plain):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Embedding(tiny.VOCAB, 8), nn.Linear(8, tiny.VOCAB))

    with pytest.raises(ValueError, match="arm 'exact_attention': expected attention .* saw none") as caught:
        trained(tmp_path, Without(), [WeightMonitor(2, window=1, arms=["exact_attention"])])
    assert "WeightMonitor" in caught.value.__notes__[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_in_a_compiled_model_attention_is_measured_against_an_eager_twin(tmp_path):
    module = made()
    module.model = torch.compile(module.model)
    arms = ["same", "eager", "attention=flash", "exact_attention"]
    monitor = WeightMonitor(STEPS, window=None, arms=arms, floor_seeds=1)
    trained(tmp_path, module, [monitor])
    (record,) = read_records(tmp_path / "stability").of("weights")
    apart = {arm: record.values[f"weights/{arm.replace('=', '_')}/max_abs"] for arm in arms}
    assert apart["same"] == 0
    assert apart["eager"] > 0  # compiled arithmetic is not the eager one
    assert apart["attention=flash"] == 0
    assert apart["exact_attention"] > 0
    assert record.detail["against_eager"] == arms[2:]
    assert record.detail["no_effect"] == ["attention=flash"]
