import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loggers.logger import Logger

import tiny
from stabilitykit import AttentionMonitor, LossMonitor
from stabilitykit.callbacks.monitor import Monitor
from stabilitykit.runlog import read_meta, read_records


class Kept(Logger):
    """A real logger that keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.rows = []

    name = version = "kept"

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


class Steps(Monitor):
    """Records nothing but the step."""

    kind = "precursors"

    def close_batch(self, trainer, module, outputs):
        if self.run.stepped and self.due:
            self.write(self.run.step, {"precursors/here": 1.0})


def steps(folder, kind="precursors"):
    return [row.step for row in read_records(folder / "stability").of(kind)]


@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_one_record_per_optimizer_step_under_accumulation(tmp_path, accumulate):
    run = tiny.trainer(tmp_path, [Steps()], accumulate_grad_batches=accumulate, max_steps=3)
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(12))
    assert steps(tmp_path) == [0, 1, 2]


def test_due_is_counted_as_lightnings_log_every_n_steps(tmp_path):
    run = tiny.trainer(tmp_path, [Steps(every_n_steps=3)], max_steps=8)
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(12))
    assert steps(tmp_path) == [2, 5]


@pytest.mark.parametrize("every", [3, 4])
def test_a_run_that_ends_before_the_first_due_step_says_so(tmp_path, caplog, every):
    run = tiny.trainer(tmp_path, [LossMonitor(), Steps(every_n_steps=every)], max_steps=3)
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(3))
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("stabilitykit")]
    assert ours == [
        "Steps: training ended after 3 steps, before the first that is due (every_n_steps = 4); "
        "nothing was recorded"
    ] * (every == 4)


def test_a_short_last_accumulation_is_a_step_too(tmp_path):
    run = tiny.trainer(tmp_path, [Steps()], accumulate_grad_batches=4, max_epochs=1)
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(6))
    assert steps(tmp_path) == [0, 1]


class TwoOptimizers(LightningModule):
    """Manual optimisation: two optimizers step in one batch, and only in every second batch."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.model = tiny.Model()

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.manual_backward(loss)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.model.blocks.parameters(), 0.1),
            torch.optim.SGD(self.model.head.parameters(), 0.1),
        ]


def test_two_optimizers_do_not_confuse_the_step(tmp_path):
    run = tiny.trainer(tmp_path, [Steps(), LossMonitor()], max_epochs=2)
    run.fit(TwoOptimizers(), tiny.batches(6))
    assert run.global_step == 12  # Lightning counts every optimizer's steps
    assert steps(tmp_path) == steps(tmp_path, "loss") == [0, 1, 2, 3, 4, 5]


def test_sanity_validation_is_no_step(tmp_path):
    run = tiny.trainer(
        tmp_path,
        [Steps(), LossMonitor()],
        max_steps=4,
        num_sanity_val_steps=2,
        val_check_interval=2,
    )
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(4), tiny.batches(2))
    assert steps(tmp_path) == steps(tmp_path, "loss") == [0, 1, 2, 3]


def test_every_logger_gets_one_dict_per_step_in_order(tmp_path):
    loggers = [Kept(), CSVLogger(tmp_path), Kept()]
    run = tiny.trainer(tmp_path, [Steps(), LossMonitor(), AttentionMonitor(2)], max_steps=5, logger=loggers)
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(6))
    ours = [(step, row) for step, row in loggers[0].rows if "loss/value" in row]
    assert [step for step, _ in ours] == [0, 1, 2, 3, 4]
    assert loggers[2].rows == loggers[0].rows
    folder = next(tmp_path.rglob("records.jsonl")).parent
    for step, row in ours:
        merged = {}
        for record in read_records(folder).rows:
            merged |= record.values if record.step == step else {}
        assert row == merged
    assert "attention/rel_l2" in ours[1][1]
    assert "attention/rel_l2" not in ours[0][1]
    assert "loss/value" in next(tmp_path.rglob("metrics.csv")).read_text()


def test_the_run_states_its_own_cost(tmp_path):
    run = tiny.trainer(tmp_path, [LossMonitor(), AttentionMonitor(2)], max_steps=4)
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(4))
    values = read_records(tmp_path / "stability").of("overhead")[-1].values
    parts = values["overhead/loss_percent"] + values["overhead/attention_percent"]
    assert values["overhead/total_percent"] == pytest.approx(parts)
    assert values["overhead/loss_percent"] > 0
    assert values["overhead/attention_percent"] > 0


def test_a_fresh_run_never_appends_to_anothers(tmp_path):
    for _ in range(2):
        run = tiny.trainer(tmp_path, [Steps()], max_steps=2)
        run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(4))
    assert [len(read_records(tmp_path / name).of("precursors")) for name in ("stability", "stability-1")] == [
        2,
        2,
    ]


