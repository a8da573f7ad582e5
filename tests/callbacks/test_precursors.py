"""PrecursorMonitor in a real Trainer: what it records, what it costs, and what it must not see."""

import json
import logging
import math
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from stabilitykit import AttentionMonitor, PrecursorMonitor, WeightMonitor
from stabilitykit.catalog import CATALOG
from stabilitykit.observe import forward
from stabilitykit.runlog import read_records

LAYERS = ["model.embed", "model.blocks.0", "model.blocks.1", "model.head"]
PLAIN = tiny.module_class("pytorch_lightning")


def watch(folder, *others, module=None, steps=4, count=None, resume=None, **options):
    """The precursors records of a run; options of the monitor and of the trainer."""
    own = {key: options.pop(key) for key in ("every_n_steps", "output_head", "log_layers") if key in options}
    torch.manual_seed(3)
    module = module or PLAIN(dropout=0.1)
    monitor = PrecursorMonitor(**{"every_n_steps": 2, **own})
    run = tiny.trainer(folder, [*others, monitor], max_steps=steps, **options)
    run.fit(module, tiny.batches(count or steps), ckpt_path=resume)
    return read_records(folder / "stability").of("precursors")


def test_due_steps_are_recorded_with_every_layer(tmp_path):
    records = watch(tmp_path)
    assert [record.step for record in records] == [1, 3]
    for record in records:
        assert list(record.detail["layers"]) == LAYERS
        assert record.values.keys() == {k for k in CATALOG if k.startswith("precursors/")} - {
            "precursors/loss_scale"
        }
        assert record.detail["moved"] == {}
        block, head = record.detail["layers"]["model.blocks.0"], record.detail["layers"]["model.head"]
        assert block.keys() - head.keys() == {"outlier", "max_logit", "entropy"}
        assert record.values["precursors/entropy"] == min(
            record.detail["layers"][f"model.blocks.{i}"]["entropy"] for i in (0, 1)
        )


