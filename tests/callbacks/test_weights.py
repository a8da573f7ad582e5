import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from pytorch_lightning import Callback, LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny
from stabilitykit.callbacks.attention import AttentionMonitor
from stabilitykit.callbacks.loss import LossMonitor
from stabilitykit.callbacks.weights import WeightMonitor, compared, verdict
from stabilitykit.observe.arm import Arm
from stabilitykit.runlog import read_records
from torchrun import on_two_ranks


class Plain(LightningModule):
    """A user's module; the rows of Law 2 are its subclasses."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.model = tiny.Model(layers=1, dropout=dropout)
        self.losses = []
        self.seen = {"tokens": [], "sum": torch.zeros(())}

    def loss(self, batch):
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.seen["tokens"].append(batch[0].numel())
        self.seen["sum"] += loss.detach()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class TiedOneCycle(Plain):
    def __init__(self):
        super().__init__()
        self.model.head.weight = self.model.embed.weight

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class DecayGroups(Plain):
    """Own hooks as well: a norm that is scaled and a clip of its own."""

    def configure_optimizers(self):
        flat = [p for p in self.parameters() if p.ndim < 2]
        deep = [p for p in self.parameters() if p.ndim >= 2]
        return torch.optim.AdamW(
            [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=1e-2
        )

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.mul_(0.9)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.3))


class Checkpointed(Plain):
    def loss(self, batch):
        x = self.model.embed(batch[0])
        for block in self.model.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return F.cross_entropy(self.model.head(x).flatten(0, 1), batch[1].flatten())


class NormAndMetrics(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(tiny.VOCAB)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(tiny.VOCAB)
        self.mean = torchmetrics.MeanMetric()

    def loss(self, batch):
        logits = self.norm(self.model(batch[0]).flatten(0, 1))
        loss = F.cross_entropy(logits, batch[1].flatten())
        self.accuracy(logits, batch[1].flatten())
        self.mean.update(loss.detach())
        return loss + 0.1 * self.norm.running_mean.mean() * logits.mean() + 0.01 * self.accuracy.compute()


class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        second.step()
        self.lr_schedulers().step()
        self.losses.append(loss.item())

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.model.blocks.parameters(), lr=1e-2)
        rest = [*self.model.embed.parameters(), *self.model.head.parameters()]
        return [first, torch.optim.SGD(rest, 0.1, momentum=0.9)], [
            torch.optim.lr_scheduler.StepLR(first, 7, 0.5)
        ]


class Frozen(Plain):
    def __init__(self):
        super().__init__()
        self.model.embed.requires_grad_(False)


class Recurrent(Plain):
    """nn.LSTM keeps a list of raw references; weight_norm keeps a computed weight."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(16, tiny.VOCAB))

    def loss(self, batch):
        hidden, _ = self.lstm(self.model.embed(batch[0]))
        return F.cross_entropy(self.out(hidden).flatten(0, 1), batch[1].flatten())


class Schedules(Plain):
    """What changes outside of the training step: a number, and the learning rate."""

    def on_train_batch_start(self, batch, batch_idx):
        self.scale = 1 + batch_idx / 100

    def loss(self, batch):
        return super().loss(batch) * self.scale

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + batch_idx)
        optimizer.step(closure=optimizer_closure)


def scaled():
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))]}


