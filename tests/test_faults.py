import logging

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from stabilitykit.faults import PlantedBatch, PlantedLearningRate, PlantedScale, PlantedSecondMoment, spoilt
from stabilitykit.gpt.module import GPTModule, TextData
from stabilitykit.observe.tap import Tap

KINDS = ["random_bytes", "repeated_byte", "shuffled_labels"]
STEPS, AT = 8, 5


class Witness(pl.Callback):
    def __init__(self):
        self.batches, self.validation = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch)

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.validation.append(batch)


class Saver(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batch_idx + 1}.ckpt")


@pytest.fixture
def data(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox " * 50)
    return TextData(str(tmp_path / "a.txt"), batch_size=2, context=8, validation_batches=3, vocab_size=256)


def run(data, *callbacks, resume=None, **how) -> Witness:
    pl.seed_everything(0, verbose=False)
    witness = Witness()
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "max_steps": STEPS,
            "limit_train_batches": 3,  # the count is of the run, not of an epoch
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "callbacks": [witness, *callbacks],
            **how,
        }
    )
    trainer.fit(GPTModule(context=8, layers=1, heads=2, width=8), data, ckpt_path=resume)
    return witness


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_one_training_batch_is_spoilt_and_nothing_else(data, kind):
    healthy = run(data)
    planted = run(PlantedBatch(data, at_batch=AT, kind=kind))
    assert len(healthy.batches) == len(planted.batches) == STEPS
    same = [equal(a, b) for a, b in zip(healthy.batches, planted.batches, strict=True)]
    assert same == [index != AT for index in range(STEPS)]
    assert all(equal(a, b) for a, b in zip(healthy.validation, planted.validation, strict=True))
    assert len(planted.validation) >= 3


def test_validation_is_never_spoilt(data):
    healthy = run(data)
    for at in (0, 3):  # the counts at which the sanity check and the first validation run
        planted = run(PlantedBatch(data, at_batch=at))
        assert all(equal(a, b) for a, b in zip(healthy.validation, planted.validation, strict=True))
        assert not equal(healthy.batches[at], planted.batches[at])


def test_it_says_so_once(data, caplog):
    caplog.set_level(logging.INFO)
    run(PlantedBatch(data, at_batch=AT))
    said = [line for line in caplog.messages if "planted fault" in line]
    assert said == ["stabilitykit: planted fault: batch 5 is replaced by random_bytes"]


@pytest.mark.parametrize("start", [2, 3, 5, 6])
def test_a_resumed_run_is_spoilt_in_the_same_place(data, tmp_path, start):
    whole = run(PlantedBatch(data, at_batch=AT), Saver(tmp_path))
    rest = run(PlantedBatch(data, at_batch=AT), resume=tmp_path / f"{start}.ckpt")
    assert len(rest.batches) == STEPS - start
    assert all(equal(a, b) for a, b in zip(whole.batches[start:], rest.batches, strict=True))


def test_what_is_skipped_is_not_spoilt(data, caplog):
    caplog.set_level(logging.INFO)
    data.setup("fit")
    loader = data.train_dataloader()
    for batch, listed, spoils in [(AT, True, False), (AT - 1, True, True), (AT, False, True)]:
        caplog.clear()
        data.skipped = frozenset(loader.sample_ids(batch) if listed else ())
        healthy, planted = run(data), run(PlantedBatch(data, at_batch=AT))
        same = [equal(a, b) for a, b in zip(healthy.batches, planted.batches, strict=True)]
        assert same == [not spoils or index != AT for index in range(STEPS)]
        assert ("the skip list leaves out batch 5" in caplog.text) is not spoils


def test_batches_are_counted_not_steps(data):
    planted = run(PlantedBatch(data, at_batch=4), accumulate_grad_batches=2, limit_train_batches=4)
    healthy = run(data, accumulate_grad_batches=2, limit_train_batches=4)
    assert len(planted.batches) == 2 * STEPS
    same = [equal(a, b) for a, b in zip(healthy.batches, planted.batches, strict=True)]
    assert [index for index, unspoilt in enumerate(same) if not unspoilt] == [4]


# Lightning says what this test is about: that there is no validation.
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.filterwarnings("ignore:The .train_dataloader. does not have many workers")
def test_what_the_data_lack_the_planted_data_lack(tmp_path):
    """A user's own data module: no validation, a torch loader, hooks and a state of its own."""

    class Own(pl.LightningDataModule):
        def train_dataloader(self):
            assert self.trainer is not None
            return DataLoader([(torch.arange(8), torch.arange(8))] * 6, batch_size=2)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [tensor + 1 for tensor in batch]

        def state_dict(self):
            return {"own": 1}

        def load_state_dict(self, state):
            self.loaded = state

    data = Own()
    witness = run(PlantedBatch(data, at_batch=1), Saver(tmp_path))
    assert witness.validation == []
    assert witness.batches[0][0].tolist() == [list(range(1, 9))] * 2
    assert witness.batches[1][0].tolist() != witness.batches[0][0].tolist()
    again = Own()
    run(PlantedBatch(again, at_batch=1), resume=tmp_path / "3.ckpt")
    assert again.loaded == {"own": 1}


