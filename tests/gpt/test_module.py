import math

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.cli import LightningCLI

from stabilitykit.gpt.corpus import batch
from stabilitykit.gpt.module import GPTModule, TextData, learning_rate_factor

CONTEXT, ROWS, STEPS = 8, 2, 12


class Witness(pl.Callback):
    """What training saw: each batch's first tokens and each loss, as exact numbers."""

    def __init__(self):
        self.batches, self.losses = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch[0].flatten().tolist())
        self.losses.append(outputs["loss"].item())


def corpus_file(folder, epoch_batches: int):
    """Text whose training half takes `epoch_batches` batches to read once."""
    train = epoch_batches * CONTEXT * ROWS
    path = folder / "corpus.txt"
    letters = np.random.default_rng(0).integers(97, 123, size=train + 40, dtype=np.uint8)
    path.write_bytes(letters.tobytes())
    return {"path": str(path), "validation_fraction": 39.5 / (train + 40)}


def run(corpus, folder, *, resume=None, callbacks=(), **trainer) -> tuple[Witness, GPTModule]:
    pl.seed_everything(1, verbose=False)
    module = GPTModule(
        context=CONTEXT,
        layers=1,
        heads=2,
        width=8,
        warmup_steps=3,
        dropout=0.1,
        learning_rate=1e-2,
        decay_steps=STEPS,
    )
    data = TextData(**corpus, batch_size=ROWS, context=CONTEXT, validation_batches=2)
    witness = Witness()
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "max_steps": STEPS,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": bool(callbacks),
            "callbacks": [witness, *callbacks],
            "default_root_dir": folder,
            **trainer,
        }
    )
    trainer.fit(module, data, ckpt_path=resume)
    assert trainer.global_step == STEPS
    return witness, module


# Lightning warns of a resume without the callback that wrote the checkpoint.
RESUMING = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


def check_resumes(corpus, folder, saver, names, **how) -> None:
    """Runs whole, then again from each checkpoint: batches, losses, final weights are the same."""
    whole, module = run(corpus, folder, callbacks=[saver], **how)
    for name in names:
        path = folder / "checkpoints" / f"{name}.ckpt"
        resumed, again = run(corpus, folder, resume=path, **how)
        seen = len(whole.batches) - len(resumed.batches)
        assert seen > 0
        assert resumed.batches == whole.batches[seen:]
        assert resumed.losses == whole.losses[seen:]
        for ours, theirs in zip(module.parameters(), again.parameters(), strict=True):
            assert torch.equal(ours, theirs)


@RESUMING
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("epoch_batches", "how"),
    [
        (100, {}),
        (4, {}),
        (5, {}),
        (10, {"val_check_interval": 2}),
        (4, {"limit_train_batches": 3}),
        (4, {"reload_dataloaders_every_n_epochs": 1}),
    ],
)
def test_a_resume_is_exact(tmp_path, accumulate, epoch_batches, how):
    """From steps in mid-epoch and at an epoch's end, with dropout."""
    saver = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, every_n_train_steps=1, filename="{step}")
    names = [f"step={step}" for step in (4, 5)]
    how = {"accumulate_grad_batches": accumulate, **how}
    check_resumes(corpus_file(tmp_path, epoch_batches), tmp_path, saver, names, **how)


@RESUMING
@pytest.mark.parametrize("limit", [{}, {"max_steps": -1, "max_epochs": 3}])
def test_a_resume_from_the_end_of_an_epoch_is_exact(tmp_path, limit):
    saver = ModelCheckpoint(
        tmp_path / "checkpoints", save_top_k=-1, save_on_train_epoch_end=True, filename="{epoch}"
    )
    check_resumes(corpus_file(tmp_path, 4), tmp_path, saver, ["epoch=0", "epoch=1"], **limit)


def test_epochs_go_on_through_the_batches(tmp_path):
    corpus = corpus_file(tmp_path, 4)
    witness, _ = run(corpus, tmp_path, val_check_interval=2)
    data = TextData(**corpus, batch_size=ROWS, context=CONTEXT)
    data.setup("fit")
    loader = data.train_dataloader()
    assert len(loader) == 4
    assert witness.batches == [loader[i][0].flatten().tolist() for i in range(STEPS)]
    assert len({str(row) for row in witness.batches}) == STEPS


def test_validation_sees_the_same_batches_each_time(tmp_path):
    class ValidationWitness(pl.Callback):
        def __init__(self):
            self.batches = []

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.batches.append(batch[0].flatten().tolist())

    seen = ValidationWitness()
    run(corpus_file(tmp_path, 6), tmp_path, callbacks=[seen], enable_checkpointing=False)
    assert len(seen.batches) == 2 * 3  # sanity check, and after each of two epochs
    assert seen.batches[:2] == seen.batches[2:4] == seen.batches[4:]


