"""Two gloo ranks: what one rank alone sees, all know, and all act on alike. One start-up for every case."""

import json
import math
import os
import platform
import sys
import time
from pathlib import Path

import pytest
import torch
from pytorch_lightning import LightningModule
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import tiny
from stabilitykit import LossMonitor, SkippingBatchSampler
from stabilitykit.runlog import read_records
from torchrun import on_two_ranks

STEPS, BAD, ROWS = 16, 12, 2
CASES = {
    "flag": {"factor": math.nan},
    "stop": {"factor": math.nan, "action": "stop"},
    "skip": {"factor": math.nan, "action": "skip"},
    "spike": {"factor": 9.0, "action": "skip"},
    "accumulated": {"factor": math.nan, "action": "skip", "accumulate": 2},
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The folder, and what both ranks tell of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    on_two_ranks(__file__, folder)
    ranks = [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(2)]
    return folder, ranks


pytestmark = pytest.mark.slow


def records(folder, case):
    return read_records(folder / case / "stability")


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_is_bad_on_rank_1_only_is_an_event_that_names_it(told, case):
    folder, ranks = told
    event = records(folder, case).of("event")[0]
    detail = event.detail
    assert event.step == BAD
    assert (detail["rank"], detail["host"]) == (1, platform.node())
    if math.isnan(CASES[case]["factor"]):
        assert detail["nonfinite_ranks"] == [{"rank": 1, "host": platform.node()}]
        assert f"; not finite on rank 1 of 2 ({platform.node()})" in detail["message"]
    assert max(ranks[rank][case]["took_s"] for rank in range(2)) < 30  # nobody waits for anybody


@pytest.mark.parametrize("case", CASES)
def test_both_ranks_do_the_same_at_the_same_step(told, case):
    folder, ranks = told
    assert ranks[0][case]["weights"] == ranks[1][case]["weights"]
    steps = BAD + 2 if case == "stop" else STEPS
    assert len(ranks[0][case]["weights"]) == len(records(folder, case).of("loss")) == steps
    unmoved = [a == b for a, b in zip(ranks[0][case]["weights"], ranks[0][case]["weights"][1:], strict=False)]
    if CASES[case].get("action") == "skip":
        assert [step + 1 for step, same in enumerate(unmoved) if same] == [BAD]


@pytest.mark.parametrize("case", CASES)
def test_the_samples_of_both_ranks_are_listed(told, case):
    folder, ranks = told
    (entry,) = json.loads((folder / case / "stability" / "skip.json").read_text())["skip"]
    accumulate = CASES[case].get("accumulate", 1)
    assert entry["batches"] == [BAD * accumulate + place for place in range(accumulate)]
    assert sorted(entry["samples"]) == sorted(ranks[0]["samples"][case] + ranks[1]["samples"][case])
    assert len(set(entry["samples"])) == 2 * ROWS * accumulate


def test_the_loss_is_weighted_by_the_tokens_of_each_rank(told):
    folder, ranks = told
    for row in records(folder, "skip").of("loss"):
        if row.step != BAD:
            losses = [ranks[rank]["losses"]["skip"][row.step] for rank in range(2)]
            expected = (losses[0] * 1 + losses[1] * 3) / 4
            assert row.values["loss/value"] == pytest.approx(expected, rel=1e-6)


class OnOneRank(LightningModule):
    """The loss of rank 1 alone is bad at one step; rank r's batches have 1 + 2 r tokens."""

    def __init__(self, factor, accumulate):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.factor, self.accumulate = factor, accumulate
        self.losses, self.samples, self.weights = [], [], []

    def training_step(self, batch, batch_idx):
        (rows,) = batch
        self.loss_tokens = 1 + 2 * self.global_rank
        loss = 2.5 + 0.01 * torch.sin(rows.float().mean()) + self.weight.square().mean()
        if batch_idx // self.accumulate == BAD:
            self.samples += rows.flatten().tolist()
            if self.global_rank == 1:
                loss = loss * self.factor
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, *_):
        if self.trainer.fit_loop.total_batch_idx % self.accumulate == self.accumulate - 1:
            self.weights.append(repr(self.weight.tolist()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def two_ranks(folder):
    """Run on each of two gloo ranks."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    told = {"samples": {}, "losses": {}}
    for case, what in CASES.items():
        accumulate = what.get("accumulate", 1)
        data = TensorDataset(torch.arange(2 * ROWS * STEPS * accumulate)[:, None])
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, seed=1)
        batches = SkippingBatchSampler(BatchSampler(sampler, ROWS, drop_last=True))
        module = OnOneRank(what["factor"], accumulate)
        options = {"devices": 2, "strategy": "ddp", "accumulate_grad_batches": accumulate}
        monitor = LossMonitor(action=what.get("action", "flag"))
        trainer = tiny.trainer(folder / case, [monitor], max_epochs=1, **options)
        started = time.monotonic()
        trainer.fit(module, DataLoader(data, batch_sampler=batches))
        told[case] = {"weights": module.weights, "took_s": time.monotonic() - started}
        told["samples"][case], told["losses"][case] = module.samples, module.losses
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
