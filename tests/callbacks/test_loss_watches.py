"""What LossMonitor watches beside the loss's own course, as tiny real runs record it."""

import math

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import MixedPrecision

import tiny
from stabilitykit import LossMonitor
from stabilitykit.callbacks.tally import Gathered
from stabilitykit.gpt.module import GPTModule
from stabilitykit.report.verdict import findings
from stabilitykit.runlog import read_records


class Graded(torch.autograd.Function):
    """0 of any weight, with the gradient it is told: a finite loss may have an infinite one."""

    @staticmethod
    def forward(ctx, weight, norm):
        ctx.save_for_backward(norm)
        return torch.zeros(())

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.saved_tensors[0]).expand(1), None


class Scripted(LightningModule):
    """The batch says loss and gradient norm of step t, the second batch of a pair its tokens too."""

    def __init__(self, **attributes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch, batch_idx):
        loss, norm, *tokens = batch.unbind()
        if tokens:
            self.loss_tokens = tokens[0]
        return loss + Graded.apply(self.weight, norm)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch[0])
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def rows(losses, norms=None, tokens=None):
    columns = [losses, norms or [1.0 + 0.1 * math.sin(step) for step in range(len(losses))]]
    return tiny.Loader(torch.tensor(row) for row in zip(*columns, *([tokens] if tokens else []), strict=True))


def healthy(count):
    draw = torch.Generator().manual_seed(7)
    noise = torch.randn(count, generator=draw).mul(0.03).tolist()
    return [2.5 + 3 * math.exp(-step / 30) + noise[step] for step in range(count)]


def train(folder, data, module=None, validation=None, resume=None, callbacks=(), monitor=None, **options):
    options = {"max_epochs": 1, "gradient_clip_val": 0.1, **options}
    run = tiny.trainer(folder, [monitor or LossMonitor(), *callbacks], **options)
    run.fit(module or Scripted(), data, validation, ckpt_path=resume)
    return read_records(folder / "stability")


def told(records):
    return [(row.detail["kind"], row.detail["start"], row.detail["end"]) for row in records.of("event")]


def test_the_gradient_norm_has_a_detector_of_its_own(tmp_path):
    norms = [1.0 + 0.1 * math.sin(step) for step in range(200)]
    norms[150] = 40.0
    norms[170] = math.nan
    records = train(tmp_path, rows(healthy(200), norms), gradient_clip_val=None)
    kinds = [kind for kind, _, end in told(records) if end is None]
    assert kinds[:2] == ["gradient_spike", "gradient_nonfinite"]
    assert not any(row.values["loss/event"] for row in records.of("loss")[:170])
    spike = records.of("event")[0].detail
    assert spike["message"].startswith("gradient norm spike at step 150: 40 against a baseline of 0.9")
    found = {finding.subject: finding for finding in findings(records)}
    assert found["the gradients"].state == "bad"  # the norm that is not finite; the spike alone is not


def test_ten_zero_gradients_are_an_event_and_a_column_of_zeros_is_said(tmp_path):
    norms = [1.0] * 30 + [0.0] * 12 + [1.0] * 8
    records = train(tmp_path / "dead", rows(healthy(50), norms))
    assert told(records) == [("dead_gradient", 39, None), ("dead_gradient", 39, 42)]
    with pytest.warns(UserWarning, match="gradient norm is exactly 0 since the first step") as said:
        records = train(tmp_path / "none", rows(healthy(50), [0.0] * 50))
    assert sum("exactly 0" in str(warning.message) for warning in said) == 1
    assert told(records) == []


def test_case_11_a_loss_scale_that_falls_again_and_again_is_an_event_before_the_loss_moves(tmp_path):
    norms = [1.0] * 60
    for step in (30, 32, 33, 35, 37, 38):
        norms[step] = math.inf
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    half = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "gradient_clip_val": None}
    records = train(tmp_path, rows(healthy(60), norms), **half)
    # As the gradient of an infinite norm is inf, the weight stays what it is: the scaler skips.
    assert told(records) == [("loss_scale", 35, None), ("loss_scale", 35, 58)]
    losses = records.of("loss")
    assert [row.step for row in losses if row.values["loss/skipped"]] == [30, 32, 33, 35, 37, 38]
    assert losses[29].values["loss/scale"] == 2.0**16
    assert losses[59].values["loss/scale"] == 2.0**10
    assert (
        records.of("event")[0]
        .detail["message"]
        .startswith("loss scale falling at step 35: from 65536 to 4096 since step 30. Resume: ")
    )


def test_case_17_nan_after_thousands_of_healthy_steps_names_the_last_finite_loss(tmp_path):
    series = [*healthy(400), math.nan]
    event = train(tmp_path, rows(series)).of("event")[0]
    assert (event.step, event.detail["kind"]) == (400, "nonfinite")
    assert f"; the last finite loss was {series[399]:.4g} at step 399" in event.detail["message"]


