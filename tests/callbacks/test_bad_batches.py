"""Bad batches: which samples they had is listed, and data that is given the list does without them."""

import json
import math

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import tiny
from stabilitykit import LossMonitor, SkippingBatchSampler
from stabilitykit.gpt.module import TextData
from stabilitykit.runlog import read_records
from stabilitykit.skiplist import SkipList

ROWS, CONTEXT, BAD = 4, 8, 20


class Witness(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(batch)


class Allergic(LightningModule):
    """One weight; the loss is NaN when the batch has one of the poisonous rows, else 2.5."""

    def __init__(self, poison):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.poison = poison

    def training_step(self, batch, batch_idx):
        rows = batch["x"] if isinstance(batch, dict) else batch[0]
        bad = any(torch.equal(row, other) for row in rows for other in self.poison)
        return (1 + self.weight).sum() + (math.nan if bad else 0.5)

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def listed(folder):
    return json.loads((folder / "stability" / "skip.json").read_text())["skip"]


def corpus(folder):
    path = folder / "a.txt"
    draw = torch.Generator().manual_seed(0)
    path.write_bytes(bytes(torch.randint(97, 123, (4000,), generator=draw).tolist()))
    return str(path)


def text(folder, **options):
    return TextData(corpus(folder), batch_size=ROWS, context=CONTEXT, validation_batches=1, **options)


def windows(data, number):
    return data._batches("train").sample_ids(number)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("accumulate", [1, 4])
def test_text_names_its_windows_and_a_resume_does_without_them(tmp_path, accumulate):
    """Acceptance 7: what was skipped stays skipped, also by a second resume that is not told."""
    data = text(tmp_path)
    data.setup("fit")
    numbers = [accumulate * BAD + place for place in range(accumulate)]
    poison = [data._batches("train")[number][0][1] for number in numbers]
    expected = [window for number in numbers for window in windows(data, number)]
    options = {"accumulate_grad_batches": accumulate, "enable_checkpointing": True, "limit_val_batches": 0}

    def run(steps, data, resume=None):
        seen = Witness()
        save = ModelCheckpoint(
            tmp_path / f"to-{steps}", every_n_train_steps=5, save_top_k=-1, filename="{step}"
        )
        trainer = tiny.trainer(tmp_path, [LossMonitor(), seen, save], max_steps=steps, **options)
        trainer.fit(Allergic(poison), data, ckpt_path=resume)
        return [batch[0] for batch in seen.seen]

    first = run(30, data)
    entry = {"step": BAD, "reason": "nonfinite", "batches": numbers, "samples": expected}
    assert listed(tmp_path) == [entry]

    skip_list = str(tmp_path / "stability" / "skip.json")
    second = run(24, text(tmp_path, skip_list=skip_list), tmp_path / "to-30" / "step=15.ckpt")
    third = run(31, text(tmp_path), tmp_path / "to-24" / "step=20.ckpt")
    for rows in [*second, *third]:
        assert not any(torch.equal(row, bad) for row in rows for bad in poison)
    for seen, start in ((second, 15), (third, 20)):
        for place, rows in enumerate(seen, accumulate * start):
            if place < len(first):  # every window but the listed ones is what it was
                moved = [window for window in windows(data, place) if window in expected]
                changed = (rows != first[place]).any(1).sum()
                assert changed == len(moved), place
                assert changed == ROWS or place not in numbers
    assert listed(tmp_path) == [entry]
    kinds = [row.detail["kind"] for row in read_records(tmp_path / "stability").of("event")]
    assert kinds == []  # the last attempt had none


def test_skipped_windows_are_drawn_anew_alike_on_all_ranks(tmp_path):
    data = text(tmp_path)
    data.setup("fit")
    bad = frozenset(windows(data, 3))
    plain = data._batches("train", skipped=frozenset())
    skipping = data._batches("train", skipped=bad)
    assert not bad & {window for number in range(200) for window in skipping.sample_ids(number)}
    for number in range(200):
        for before, after in zip(plain.sample_ids(number), skipping.sample_ids(number), strict=True):
            assert before == after or before in bad


def test_a_list_for_other_data_is_refused(tmp_path):
    SkipList([{"step": 1, "reason": "spike", "batches": [1], "samples": ["a"]}]).write(tmp_path / "l.json")
    with pytest.raises(ValueError, match="expected places of windows in the skip list .*l.json, got 'a'"):
        text(tmp_path, skip_list=str(tmp_path / "l.json"))
    data = text(tmp_path)
    data.setup("fit")
    with pytest.raises(ValueError, match="expected a window that is not in the skip list, got all 3792"):
        data._batches("train", skipped=frozenset(range(4000)))[0]


class Named(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * 40

    def __getitem__(self, at):
        return {"x": torch.tensor([float(at)]), "sample_ids": f"doc-{at}"}


@pytest.mark.parametrize("where", ["the sampler", "the batch"])
def test_any_dataloader_can_say_and_skip(tmp_path, where):
    def loader(skip_list=None):
        draw = torch.Generator().manual_seed(5)
        if where == "the batch":
            return DataLoader(Named(), batch_size=4, shuffle=True, generator=draw)
        samples = TensorDataset(torch.arange(160).float()[:, None])
        batches = BatchSampler(RandomSampler(samples, generator=draw), 4, drop_last=True)
        return DataLoader(samples, batch_sampler=SkippingBatchSampler(batches, skip_list))

    def run(folder, skip_list=None):
        seen = Witness()
        trainer = tiny.trainer(folder, [LossMonitor(), seen], max_epochs=2)
        trainer.fit(Allergic([torch.tensor([77.0])]), loader(skip_list))
        values = [b["x"] if isinstance(b, dict) else b[0] for b in seen.seen]
        return [[int(value) for value in batch.flatten()] for batch in values]

    first = run(tmp_path)
    bad = [number for number, batch in enumerate(first) if 77 in batch]
    assert len(bad) == 2  # once an epoch
    got = listed(tmp_path)
    # The epochs are one event to the detector if they are close; its first batch is listed.
    assert got[0]["step"] == bad[0] and got[0]["batches"] == [bad[0]]
    names = [f"doc-{at}" for at in first[bad[0]]] if where == "the batch" else first[bad[0]]
    assert got[0]["samples"] == names
    if where == "the sampler":
        again = run(tmp_path / "again", tmp_path / "stability" / "skip.json")
        assert not set(got[0]["samples"]) & {sample for batch in again for sample in batch}
        assert len(again) == len(first)
        assert read_records(tmp_path / "again" / "stability").of("event") == []


def test_data_that_does_not_say_has_its_batches_listed_by_number(tmp_path):
    trainer = tiny.trainer(tmp_path, [LossMonitor()], max_epochs=1)
    rows = [[torch.tensor([[float(step)]])] for step in range(12)]
    trainer.fit(Allergic([torch.tensor([7.0])]), tiny.Loader(rows))
    assert listed(tmp_path) == [{"step": 7, "reason": "nonfinite", "batches": [7], "samples": None}]
    message = read_records(tmp_path / "stability").of("event")[0].detail["message"]
    assert "1 batch put in the skip list" in message
    assert message.endswith("trainer.fit(model, data) with data that leaves out the batches of that step")


def test_the_list_of_a_lost_folder_is_in_the_checkpoint(tmp_path):
    rows = tiny.Loader([[torch.tensor([[float(step)]])] for step in range(30)])
    save = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=10, save_top_k=-1, filename="{step}")
    first = tiny.trainer(tmp_path / "a", [LossMonitor(), save], max_steps=20, enable_checkpointing=True)
    first.fit(Allergic([torch.tensor([7.0])]), rows)
    (tmp_path / "a" / "stability").rename(tmp_path / "moved")
    second = tiny.trainer(tmp_path / "b", [LossMonitor()], max_steps=25)
    with pytest.warns(UserWarning, match="the run folder of the checkpoint is gone"):
        second.fit(Allergic([]), rows, ckpt_path=tmp_path / "ckpt" / "step=10.ckpt")
    assert listed(tmp_path / "b") == json.loads((tmp_path / "moved" / "skip.json").read_text())["skip"]
