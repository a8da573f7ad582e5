"""The command an event ends with: it is run here as it stands."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import ModelCheckpoint

import tiny
from stabilitykit import LossMonitor
from stabilitykit.callbacks.resume import Resume
from stabilitykit.cli import main
from stabilitykit.faults import PlantedBatch
from stabilitykit.gpt.module import GPTModule, TextData
from stabilitykit.runlog import read_records


def saved(folder, resume, step, callback):
    """A checkpoint callback writes a file for the step, as a Trainer's does, and `resume` looks."""
    path = folder / f"{step}.ckpt"
    path.write_text("")
    callback.best_k_models[str(path)] = 0.0
    resume.saving(step)
    resume.look(SimpleNamespace(checkpoint_callbacks=[callback]))
    return path


def test_the_last_checkpoint_a_hundred_steps_before_that_is_still_there(tmp_path):
    resume, callback = Resume(), SimpleNamespace(best_k_models={}, last_model_path="")
    paths = {step: saved(tmp_path, resume, step, callback) for step in (100, 200, 300, 400)}
    assert resume.checkpoint(450) == str(paths[300])
    assert resume.checkpoint(399) == str(paths[200])
    assert resume.checkpoint(400) == str(paths[300])
    assert resume.checkpoint(199) is None
    paths[300].unlink()
    assert resume.checkpoint(450) == str(paths[200])


def test_a_file_that_is_written_again_holds_the_later_step(tmp_path):
    last = tmp_path / "last.ckpt"
    resume, callback = Resume(), SimpleNamespace(best_k_models={}, last_model_path=str(last))
    for step in (100, 200):
        last.write_text(str(step))
        resume.saving(step)
        resume.look(SimpleNamespace(checkpoint_callbacks=[callback]))
    assert resume.steps == {str(last): 200}
    resume.look(SimpleNamespace(checkpoint_callbacks=[callback]))
    assert resume.steps == {str(last): 200}


def test_without_a_recipe_the_words_say_what_to_do(tmp_path):
    resume = Resume()
    assert resume.advice(150, None) == (
        "(no checkpoint 100 or more steps before step 150 is known) trainer.fit(model, data) with data that "
        "leaves out the batches of that step"
    )
    path = saved(tmp_path, resume, 50, SimpleNamespace(best_k_models={}, last_model_path=""))
    assert resume.advice(150, tmp_path / "skip.json") == (
        f"trainer.fit(model, data, ckpt_path='{path}') with data that leaves out '{tmp_path / 'skip.json'}' "
        "(stabilitykit.SkippingBatchSampler)"
    )


def test_the_option_reaches_data_inside_other_data():
    def started(data):
        resume = Resume()
        recipe = SimpleNamespace(parser=SimpleNamespace(prog="stabilitykit fit"), config_filename="c.yaml")
        trainer = SimpleNamespace(callbacks=[recipe], log_dir="runs", datamodule=data, ckpt_path=None)
        resume.start(trainer, 0)
        return resume.advice(150, Path("skip.json")).partition("known) ")[2]

    command = "stabilitykit fit --config runs/c.yaml"
    planted = PlantedBatch(TextData(), at_batch=3)
    assert started(TextData()) == f"{command} --data.init_args.skip_list skip.json"
    assert started(planted) == f"{command} --data.init_args.data.init_args.skip_list skip.json"
    assert started(object()).startswith("trainer.fit(model, data) with data that leaves out 'skip.json'")


RECIPE = """
seed_everything: 1
trainer:
  accelerator: cpu
  max_steps: 150
  limit_val_batches: 0
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: {folder}
  logger:
    class_path: pytorch_lightning.loggers.CSVLogger
    init_args: {{save_dir: {folder}}}
  callbacks:
    - class_path: stabilitykit.LossMonitor
    - class_path: pytorch_lightning.callbacks.ModelCheckpoint
      init_args: {{every_n_train_steps: 20, save_top_k: -1}}
model:
  class_path: stabilitykit.gpt.module.GPTModule
  init_args: {{context: 8, layers: 1, heads: 2, width: 8}}
data:
  class_path: stabilitykit.gpt.module.TextData
  init_args: {{path: {folder}/a.txt, batch_size: 2, context: 8}}
"""


# Lightning 2.6 calls jsonargparse in a way that jsonargparse 4.4x deprecates.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_the_command_of_an_event_resumes_before_it_without_its_batches(tmp_path, monkeypatch, capfd):
    draw = torch.Generator().manual_seed(0)
    (tmp_path / "a.txt").write_bytes(bytes(torch.randint(97, 123, (4000,), generator=draw).tolist()))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    monkeypatch.setattr("sys.argv", ["stabilitykit"])
    data = TextData(str(tmp_path / "a.txt"), batch_size=2, context=8)
    data.setup("fit")
    planted, plain = 130, GPTModule.training_step
    poison_rows = data.train_dataloader()[planted][0]

    def poison(self, batch, batch_idx):
        loss = plain(self, batch, batch_idx)
        return loss * 4 if torch.equal(batch[0], poison_rows) else loss

    monkeypatch.setattr(GPTModule, "training_step", poison)
    assert main(["fit", "--config", str(tmp_path / "recipe.yaml")]) == 0
    run = tmp_path / "lightning_logs" / "version_0"
    opened = read_records(run / "stability").of("event")[0]
    assert (opened.step, opened.detail["kind"]) == (planted, "spike")
    words = shlex.split(opened.detail["resume"])
    assert words == [
        *("stabilitykit", "fit", "--config", str(run / "config.yaml")),
        *("--ckpt_path", str(run / "checkpoints" / "epoch=0-step=20.ckpt")),
        *("--data.init_args.skip_list", str(run / "stability" / "skip.json")),
    ]
    assert main(words[1:]) == 0
    again = read_records(run / "stability")
    assert {row.attempt for row in again.of("loss") if row.step >= 20} == {2}
    assert again.of("event") == []
    assert len(again.of("loss")) == 150
    capfd.readouterr()


class Scripted(LightningModule):
    """The loss of batch t is what the batch says."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        return batch.sum() + self.weight.sum() - self.weight.sum().detach()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainers_own_checkpoint_is_named(tmp_path):
    series = [2.5 + 0.1 * (step % 3) for step in range(140)]
    series[130] = 7.0
    save = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=25, save_top_k=-1, filename="{step}")
    trainer = tiny.trainer(tmp_path, [LossMonitor(), save], max_epochs=1, enable_checkpointing=True)
    trainer.fit(Scripted(), tiny.Loader(torch.tensor([value]) for value in series))
    event = read_records(tmp_path / "stability").of("event")[0].detail
    assert f"ckpt_path='{tmp_path / 'ckpt' / 'step=25.ckpt'}'" in event["resume"]
    assert event["message"].endswith(event["resume"])