def test_each_kind_is_what_it_says():
    inputs = torch.arange(60).view(3, 20)
    batch = (inputs, inputs + 1)
    new_inputs, new_targets = spoilt(batch, "random_bytes", seed=0)
    assert new_inputs.shape == new_targets.shape == (3, 20)
    assert new_inputs.dtype == new_targets.dtype == torch.int64
    assert torch.equal(new_inputs[:, 1:], new_targets[:, :-1])  # a stream, as text is
    assert len(new_inputs.unique()) > 40
    assert new_inputs.min() >= 0
    assert new_inputs.max() < 256
    new_inputs, new_targets = spoilt(batch, "repeated_byte", seed=0)
    assert len(torch.cat((new_inputs, new_targets)).unique()) == 1
    new_inputs, new_targets = spoilt(batch, "shuffled_labels", seed=0)
    assert torch.equal(new_inputs, inputs)
    assert not torch.equal(new_targets, inputs + 1)
    assert torch.equal(new_targets.flatten().sort().values, (inputs + 1).flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind):
    batch = (torch.arange(60).view(3, 20), torch.arange(60).view(3, 20))
    assert equal(spoilt(batch, kind, seed=1), spoilt(batch, kind, seed=1))
    assert not equal(spoilt(batch, kind, seed=1), spoilt(batch, kind, seed=2))


def test_bad_arguments_are_named(data):
    with pytest.raises(ValueError, match="at_batch >= 0, got -1"):
        PlantedBatch(data, at_batch=-1)
    with pytest.raises(ValueError, match="random_bytes, repeated_byte, shuffled_labels, got 'x'"):
        PlantedBatch(data, at_batch=1, kind="x")


class Rates(pl.Callback):
    """The learning rate each step was taken with, and the one after it."""

    def __init__(self):
        self.used, self.after = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.used.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_the_learning_rate_is_too_high_for_one_step_and_the_schedule_goes_on(data, caplog):
    caplog.set_level(logging.INFO)
    healthy, planted = Rates(), Rates()
    run(data, healthy)
    run(data, PlantedLearningRate(AT, factor=30.0), planted)
    factors = [a / b for a, b in zip(planted.used, healthy.used, strict=True)]
    assert factors == pytest.approx([30.0 if step == AT else 1.0 for step in range(STEPS)])
    assert planted.after == healthy.after
    said = [line for line in caplog.messages if "planted fault" in line]
    assert said == ["stabilitykit: planted fault: the learning rate of step 5 is multiplied by 30"]


@pytest.mark.parametrize("factor", [0.0, 1e-4])
def test_the_second_moment_is_scaled_before_one_step(data, factor):
    class Moments(pl.Callback):
        def __init__(self):
            self.seen = []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            states = optimizer.state.values()
            self.seen.append([state["exp_avg_sq"].clone() for state in states])

    before, after = Moments(), Moments()
    run(data, before, PlantedSecondMoment(AT, factor=factor), after)
    for step in range(STEPS):
        scale = factor if step == AT else 1.0
        assert all(
            torch.equal(a * scale, b) for a, b in zip(before.seen[step], after.seen[step], strict=True)
        )


def test_an_optimizer_without_second_moments_is_refused(data):
    with pytest.raises(ValueError, match="second moments .exp_avg_sq. at step 0, got AdamW without"):
        run(data, PlantedSecondMoment(0))


def test_the_scale_is_wrong_in_the_chosen_heads_of_the_chosen_layer_from_its_step_on(data):
    class Looks(pl.Callback):
        """The logits of every attention call, as a tap outside sees them."""

        def __init__(self):
            self.logits = []

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.calls = []
            self.tap = Tap(pl_module, self.calls.append)
            self.tap.__enter__()

        def on_before_backward(self, trainer, pl_module, loss):
            self.tap.__exit__(None, None, None)
            self.logits.append([(call.q @ call.k.mT).abs().amax((0, 2, 3)) for call in self.calls])

    looks = Looks()
    module = GPTModule(context=8, layers=2, heads=4, width=16)
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[looks, PlantedScale(2, layer=1, heads=3, factor=0.0)],
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, data)
    for step, (first, second) in enumerate(looks.logits):
        assert (first > 0).all()
        assert (second > 0).tolist() == ([True] * 4 if step < 2 else [False, False, False, True])
    assert "training_step" not in vars(module)


def test_bad_arguments_of_the_other_faults_are_named():
    for fault in (PlantedLearningRate, PlantedSecondMoment, PlantedScale):
        with pytest.raises(ValueError, match="at_step >= 0, got -1"):
            fault(-1)
    with pytest.raises(ValueError, match="heads >= 1, got 0"):
        PlantedScale(1, heads=0)