class Witness(PLAIN):
    """Keeps what a plain loop needs: gradients, weights before and after, logits of each step."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.grads, self.weights, self.logits = [], [], []

    def training_step(self, batch, batch_idx):
        logits = self.model(batch[0])
        self.logits.append(logits.detach())
        self.weights.append([p.detach().clone() for p in self.parameters()])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def on_before_optimizer_step(self, optimizer):
        self.grads.append([p.grad.clone() for p in self.parameters()])


def test_the_numbers_are_those_of_a_plain_loop(tmp_path):
    module = Witness()
    record = watch(tmp_path, module=module, steps=3, every_n_steps=2, gradient_clip_val=0.01)[0]
    names = [name for name, _ in module.named_parameters()]
    mine = [i for i, name in enumerate(names) if name.startswith("model.blocks.1.")]
    row = record.detail["layers"]["model.blocks.1"]

    def norm(tensors):
        return torch.cat([t.flatten() for t in tensors]).norm().item()

    old, new = ([module.weights[at][i] for i in mine] for at in (1, 2))
    assert row["grad_norm"] == pytest.approx(norm([module.grads[1][i] for i in mine]))
    change = norm([a - b for a, b in zip(new, old, strict=True)])
    assert row["update_ratio"] == pytest.approx(change / norm(new), rel=1e-4)
    assert row["max_weight"] == pytest.approx(max(t.abs().max().item() for t in new))
    log_z = module.logits[1].double().logsumexp(-1).mean().item()
    assert record.values["precursors/log_z"] == pytest.approx(log_z, rel=1e-5)  # 4 x 16 tokens: all of them


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_calls_are_taken_in_the_forward_and_those_beyond_a_bound_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "AT_ONCE", 1)
    calls, found = [], []

    class Marking(PrecursorMonitor):
        def _listen(self, call):
            calls.append(weakref.ref(call.q))
            super()._listen(call)

    class Counting(PLAIN):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            found.append((len(calls), sum(call() is not None for call in calls)))
            return loss

    tiny.trainer(tmp_path, [Marking(2)], max_steps=4).fit(Counting(), tiny.batches(4))
    assert found == [(0, 0), (2, 0), (2, 0), (4, 0)]  # two layers on each due step


def test_off_its_steps_it_costs_no_kernel(tmp_path):
    def operations(callbacks):
        torch.manual_seed(0)
        run = tiny.trainer(tmp_path, callbacks, max_steps=3)
        with Counted() as counted:
            run.fit(PLAIN(), tiny.batches(3))
        return counted.count

    plain = operations([])
    assert operations([PrecursorMonitor(every_n_steps=100)]) == plain
    assert operations([PrecursorMonitor(every_n_steps=3)]) > plain


class Transfers(TorchFunctionMode):
    """Whatever makes the host wait for a tensor, by who asked for it."""

    WAITS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in self.WAITS:
            files = []
            frame = sys._getframe(1)
            while frame is not None:
                files.append(frame.f_code.co_filename)
                frame = frame.f_back
            ours = next((file for file in files if "/stabilitykit/" in file), "")
            # Attention's blocks are planned on tensors that are on the CPU wherever the call is; a tap
            # passes on what the model itself asks.
            if ours and not ours.endswith(("numerics/scores.py", "observe/tap.py")):
                self.asked.append(ours.rpartition("/stabilitykit/")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_due_step_has_one_transfer_to_the_host(tmp_path, accumulate):
    with Transfers() as transfers:
        watch(tmp_path, steps=6, count=6 * accumulate, accumulate_grad_batches=accumulate)
    assert transfers.asked == ["callbacks/precursors.py"] * 3


def test_a_resume_is_bit_for_bit(tmp_path):
    def told(folder):
        rows = read_records(tmp_path / folder / "stability").of("precursors")
        return [(row.step, row.values, row.detail) for row in rows]

    def run(folder, *others, **options):
        torch.manual_seed(3)
        watch(tmp_path / folder, *others, module=PLAIN(dropout=0.0), every_n_steps=1, count=40, **options)

    run("whole", steps=40)
    save = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=23, filename="at")
    run("cut", save, steps=30, enable_checkpointing=True)
    run("other", steps=40, resume=tmp_path / "ckpt" / "at.ckpt")
    assert len(told("whole")) == 40
    assert told("cut") == told("whole")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("window", [1, None])
def test_a_twins_pass_is_not_seen(tmp_path, window, first):
    plain = watch(tmp_path / "plain", every_n_steps=1)
    twins = WeightMonitor(1, window=window, arms=["jitter=0.5"], floor_seeds=0)
    torch.manual_seed(3)
    own = PrecursorMonitor(1)
    run = tiny.trainer(tmp_path / "twins", [twins, own] if first else [own, twins], max_steps=4)
    run.fit(PLAIN(dropout=0.1), tiny.batches(4))
    watched = read_records(tmp_path / "twins" / "stability").of("precursors")
    assert [row.values for row in watched] == [row.values for row in plain]


@pytest.mark.parametrize("first", [True, False])
def test_beside_attention_monitor_one_tap_serves_both(tmp_path, first):
    plain = watch(tmp_path / "plain", every_n_steps=1)
    attention, own = AttentionMonitor(2), PrecursorMonitor(1)
    torch.manual_seed(3)
    run = tiny.trainer(tmp_path / "both", [attention, own] if first else [own, attention], max_steps=4)
    run.fit(PLAIN(dropout=0.1), tiny.batches(4))
    records = read_records(tmp_path / "both" / "stability")
    assert [row.values for row in records.of("precursors")] == [row.values for row in plain]
    assert len(records.of("attention")) == 2
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("accumulate", [1, 4])
def test_accumulated_micro_batches_are_one_gradient(tmp_path, accumulate):
    size = 4 // accumulate
    module = PLAIN(dropout=0.0)
    torch.manual_seed(3)
    whole = tiny.batch(0)
    parts = [(whole[0][i : i + size], whole[1][i : i + size]) for i in range(0, 4, size)]
    torch.manual_seed(3)
    module = PLAIN(dropout=0.0)
    run = tiny.trainer(tmp_path, [PrecursorMonitor(1)], max_steps=1, accumulate_grad_batches=accumulate)
    run.fit(module, tiny.Loader(parts))
    (record,) = read_records(tmp_path / "stability").of("precursors")
    torch.manual_seed(3)
    alone = PLAIN(dropout=0.0)
    F.cross_entropy(alone.model(whole[0]).flatten(0, 1), whole[1].flatten()).backward()
    norm = math.hypot(*(p.grad.norm().item() for p in alone.model.head.parameters()))
    assert record.detail["layers"]["model.head"]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def scaled(scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return [MixedPrecision("16-mixed", "cpu", scaler)]


def test_gradients_are_unscaled(tmp_path):
    torch.manual_seed(3)
    plain = watch(tmp_path / "plain", module=PLAIN(dropout=0.0), every_n_steps=1, steps=1)[0]
    torch.manual_seed(3)
    amp = watch(
        tmp_path / "amp", module=PLAIN(dropout=0.0), every_n_steps=1, steps=1, plugins=scaled(1024.0)
    )[0]
    assert amp.values["precursors/loss_scale"] == 1024.0
    assert "overflow" not in amp.detail
    assert amp.values["precursors/grad_norm"] == pytest.approx(plain.values["precursors/grad_norm"], rel=0.02)


def test_an_overflow_is_labelled_and_has_no_update(tmp_path):
    records = watch(tmp_path, every_n_steps=1, steps=3, plugins=scaled(2.0**60))
    first = records[0]
    assert first.detail["overflow"] is True
    assert not math.isfinite(first.values["precursors/grad_norm"])
    assert first.values["precursors/loss_scale"] == 2.0**60
    assert "precursors/update_ratio" not in first.values
    assert "grad_norm" not in first.detail["moved"]


class Manual(PLAIN):
    """Two optimizers, of which one steps twice per batch."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        one, two = self.optimizers()
        for optimizer in (one, two, one):
            loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.model.blocks.parameters(), lr=0.1),
            torch.optim.AdamW([*self.model.embed.parameters(), *self.model.head.parameters()]),
        ]