def test_case_12_declared_changes_annotate_events(tmp_path):
    series = healthy(200)
    series[150] = 7.0
    monitor = LossMonitor(markers={140: "new data mix", 10: "warm-up"})
    event = train(tmp_path, rows(series), monitor=monitor).of("event")[0].detail
    assert event["markers"] == [{"step": 10, "reason": "warm-up"}, {"step": 140, "reason": "new data mix"}]
    assert "; 10 steps after 'new data mix' of step 140" in event["message"]


@pytest.mark.parametrize(("first", "events"), [(16.0, 2), (math.log(50304), 0)])
def test_case_36_the_first_loss_is_held_against_the_vocabulary(tmp_path, first, events):
    module = Scripted()
    module.hparams["vocab_size"] = 50304
    records = train(tmp_path, rows([first, 10.5, 10.4]), module)
    assert told(records) == [("initial_loss", 0, None), ("initial_loss", 0, 0)][:events]
    if events:
        states = [(f.state, f.over) for f in findings(records) if f.subject == "the gradients"]
        assert states == [("bad", True)]
    assert told(train(tmp_path / "unknown", rows([16.0, 10.5, 10.4]))) == []


def test_case_34_a_resume_whose_loss_is_higher_is_tagged_and_a_right_one_is_silent(tmp_path):
    series = healthy(200)
    save = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=100, filename="at", save_top_k=1)
    options = {"max_steps": 120, "max_epochs": None, "enable_checkpointing": True}
    train(tmp_path, rows(series), callbacks=[save], **options)
    worse = [loss + 1.5 * (step >= 102) for step, loss in enumerate(series)]
    for data in (series, worse):
        resume = tmp_path / "ckpt" / "at.ckpt"
        records = train(tmp_path / "other", rows(data), resume=resume, max_steps=140) and read_records(
            tmp_path / "stability"
        )
        if data is series:
            assert told(records) == []
    opened = records.of("event")[0]
    assert (opened.step, opened.detail["after_resume"]) == (102, 2)
    assert "; 2 steps after a resume" in opened.detail["message"]


def test_train_and_validation_loss_share_no_window(tmp_path):
    series = healthy(120)
    plain = train(tmp_path / "plain", rows(series))
    validated = train(
        tmp_path / "validated", rows(series), validation=rows([90.0, math.nan, 50.0]), val_check_interval=10
    )
    assert [row.values for row in validated.of("loss")] == [row.values for row in plain.of("loss")]
    assert told(validated) == told(plain) == []


@pytest.mark.parametrize("action", ["flag", "skip"])
def test_accumulation_gives_the_same_events_on_the_same_data(tmp_path, action):
    series = healthy(180)
    series[100], series[150] = math.nan, 7.0
    spread = [loss + shift for loss in series for shift in (-0.5, 0.5, -0.25, 0.25)]
    whole = train(tmp_path / "1", rows(series), monitor=LossMonitor(action), max_epochs=1)
    norms = [1.0 + 0.1 * math.sin(place // 4) for place in range(len(spread))]
    parts = train(tmp_path / "4", rows(spread, norms), monitor=LossMonitor(action), accumulate_grad_batches=4)
    assert told(parts) == told(whole)
    assert len(told(whole)) == 4
    for a, b in zip(whole.of("loss"), parts.of("loss"), strict=True):
        assert b.values["loss/value"] == pytest.approx(a.values["loss/value"], rel=1e-6, nan_ok=True)


def test_case_32_micro_batches_count_by_their_tokens_and_one_of_masked_tokens_not_at_all(tmp_path):
    losses, tokens = [2.0, 3.0, 4.0, math.nan], [11.0, 101.0, 8.0, 0.0]
    records = train(tmp_path, rows(losses, [1.0] * 4, tokens), accumulate_grad_batches=2)
    values = [row.values["loss/value"] for row in records.of("loss")]
    assert values == pytest.approx([(2 * 11 + 3 * 101) / 112, 4.0], rel=1e-6)


def test_our_gpt_says_how_many_tokens_its_loss_is_the_mean_of():
    module = GPTModule(layers=1, heads=2, width=8, context=8, decay_steps=5)
    module.trainer = tiny.trainer(".")
    module.log = lambda *args, **options: None
    module.training_step((torch.zeros(2, 8, dtype=torch.int64),) * 2, 0)
    assert module.loss_tokens == 16


@pytest.mark.parametrize(("action", "early"), [("flag", 0), ("stop", 0), ("skip", 1)])
def test_only_skip_waits_for_the_device_before_the_update(tmp_path, monkeypatch, action, early):
    """`flag` and `stop` read each step once, when the next one has been handed over."""
    read, monitor = [], LossMonitor(action)
    plain = Gathered.read

    def counted(self):
        read.append((self.step, monitor.run.step))
        return plain(self)

    monkeypatch.setattr(Gathered, "read", counted)
    train(tmp_path, rows(healthy(6)), monitor=monitor)
    late = [(step, step + 1) for step in range(5)]
    assert sorted(read) == sorted([*late, (5, 6), *[(step, step) for step in range(6)] * early])