ROWS = {
    "tied weights, dropout, OneCycleLR": (TiedOneCycle, {}),
    "weight-decay groups, own hooks": (DecayGroups, {}),
    "clip, accumulation 2": (Plain, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
    "activation checkpointing": (Checkpointed, {}),
    "BatchNorm, torchmetrics": (NormAndMetrics, {}),
    "LSTM, weight_norm": (Recurrent, {}),
    "manual optimisation": (Manual, {}),
    "bf16-mixed": (Plain, {"precision": "bf16-mixed"}),
    "bf16-true": (Plain, {"precision": "bf16-true"}),
    "16-mixed with a GradScaler": (Plain, scaled()),
    "a frozen layer": (Frozen, {}),
    "schedules from outside": (Schedules, {}),
}


def fit(folder, module, callbacks, count=120, **options):
    run = tiny.trainer(folder, callbacks, **options)
    first = 500 * int(os.environ.get("RANK", "0"))  # each rank has batches of its own
    run.fit(module, tiny.Loader(tiny.batch(first + index, size=2) for index in range(count)))
    return run


def weights(folder):
    return read_records(folder / "stability").of("weights")


def numbers(record, arm):
    return {key.split("/")[-1]: v for key, v in record.values.items() if key.split("/")[1] == arm}


def trained(folder, kind, callbacks, count=120, **options):
    torch.manual_seed(5)
    module = kind()
    fit(folder, module, callbacks, count, **options)
    return module, {name: t.clone() for name, t in module.state_dict().items()}


def equal(a, b):
    same = all(torch.equal(a[1][name], b[1][name]) for name in b[1])
    return a[0].losses == b[0].losses and a[0].seen == b[0].seen and same


@pytest.mark.parametrize("row", ROWS)
def test_law_2_a_twin_that_is_the_same_stays_at_zero_and_the_run_is_unchanged(tmp_path, row):
    kind, options = ROWS[row]
    options = dict(options)
    options["max_steps"] = 100 if kind is Manual else 50  # Lightning counts every optimizer's steps
    monitor = WeightMonitor(50, window=None, arms=["same"], floor_seeds=0)
    watched = trained(tmp_path, kind, [monitor], **options)[0]
    (record,) = weights(tmp_path)
    assert record.values == {
        "weights/same/w1": 0.0,
        "weights/same/max_abs": 0.0,
        "weights/same/rel_l2": 0.0,
        "weights/same/cosine": 1.0,
    }
    assert record.step == 49
    if "plugins" in options:
        options |= scaled()  # a fresh scaler
    options["max_steps"] //= 5
    plain = trained(tmp_path / "plain", kind, [], **options)[0]
    assert plain.losses == watched.losses[: len(plain.losses)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_law_1_watching_changes_nothing(tmp_path, window, accumulate):
    options = {"max_steps": 8, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    plain = trained(tmp_path / "plain", Plain, [], **options)
    stream = torch.get_rng_state()
    monitor = WeightMonitor(
        3,
        window=window,
        arms=[
            "float32",
            "float64",
            "bfloat16",
            "seed=3",
            "float16+lr*0.5",
            "exact_attention+skip=4",
            "clip=0.1",
        ],
        floor_seeds=1,
    )
    watched = trained(tmp_path, Plain, [monitor, LossMonitor(), AttentionMonitor(2)], **options)
    assert equal(plain, watched)
    assert torch.equal(stream, torch.get_rng_state())
    assert "training_step" not in vars(watched[0])
    assert weights(tmp_path)


def test_a_window_is_forked_run_measured_and_dropped(tmp_path):
    module = Plain()
    fit(tmp_path, module, [WeightMonitor(5, window=2, arms=["jitter=1e-3"], floor_seeds=3)], max_steps=12)
    records = weights(tmp_path)
    assert [(r.step, r.detail["forked_at"], r.detail["window"]) for r in records] == [(5, 4, 2), (10, 9, 2)]
    record = records[0]
    assert set(record.values) == {
        f"weights/jitter_1e_3/{key}"
        for key in ("w1", "max_abs", "rel_l2", "cosine", "w1_over_floor", "rel_l2_over_floor")
    }
    row = numbers(record, "jitter_1e_3")
    floor = record.detail["floor"]
    assert len(floor["w1"]) == len(floor["rel_l2"]) == 3
    assert row["rel_l2_over_floor"] == pytest.approx(row["rel_l2"] / sorted(floor["rel_l2"])[1])
    assert record.detail["verdict"] == {"jitter=1e-3": "above all 3 jitter seeds (p = 1/4)"}
    tensors = record.detail["tensors"]["jitter=1e-3"]
    assert set(tensors) == {name for name, _ in module.named_parameters()}
    assert row["max_abs"] == max(tensor["max_abs"] for tensor in tensors.values())


@pytest.mark.parametrize("package", tiny.PACKAGES)
def test_both_packages_and_a_monitor_used_twice(tmp_path, package):
    monitor = WeightMonitor(2, window=2, arms=["same", "bfloat16"], floor_seeds=0)
    for folder in (tmp_path / "a", tmp_path / "b"):
        run = tiny.trainer(folder, [monitor], package, max_steps=3, gradient_clip_val=0.1)
        run.fit(tiny.module_class(package)(), tiny.batches(8))
        (record,) = weights(folder)
        assert record.step == 2
        assert numbers(record, "same")["max_abs"] == 0 < numbers(record, "bfloat16")["max_abs"]


def test_lockstep_twins_are_measured_on_due_steps(tmp_path):
    monitor = WeightMonitor(4, window=None, arms=["jitter"], floor_seeds=1)
    fit(tmp_path, Plain(), [monitor], max_steps=9)
    records = weights(tmp_path)
    assert [(r.step, r.detail["forked_at"], r.detail["window"]) for r in records] == [
        (3, 0, None),
        (7, 0, None),
    ]


def test_an_arm_has_its_effect_and_one_without_is_called_so(tmp_path):
    monitor = WeightMonitor(4, window=4, arms=["float32", "bfloat16", "same"], floor_seeds=2)
    fit(tmp_path, Plain(), [monitor], max_steps=8)
    (record,) = weights(tmp_path)
    assert numbers(record, "float32")["max_abs"] == 0  # the run is float32
    assert numbers(record, "bfloat16")["rel_l2"] > 1e-6
    assert record.detail["verdict"] == {
        "float32": "this arm had no effect",
        "bfloat16": "above all 2 jitter seeds (p = 1/3)",
        "same": "not distinguishable from the floor",
    }


def test_a_float64_twin_of_a_float32_run_is_as_near_as_rounding(tmp_path):
    fit(tmp_path, Plain(), [WeightMonitor(4, window=2, arms=["float64"], floor_seeds=0)], max_steps=5)
    (record,) = weights(tmp_path)
    assert 0 < numbers(record, "float64")["rel_l2"] < 1e-4
    assert record.detail["verdict"] == {"float64": "no floor was measured"}


def test_precision_of_a_mixed_run_is_seen(tmp_path):
    monitor = WeightMonitor(4, window=2, arms=["float32"], floor_seeds=0)
    fit(tmp_path, Plain(), [monitor], max_steps=5, precision="bf16-mixed")
    assert numbers(weights(tmp_path)[0], "float32")["rel_l2"] > 1e-6


def test_attention_numbers_are_those_of_attention_alone(tmp_path):
    torch.manual_seed(1)
    start = Plain().state_dict()
    found = []
    for folder, extra in (("alone", []), ("both", [WeightMonitor(2, window=2, arms=["float64"])])):
        for order in (1, -1):
            module = Plain()
            module.load_state_dict(start)
            torch.manual_seed(2)
            place = tmp_path / f"{folder}{order}"
            fit(place, module, [AttentionMonitor(2), *extra][::order], max_steps=6)
            records = read_records(place / "stability").of("attention")
            found.append([(r.step, r.values, r.detail) for r in records])
    assert len(found[0]) == 3
    assert found[0] == found[1] == found[2] == found[3]


class Normed(Plain):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(tiny.VOCAB)

    def loss(self, batch):
        logits = self.norm(self.model(batch[0]).flatten(0, 1))
        return F.cross_entropy(logits, batch[1].flatten()) + self.norm.running_mean.mean() * logits.mean()


class Stream(Callback):
    """A user's callback that keeps the random stream over a resume, which Lightning does not."""

    saved = None

    def state_dict(self):
        return {"stream": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.saved = state["stream"]

    def on_train_batch_start(self, *_):
        if self.saved is not None:
            torch.set_rng_state(self.saved)
            self.saved = None


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kind", [Normed, Manual])
def test_a_resume_in_mid_window_goes_on_bit_for_bit(tmp_path, window, kind):
    def callbacks():
        return [Stream(), WeightMonitor(4, window=window, arms=["bfloat16+lr_hold", "seed=2"], floor_seeds=1)]

    per_step = 2 if kind is Manual else 1  # Lightning counts every optimizer's steps
    whole = trained(tmp_path / "whole", kind, callbacks(), max_steps=9 * per_step)
    save = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=5 * per_step, save_top_k=-1, filename="at")
    options = {"max_steps": 5 * per_step, "enable_checkpointing": True}
    trained(tmp_path / "part", kind, [*callbacks(), save], **options)
    torch.manual_seed(99)
    module = kind()
    run = tiny.trainer(tmp_path / "part", callbacks(), max_steps=9 * per_step)
    run.fit(module, tiny.batches(120, size=2), ckpt_path=tmp_path / "ckpt" / "at.ckpt")
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, whole[1][name]), name
    ours = [(r.step, r.values, r.detail) for r in weights(tmp_path / "part")]
    assert ours == [(r.step, r.values, r.detail) for r in weights(tmp_path / "whole")]
    assert [step for step, *_ in ours] == ([3, 7] if window is None else [6])
    assert ours[-1][1]["weights/seed_2/rel_l2"] > 0


def test_other_twins_than_the_checkpoints_are_not_taken_up(tmp_path):
    save = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=5, filename="at")
    first = [WeightMonitor(4, window=4, arms=["bfloat16"], floor_seeds=1), save]
    fit(tmp_path, Plain(), first, max_steps=5, enable_checkpointing=True)
    run = tiny.trainer(tmp_path, [WeightMonitor(4, window=4, arms=["float64"], floor_seeds=1)], max_steps=11)
    with pytest.warns(UserWarning, match="checkpoint's twins .*bfloat16.* are not those asked for"):
        run.fit(Plain(), tiny.batches(120, size=2), ckpt_path=tmp_path / "ckpt" / "at.ckpt")
    assert [(r.step, list(r.detail["verdict"])) for r in weights(tmp_path)] == [(10, ["float64"])]


def test_law_5_off_its_windows_it_costs_no_kernel(tmp_path):
    counts = []
    for callbacks in ([LossMonitor()], [LossMonitor(), WeightMonitor(100)]):
        with tiny.Counted() as ops:
            fit(tmp_path / str(len(callbacks)), Plain(), callbacks, max_steps=12)
        counts.append(ops.count)
    assert counts[0] == counts[1] > 100


def test_training_step_is_the_modules_own_between_windows(tmp_path):
    wrapped = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            wrapped.append("training_step" in vars(module))

    fit(tmp_path, Plain(), [WeightMonitor(4, window=2, floor_seeds=0), Looks()], max_steps=9)
    assert wrapped == [False, False, False, True, False, False, False, True, False]


def test_a_twin_does_not_stop_the_run(tmp_path):
    class Stops(Plain):
        def loss(self, batch):
            if self.model.head.weight.dtype == torch.float64:
                self.trainer.should_stop = True
            return super().loss(batch)

    stopping = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer, *_):
            stopping.append(trainer.should_stop)

    monitor = WeightMonitor(1, window=1, arms=["same", "float64"], floor_seeds=0)
    fit(tmp_path, Stops(), [monitor, Looks()], max_steps=3)
    assert stopping == [False] * 3


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (4, "ended after 2 of the window of 4 steps that opened at step 3"),
        (6, "ended after 5 steps, before the first that is due"),
    ],
)
def test_what_the_end_of_the_run_left_unmeasured_is_said(tmp_path, caplog, every, words):
    fit(tmp_path, Plain(), [WeightMonitor(every, window=4, floor_seeds=0)], max_steps=5)
    assert words in caplog.text
    assert weights(tmp_path) == []