def test_manual_optimisation_with_two_optimizers(tmp_path):
    records = watch(tmp_path, module=Manual(), every_n_steps=1, steps=9, count=3)
    assert [record.step for record in records] == [0, 1, 2]
    layers = records[0].detail["layers"]
    assert "rms" in layers["model.head"] and "rms" not in layers["model.blocks.0"]
    assert all(layers[name]["update_ratio"] > 0 for name in LAYERS)


def test_what_is_absent_is_recorded_and_said_once(tmp_path):
    class Bare(PLAIN):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 4))

        def training_step(self, batch, batch_idx):
            return self.model(batch[0][:, :4].float()).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    with pytest.warns(UserWarning) as said:
        records = watch(tmp_path, module=Bare())
    ours = [str(w.message) for w in said if "PrecursorMonitor" in str(w.message)]
    assert len(ours) == 1
    assert "does not measure rms: no optimizer keeps a second moment" in ours[0]
    assert "log_z: no output head ran; name its module by output_head" in ours[0]
    assert [sorted(record.detail["skipped"]) for record in records] == [
        ["eps_share", "log_z", "max_logit", "rms"]
    ] * 2


def test_an_output_head_can_be_named(tmp_path):
    record = watch(tmp_path / "a", output_head="model.embed")[0]  # an odd one: its logZ is that of 16 numbers
    assert record.values["precursors/log_z"] < math.log(16) + 2
    with pytest.raises(ValueError, match=r"'head' is none of model, model.embed, .*model.head"):
        watch(tmp_path / "b", output_head="head")


@pytest.mark.parametrize(("option", "value"), [("every_n_steps", 0), ("parity_every_n_steps", 0)])
def test_bad_arguments_are_named(option, value):
    with pytest.raises(ValueError, match=f"PrecursorMonitor: expected {option} >= 1.*got 0"):
        PrecursorMonitor(**{option: value})


def test_the_users_exception_leaves_nothing_in_place(tmp_path):
    class Failing(PLAIN):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            raise RuntimeError("mine")

    module = Failing()
    with pytest.raises(RuntimeError, match="mine"):
        watch(tmp_path, module=module, every_n_steps=1)
    assert _get_current_function_mode_stack() == []
    assert not any(child._forward_hooks for child in module.modules())


def test_a_jump_of_the_learning_rate_is_outside_its_band_at_once(tmp_path, caplog):
    from stabilitykit.faults import PlantedLearningRate

    caplog.set_level(logging.INFO)
    records = watch(tmp_path, PlantedLearningRate(30), steps=32, every_n_steps=1)
    assert all("update_ratio" not in record.detail["moved"] for record in records[:30])
    moved = records[30].detail["moved"]["update_ratio"]
    assert set(moved) == set(LAYERS)
    assert all(at["since"] == 30 and at["value"] > 8 * at["usual"] for at in moved.values())
    assert records[30].values["precursors/moved"] == sum(map(len, records[30].detail["moved"].values()))
    assert "planted fault: the learning rate of step 30 is multiplied by 30" in caplog.text


def test_log_layers_and_the_catalog(tmp_path):
    from pytorch_lightning.loggers import CSVLogger

    watch(tmp_path, steps=2, log_layers=True, logger=CSVLogger(tmp_path))
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]
    assert "precursors/update_ratio/model_blocks_1" in header
    record = read_records(next(tmp_path.rglob("records.jsonl")).parent).of("precursors")[0]
    assert set(record.values) <= set(CATALOG)
    json.dumps(record.to_json(), allow_nan=False)