def interrupted(folder, callbacks, at, total, **options):
    """Trains to `at`, checkpoints, and resumes in a new Trainer to `total`."""
    module = tiny.module_class("pytorch_lightning")
    save = ModelCheckpoint(folder / "ckpt", every_n_train_steps=at, save_top_k=-1, filename="at")
    first = tiny.trainer(folder, [*callbacks(), save], max_steps=at, enable_checkpointing=True, **options)
    first.fit(module(), tiny.batches(total * 4))
    second = tiny.trainer(folder / "elsewhere", callbacks(), max_steps=total, **options)
    second.fit(module(), tiny.batches(total * 4), ckpt_path=folder / "ckpt" / "at.ckpt")
    return second


def test_a_resume_continues_folder_step_and_attempt(tmp_path):
    with pytest.warns(UserWarning, match="mid-epoch|resum|resumed|checkpoint"):
        interrupted(tmp_path, lambda: [Steps()], 3, 6)
    records = read_records(tmp_path / "stability").of("precursors")
    assert [(r.step, r.attempt) for r in records] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 2),
    ]
    attempts = read_meta(tmp_path / "stability")["attempts"]
    assert [(row["attempt"], row["resumed_at"]) for row in attempts] == [(1, None), (2, 3)]


@pytest.mark.parametrize("kinds", [[Steps, LossMonitor], [LossMonitor, Steps]])
def test_a_folder_that_is_gone_is_said_and_replaced(tmp_path, kinds):
    import shutil

    module = tiny.module_class("pytorch_lightning")
    first = tiny.trainer(tmp_path / "a", [kind() for kind in kinds], max_steps=2)
    first.fit(module(), tiny.batches(4))
    first.save_checkpoint(tmp_path / "at.ckpt")
    shutil.rmtree(tmp_path / "a" / "stability")
    second = tiny.trainer(tmp_path / "b", [kind() for kind in kinds], max_steps=4)
    with pytest.warns(UserWarning, match="run folder of the checkpoint is gone"):
        second.fit(module(), tiny.batches(4), ckpt_path=tmp_path / "at.ckpt")
    assert steps(tmp_path / "b") == [2, 3]


def test_a_checkpoint_without_monitors_can_be_watched_from_there_on(tmp_path):
    module = tiny.module_class("pytorch_lightning")
    first = tiny.trainer(tmp_path, max_steps=2)
    first.fit(module(), tiny.batches(4))
    first.save_checkpoint(tmp_path / "at.ckpt")
    second = tiny.trainer(tmp_path, [Steps()], max_steps=4)
    second.fit(module(), tiny.batches(4), ckpt_path=tmp_path / "at.ckpt")
    assert steps(tmp_path) == [2, 3]


@pytest.mark.parametrize("every", [0, -5])
def test_a_cadence_below_one_is_refused(every):
    with pytest.raises(ValueError, match=f"AttentionMonitor: expected every_n_steps >= 1, got {every}"):
        AttentionMonitor(every_n_steps=every)


def test_two_monitors_of_one_kind_are_refused(tmp_path):
    class Mine(Steps):
        pass

    run = tiny.trainer(tmp_path, [Steps(), Mine()], max_steps=1)
    with pytest.raises(ValueError, match=r"one monitor of each kind .* got \['Steps', 'Mine'\]"):
        run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(2))


def test_a_disk_that_fails_does_not_end_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    run = tiny.trainer(tmp_path / "file" / "below", [LossMonitor()], max_steps=3)
    with pytest.warns(UserWarning, match="records are not kept on disk, training goes on"):
        run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(4))
    assert run.global_step == 3


def test_meta_tells_versions_devices_and_settings(tmp_path):
    run = tiny.trainer(tmp_path, [AttentionMonitor(every_n_steps=7)], max_steps=7)
    run.fit(tiny.module_class("pytorch_lightning")(), tiny.batches(8))
    meta = read_meta(tmp_path / "stability")
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["devices"]["world_size"] == 1
    assert meta["config"]["monitors"]["AttentionMonitor"]["every_n_steps"] == 7


def test_both_callback_classes_are_served():
    import lightning.pytorch
    import pytorch_lightning

    assert isinstance(LossMonitor(), pytorch_lightning.Callback)
    assert isinstance(LossMonitor(), lightning.pytorch.Callback)


def test_other_stages_are_left_alone(tmp_path):
    module = tiny.module_class("pytorch_lightning")()
    run = tiny.trainer(tmp_path, [LossMonitor(), AttentionMonitor()])
    run.validate(module, tiny.batches(2), verbose=False)
    assert not (tmp_path / "stability").exists()
    assert LossMonitor().state_dict() == {}