def test_nan_weights_are_recorded(tmp_path):
    class Breaks(Plain):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 3:
                self.model.head.bias.data[0] = torch.nan

    fit(tmp_path, Breaks(), [WeightMonitor(2, window=1, arms=["float64"], floor_seeds=1)], max_steps=4)
    sound, broken = weights(tmp_path)
    assert "nonfinite" not in sound.detail
    assert broken.detail["nonfinite"]["main"] > 0
    assert math.isnan(numbers(broken, "float64")["w1"])
    assert broken.detail["verdict"]["float64"].startswith("not finite: ")
    assert '"nan"' in (tmp_path / "stability" / "records.jsonl").read_text()


def test_an_error_in_a_twin_names_it_and_leaves_the_module_whole(tmp_path):
    class Fussy(Plain):
        def loss(self, batch):
            assert self.model.head.weight.dtype == torch.float32, "only float32 here"
            return super().loss(batch)

    module = Fussy()
    with pytest.raises(AssertionError, match="only float32 here") as caught:
        fit(tmp_path, module, [WeightMonitor(1, window=1, arms=["float64"])], max_steps=2)
    assert any("float64" in note and "WeightMonitor" in note for note in caught.value.__notes__)
    assert "training_step" not in vars(module)
    assert module.model.head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 0}, "expected window from 1 to every_n_steps = 1000, got 0"),
        ({"window": 20, "every_n_steps": 10}, "expected window from 1 to every_n_steps = 10, got 20"),
        ({"floor_seeds": -1}, "expected floor_seeds >= 0, got -1"),
        ({"max_gib": 0}, "expected max_gib > 0, got 0"),
        ({"arms": []}, "expected a list of at least one arm"),
        ({"arms": "float32"}, "expected a list of at least one arm, got 'float32'"),
        ({"arms": ["float8"]}, r"expected an arm \(same, float32, .*got 'float8'"),
        ({"arms": ["jitter=0"]}, "jitter factor"),
        ({"arms": ["jitter=2"]}, "jitter factor"),
        ({"arms": ["float32", "float32"]}, "expected arms that differ"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        WeightMonitor(**arguments)


def test_refused_before_training(tmp_path):
    module = Plain()
    with pytest.raises(ValueError, match=r"needs .* GiB for 4 twins of \d+ parameters, allowed 1e-06"):
        fit(tmp_path, module, [WeightMonitor(max_gib=1e-6)], max_steps=20)
    with pytest.raises(ValueError, match="expected window <= max_steps = 5, got 10"):
        fit(tmp_path, module, [WeightMonitor()], max_steps=5)
    assert module.losses == []


def test_memory_needed_is_what_twins_hold(tmp_path):
    held = []

    class Counts(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            for twin in monitor._lockstep.twins.values():
                tensors = [*twin._params.values(), *(p.grad for p in twin._params.values())]
                tensors += [b for own in twin._buffers.values() for b in own.values()]
                states = [s for o in twin.optimizers for s in o.state.values()]
                tensors += [t for s in states for key, t in s.items() if key != "step"]
                held.append(sum(t.numel() * t.element_size() for t in tensors))

    from stabilitykit.callbacks.lockstep import twin_bytes

    monitor = WeightMonitor(1, window=None, arms=["float64"], floor_seeds=0)
    module = Normed()
    run = fit(tmp_path, module, [monitor, Counts()], max_steps=1)
    assert held == [twin_bytes(module, run.optimizers, Arm.parse("float64"))]


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_sharded_strategies_are_refused_with_what_to_do(name):
    from types import SimpleNamespace

    trainer = SimpleNamespace(strategy=type(name, (), {})())
    with pytest.raises(ValueError, match=f"got {name}; save checkpoints .* `stabilitykit compare A B`"):
        WeightMonitor().on_fit_start(trainer, Plain())


def test_words_by_hand():
    arm = Arm.parse("float32")
    main = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    near = [{"w": torch.tensor([3.0, 4.0 + d]), "b": torch.tensor([0.0])} for d in (0.5, 1.5, 1.0)]
    values, detail = compared(main, {arm: {"w": torch.tensor([3.0, 6.0]), "b": main["b"]}}, near)
    assert detail["floor"]["rel_l2"] == [0.1, 0.3, 0.2]
    assert values["weights/float32/rel_l2"] == 0.4
    assert values["weights/float32/rel_l2_over_floor"] == 2.0
    assert values["weights/float32/w1"] == pytest.approx(2 / 3)
    assert values["weights/float32/max_abs"] == 2.0
    assert values["weights/float32/cosine"] == pytest.approx(33 / (5 * 45**0.5))
    assert detail["verdict"]["float32"] == "above all 3 jitter seeds (p = 1/4)"
    assert (
        verdict(arm, {"max_abs": 1, "rel_l2": 0.3}, [0.1, 0.3], 0, 0) == "not distinguishable from the floor"
    )
    assert verdict(arm, {"max_abs": 1, "rel_l2": 0.3}, [0.1, math.nan], 0, 0) == "the floor is not finite"
    assert verdict(arm, {"max_abs": 1, "rel_l2": 0.3}, [], 2, 0).startswith(
        "not finite: 2 weights of the run"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_compiled_model(tmp_path):
    module = Plain()
    module.model = torch.compile(module.model, backend="aot_eager")
    fit(
        tmp_path,
        module,
        [WeightMonitor(50, window=None, arms=["same", "float64"], floor_seeds=0)],
        max_steps=50,
    )
    (record,) = weights(tmp_path)
    assert numbers(record, "same")["max_abs"] == 0 < numbers(record, "float64")["max_abs"]


@pytest.mark.slow
def test_two_ranks(tmp_path):
    on_two_ranks(__file__, tmp_path)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("told-*.json"))]
    assert told == [{"Plain": True, "Manual": True, "Partly": True, "Normed": True}] * 2
    for kind in told[0]:
        (record,) = weights(tmp_path / kind)
        assert numbers(record, "same") == {"w1": 0.0, "max_abs": 0.0, "rel_l2": 0.0, "cosine": 1.0}
        assert numbers(record, "jitter")["rel_l2"] > 0


class Partly(Plain):
    """Each rank leaves other parameters without a gradient, and one has none on any rank."""

    def __init__(self):
        super().__init__()
        self.sides = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def loss(self, batch):
        x = self.sides[self.global_rank](self.model.embed(batch[0]))
        return F.cross_entropy(self.model.head(x).flatten(0, 1), batch[1].flatten())


def two_ranks(folder):
    """Run on each of two gloo ranks by the test above."""
    told = {}
    torch.set_num_threads(1)
    for kind, options in (
        (Plain, {"accumulate_grad_batches": 2, "strategy": "ddp"}),
        (Manual, {"strategy": "ddp_find_unused_parameters_true"}),
        (Normed, {"strategy": "ddp"}),
        (Partly, {"strategy": "ddp_find_unused_parameters_true"}),
    ):
        per_step = 2 if kind is Manual else 1
        options |= {
            "devices": 2,
            "max_steps": 20 * per_step,
            "gradient_clip_val": None if kind is Manual else 0.3,
        }
        plain = trained(folder / "plain", kind, [], **options)
        monitor = WeightMonitor(20, window=None, arms=["same", "jitter"], floor_seeds=0)
        watched = trained(folder / kind.__name__, kind, [monitor], **options)
        told[kind.__name__] = equal(plain, watched)
    rank = os.environ["RANK"]
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
