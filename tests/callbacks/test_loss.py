import math

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint

import tiny
from stabilitykit import LossMonitor
from stabilitykit.runlog import read_records


def losses(folder):
    return [row.values["loss/value"] for row in read_records(folder / "stability").of("loss")]


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_loss_is_the_mean_of_the_micro_batches(tmp_path, accumulate):
    module = tiny.module_class("pytorch_lightning")()
    run = tiny.trainer(tmp_path, [LossMonitor()], accumulate_grad_batches=accumulate, max_steps=3)
    run.fit(module, tiny.batches(12))
    micro = torch.tensor(module.losses[: 3 * accumulate]).view(3, accumulate)
    torch.testing.assert_close(torch.tensor(losses(tmp_path)), micro.mean(1))


def test_a_short_last_accumulation_is_averaged_over_what_it_had(tmp_path):
    module = tiny.module_class("pytorch_lightning")()
    run = tiny.trainer(tmp_path, [LossMonitor()], accumulate_grad_batches=4, max_epochs=1)
    run.fit(module, tiny.batches(6))
    assert losses(tmp_path)[1] == pytest.approx(sum(module.losses[4:]) / 2)


class Scripted(LightningModule):
    """One weight; the loss of batch t is what the batch says, its gradient 3 w."""

    def __init__(self, returns="tensor"):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.returns = returns

    def training_step(self, batch, batch_idx):
        loss = batch.sum() + 3 * self.weight.sum() - 3 * self.weight.sum().detach()
        return {"tensor": loss, "dict": {"loss": loss, "more": 1}, "none": None}[self.returns]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(folder, series, returns="tensor", **options):
    monitor = LossMonitor(**options)
    run = tiny.trainer(folder, [monitor], max_epochs=1, gradient_clip_val=0.1)
    run.fit(Scripted(returns), tiny.Loader(torch.tensor([value]) for value in series))
    return run, read_records(folder / "stability")


def healthy(count):
    draw = torch.Generator().manual_seed(7)
    noise = torch.randn(count, generator=draw).mul(0.03).tolist()
    return [2.5 + 3 * math.exp(-step / 30) + noise[step] for step in range(count)]


def test_the_gradient_norm_is_taken_before_clipping(tmp_path):
    _, records = train(tmp_path, healthy(3))
    assert [r.values["loss/grad_norm"] for r in records.of("loss")] == pytest.approx([3 * 2**0.5] * 3)


def test_a_spike_is_flagged_at_its_step_and_closed(tmp_path):
    series = healthy(220)
    series[150] = 7.0
    _, records = train(tmp_path, series)
    events = [row.detail for row in records.of("event")]
    assert [(e["kind"], e["start"], e["end"] is None) for e in events] == [
        ("spike", 150, True),
        ("spike", 150, False),
    ]
    assert events[0]["id"] == events[1]["id"]
    assert events[0]["monitor"] == "LossMonitor"
    assert events[0]["message"].startswith("loss spike at step 150: 7 against a baseline of 2.4")
    flagged = [row.step for row in records.of("loss") if row.values["loss/event"]]
    assert flagged == [150]
    assert records.of("loss")[150].values["loss/score"] > 20


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_event_from_the_first_step(tmp_path, value):
    _, records = train(tmp_path, [value, *healthy(5)])
    event = records.of("event")[0]
    assert (event.step, event.detail["kind"]) == (0, "nonfinite")
    assert not math.isfinite(records.of("loss")[0].values["loss/value"])


def test_stop_ends_training_after_the_event(tmp_path):
    series = healthy(200)
    series[150] = 7.0
    run, records = train(tmp_path, series, action="stop")
    assert run.global_step == 152
    assert len(records.of("loss")) == 152


def test_an_unknown_action_is_refused():
    with pytest.raises(ValueError, match="expected action 'flag', 'skip' or 'stop', got 'explode'"):
        LossMonitor(action="explode")


def test_a_dict_with_a_loss_is_read(tmp_path):
    _, records = train(tmp_path, healthy(3), returns="dict")
    assert len(records.of("loss")) == 3


def test_no_loss_is_said_once_and_training_goes_on(tmp_path):
    with pytest.warns(UserWarning) as said:
        run, _ = train(tmp_path, healthy(4), returns="none")
    ours = [w for w in said if "LossMonitor expected a loss from training_step" in str(w.message)]
    assert len(ours) == 1
    assert run.current_epoch == 1


def test_the_detector_survives_a_resume_bit_for_bit(tmp_path):
    series = healthy(90)
    series[80] = 7.0

    data = [torch.tensor([value]) for value in series]
    whole = tiny.trainer(tmp_path / "whole", [LossMonitor()], max_steps=90)
    whole.fit(Scripted(), tiny.Loader(data))
    save = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=77, filename="at")
    first = tiny.trainer(tmp_path / "cut", [LossMonitor(), save], max_steps=83, enable_checkpointing=True)
    first.fit(Scripted(), tiny.Loader(data))
    second = tiny.trainer(tmp_path / "other", [LossMonitor()], max_steps=90)
    second.fit(Scripted(), tiny.Loader(data), ckpt_path=tmp_path / "ckpt" / "at.ckpt")

    def told(folder):
        rows = read_records(tmp_path / folder / "stability").rows
        return [(r.step, r.kind, r.values, r.detail) for r in rows if r.kind != "overhead"]

    cut = told("cut")
    for event in (detail for _, kind, _, detail in cut if kind == "event"):
        assert event.pop("after_resume") == 3  # what an uninterrupted run cannot say
        event["message"] = event["message"].replace("; 3 steps after a resume", "")
    assert cut == told("whole")
    assert [r.attempt for r in read_records(tmp_path / "cut" / "stability").of("loss")][-13:] == [2] * 13


def test_cross_entropy_in_bfloat16_is_recorded_as_it_is(tmp_path):
    class Low(Scripted):
        def training_step(self, batch, batch_idx):
            return (super().training_step(batch, batch_idx)).bfloat16()

    run = tiny.trainer(tmp_path, [LossMonitor()], max_epochs=1)
    run.fit(Low(), tiny.Loader([torch.tensor([2.51])]))
    assert losses(tmp_path) == [torch.tensor(2.51).bfloat16().item()]
