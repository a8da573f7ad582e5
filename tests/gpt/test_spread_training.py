"""The recipe's model in a real Trainer, its sequences spread over two gloo ranks, all in one start-up."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint

import tiny
from stabilitykit import LossMonitor, PrecursorMonitor
from stabilitykit.gpt.module import GPTModule, TextData
from stabilitykit.parallel.layout import LAYOUTS
from stabilitykit.runlog import read_records
from torchrun import on_two_ranks

RECIPE = Path(__file__).parents[2] / "recipes/gpt-long-striped.yaml"
STEPS, SAVED, CONTEXT = 20, 10, 62  # which zigzag over two ranks must pad

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The folder of all runs, and what each rank, and one rank alone, tells of them."""
    folder = tmp_path_factory.mktemp("spread")
    letters = np.random.default_rng(0).choice(list(b"aaaaeeeinst "), size=4000)
    (folder / "text.txt").write_bytes(letters.astype(np.uint8).tobytes())
    torch.set_num_threads(1)
    alone = train(folder, "alone", attention="local")
    on_two_ranks(__file__, folder)
    return folder, alone, [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_have_one_ranks_loss_curve(told, layout):
    _, alone, ranks = told
    curve = alone["losses"]
    assert len(curve) == STEPS and curve[-1] < curve[0] - 1
    np.testing.assert_allclose(ranks[0][layout]["losses"], curve, rtol=0, atol=1e-5)
    for rank in ranks:
        for name in ("train_loss", "val_loss"):
            np.testing.assert_allclose(rank[layout][name], alone[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_weights_stay_equal(told, layout):
    folder, _, ranks = told
    assert ranks[0][layout]["weights"] == ranks[1][layout]["weights"]
    assert not read_records(folder / layout / "stability").of("event")


def test_a_resume_is_exact(told):
    folder, _, ranks = told
    whole, resumed = ranks[0]["striped"], ranks[0]["resumed"]
    assert resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]
    attempts = [row.attempt for row in read_records(folder / "striped" / "stability").of("loss")]
    assert attempts == [1] * SAVED + [2] * (STEPS - SAVED)


def test_a_bad_batchs_windows_are_listed_once(told):
    _, alone, ranks = told
    assert ranks[0]["striped"]["samples"] == alone["samples"]
    assert len(alone["samples"]) == 2


def test_without_a_ring_each_rank_still_has_its_own_batches(told):
    _, alone, ranks = told
    assert len(set(ranks[0]["local"]["samples"])) == 2 * len(alone["samples"])


def train(folder, case, *, attention, resume=None):
    """Trains the recipe's model at reduced size; what this rank saw, with the losses recorded so far."""
    pl.seed_everything(1, verbose=False)
    sizes = {"context": CONTEXT, "width": 32, "warmup_steps": 5, "decay_steps": STEPS, "learning_rate": 1e-2}
    recipe = yaml.safe_load(RECIPE.read_text())["model"]["init_args"]
    module = GPTModule(**{**recipe, **sizes, "attention": attention})
    data = TextData(str(folder / "text.txt"), batch_size=2, context=CONTEXT, validation_batches=2)
    monitor, saver = (
        LossMonitor(),
        ModelCheckpoint(folder / case, "{step}", every_n_train_steps=SAVED, save_top_k=-1),
    )
    parity = PrecursorMonitor(5, parity_every_n_steps=5)
    trainer = tiny.trainer(
        folder / case,
        [monitor, parity, saver],
        enable_checkpointing=True,
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy="ddp" if "WORLD_SIZE" in os.environ else "auto",
        max_steps=STEPS,
        val_check_interval=STEPS,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, data, ckpt_path=resume)
    monitor._bad.add(STEPS - 1, STEPS - 1, "spike", trainer.train_dataloader)
    records = read_records(monitor.run.folder)
    return {
        "losses": [row.values["loss/value"] for row in records.of("loss")],
        "train_loss": trainer.callback_metrics["train_loss"].item(),
        "val_loss": trainer.callback_metrics["val_loss"].item(),
        "weights": repr([p.tolist() for p in module.parameters()]),
        "samples": monitor._bad.listed.entries[-1]["samples"],
    }


def two_ranks(folder):
    """Run on each of two gloo ranks."""
    torch.set_num_threads(1)
    found = {layout: train(folder, layout, attention=layout) for layout in (*LAYOUTS, "local")}
    halfway = folder / "striped" / f"step={SAVED}.ckpt"
    found["resumed"] = train(folder, "resumed", attention="striped", resume=halfway)
    (folder / f"told-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