def test_ranks_share_out_the_batch(tmp_path):
    corpus = corpus_file(tmp_path, 8)

    def loader(rank, world, rows):
        data = TextData(**corpus, batch_size=rows, context=CONTEXT)
        data.setup("fit")
        # Lightning would set these; two processes would only make the test slow.
        data.trainer = type("Rank", (), {"global_rank": rank, "world_size": world})()
        data.trainer.fit_loop = type("Loop", (), {"total_batch_idx": 6})
        return data.train_dataloader()

    whole = next(iter(loader(0, 1, 4)))
    parts = [next(iter(loader(rank, 2, 2))) for rank in range(2)]
    assert len(loader(0, 1, 4)) == len(loader(0, 2, 2))
    assert torch.equal(whole[0], torch.cat([inputs for inputs, _ in parts]))
    assert torch.equal(
        whole[0], batch(loader(0, 1, 4).tokens, seed=0, index=7, batch_size=4, context=CONTEXT)[0]
    )


def test_learning_rate_by_hand_and_as_lightning_steps_it(tmp_path):
    assert [learning_rate_factor(s, 0, 4) for s in (0, 2, 4, 5)] == [1.0, 0.55, 0.1, 0.1]
    assert learning_rate_factor(7, 3, 3, 0.5) == 0.5

    class Rates(pl.Callback):
        def __init__(self):
            self.seen = []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.seen.append([group["lr"] for group in optimizer.param_groups])

    rates = Rates()
    run(
        corpus_file(tmp_path, 5),
        tmp_path,
        callbacks=[rates],
        enable_checkpointing=False,
        accumulate_grad_batches=2,
    )
    expected = [1e-2 * learning_rate_factor(step, 3, STEPS) for step in range(STEPS)]
    assert rates.seen == [[rate, rate] for rate in expected]


def test_matrices_decay_and_vectors_do_not():
    module = GPTModule(layers=1, width=8, heads=2, tied_head=False, decay_steps=9, weight_decay=0.3)
    module.trainer = pl.Trainer(logger=False, enable_checkpointing=False, max_steps=5)
    decayed, plain = module.configure_optimizers()["optimizer"].param_groups
    assert decayed["weight_decay"] == 0.3
    assert plain["weight_decay"] == 0
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert all(p.dim() == 1 for p in plain["params"])
    ours = {id(p) for p in module.parameters()}
    assert ours == {id(p) for p in decayed["params"] + plain["params"]}


def test_a_decay_without_an_end_is_named():
    module = GPTModule(layers=1, width=8, heads=2)
    module.trainer = pl.Trainer(logger=False, enable_checkpointing=False, max_epochs=1)
    with pytest.raises(ValueError, match="expected decay_steps, or a trainer with max_steps"):
        module.configure_optimizers()


def test_it_learns_and_counts_z_loss(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("abcdefgh" * 500)
    pl.seed_everything(1, verbose=False)
    module = GPTModule(
        context=16, layers=1, heads=2, width=32, learning_rate=1e-2, warmup_steps=5, z_loss=1e-3
    )
    witness = Witness()
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=60,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[witness],
        val_check_interval=50,
    )
    trainer.fit(module, TextData(str(text), batch_size=4, context=16, validation_batches=2))
    assert witness.losses[0] == pytest.approx(math.log(256) + 1e-3 * math.log(256) ** 2, abs=0.1)
    assert trainer.callback_metrics["val_loss"] < 0.2
    assert trainer.callback_metrics["train_loss"] < witness.losses[-1]  # which has the z-loss


# Lightning 2.6 calls jsonargparse in a way that jsonargparse 4.4x deprecates.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.context=8"], "model context of at least the data's 16, got 8"),
        (["--model.vocab_size=100"], "model vocab_size of at least the corpus's 256, got 100"),
        (["--data.path=nowhere"], "expected a corpus at nowhere"),
        (["--data.context=4000"], "expected more than 4000 tokens"),
        (["--data.batch_size=0"], "expected batch_size >= 1, got 0"),
    ],
)
def test_what_does_not_fit_is_named_before_training(tmp_path, monkeypatch, arguments, message):
    (tmp_path / "a.txt").write_text("text " * 500)
    quiet = ["logger=false", "enable_checkpointing=false", "accelerator=cpu", "max_steps=1"]
    # LightningCLI warns of an args beside a command line, here pytest's own.
    monkeypatch.setattr("sys.argv", ["stabilitykit"])
    with pytest.raises(ValueError, match=message):
        LightningCLI(
            subclass_mode_model=True,
            subclass_mode_data=True,
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            save_config_callback=None,
            args=[
                "fit",
                *(f"--trainer.{setting}" for setting in quiet),
                "--model=stabilitykit.gpt.module.GPTModule",
                "--model.context=16",
                "--data=stabilitykit.gpt.module.TextData",
                "--data.context=16",
                f"--data.path={tmp_path / 'a.txt'}",
                *arguments,
            ],
        )
