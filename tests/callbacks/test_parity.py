"""Replica parity: one flipped bit on one rank is named; healthy replicas say nothing."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import tiny
from ranks import ranks
from stabilitykit import PrecursorMonitor
from stabilitykit.callbacks.parity import Parity, checksums
from stabilitykit.runlog import read_records
from torchrun import on_two_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_a_checksum_is_the_sum_of_the_bits_and_any_flipped_one_changes_it(dtype):
    tensor = torch.randn(7, 3).to(dtype)
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    plain = sum(tensor.view(width).flatten().tolist())
    plain = (plain + 2**63) % 2**64 - 2**63  # an int64 wraps
    assert checksums([tensor, tensor.mT])[0].item() == plain
    assert checksums([tensor.mT])[0].item() == plain
    for bit in range(8 * dtype.itemsize - 1):
        other = tensor.clone()
        other.view(width)[2, 1] ^= 1 << bit
        gap = abs(checksums([other])[0].item() - plain)
        assert gap in (1 << bit, 2**64 - (1 << bit))


def flipped(rank, world, bad):
    """A case of tests/ranks.py: three checks, before the second of which `bad` flips a bit of its own."""
    weights = {"one": torch.ones(3, 2), "two": torch.zeros(4)}
    parity, told = Parity(), [None]
    told[0] = parity.check(9, weights)
    if rank == bad:
        weights["two"].view(torch.int32)[1] ^= 1 << 30
    told += [parity.check(19, weights), parity.check(29, weights)]
    weights["two"].zero_()
    again = Parity()
    again.load_state_dict(json.loads(json.dumps(parity.state_dict())))
    return [*told, again.check(39, weights)]


@pytest.mark.parametrize(("world", "bad"), [(2, 1), (3, 0), (3, 2)])
def test_a_flipped_bit_is_named_once_on_all_ranks_alike_and_closed(world, bad):
    answers = ranks(world).run(flipped, bad=bad)
    assert all(answer == answers[0] for answer in answers)
    healthy, opened, still, closed = answers[0]
    assert healthy is None and still is None
    assert (opened["kind"], opened["start"], opened["onset"], opened["end"]) == ("parity", 19, 10, None)
    (place,) = opened["places"]
    assert (place["rank"], place["device"]) == (bad, "cpu")
    assert place["host"]
    assert place["tensors"] == [{"tensor": "two", "bit": 30}]
    assert f"rank {bad} on {place['host']}, cpu: two (bit 30 of one number)" in opened["message"]
    assert ("or the other of the two ranks" in opened["message"]) == (world == 2)
    assert (closed["id"], closed["end"]) == (opened["id"], 39)


@pytest.mark.slow
def test_in_a_trainer_on_two_ranks_it_is_named_within_n_steps_and_numbers_are_of_all_ranks(tmp_path):
    on_two_ranks(__file__, tmp_path)
    records = read_records(tmp_path / "ddp" / "stability")
    (event,) = records.of("event")
    assert event.step == 8  # planted after step 6, looked at every third step
    assert [place["rank"] for place in event.detail["places"]] == [1]
    assert event.detail["places"][0]["tensors"][0]["tensor"] == "model.head.weight"
    # Each rank has half of the batches: the gradient is that of one process with all of them.
    torch.manual_seed(3)
    run = tiny.trainer(tmp_path / "whole", [PrecursorMonitor(1)], max_steps=1)
    both = [torch.cat(pair) for pair in zip(tiny.batch(0), tiny.batch(1), strict=True)]
    run.fit(tiny.module_class("pytorch_lightning")(dropout=0.0), tiny.Loader([both]))
    whole = read_records(tmp_path / "whole" / "stability").of("precursors")[0]
    half = records.of("precursors")[0]
    for key in ("grad_norm", "update_ratio", "max_weight", "rms"):
        assert half.values[f"precursors/{key}"] == pytest.approx(whole.values[f"precursors/{key}"], rel=1e-4)
    for key in ("entropy", "log_z"):
        assert half.values[f"precursors/{key}"] == pytest.approx(whole.values[f"precursors/{key}"], rel=1e-2)


def two_ranks(folder):
    """Run on each of two gloo ranks by the test above."""
    from pytorch_lightning import Callback

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)

    class Flip(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 6 and rank == 1:
                pl_module.model.head.weight.data.view(torch.int32)[0, 0] ^= 1 << 3

    def trained(name, batches, callbacks, **options):
        torch.manual_seed(3)
        run = tiny.trainer(folder / name, callbacks, max_steps=9, **options)
        run.fit(tiny.module_class("pytorch_lightning")(dropout=0.0), tiny.Loader(batches))

    mine = [tiny.batch(2 * step + rank) for step in range(9)]
    monitor = PrecursorMonitor(1, parity_every_n_steps=3)
    trained("ddp", mine, [monitor, Flip()], devices=2, strategy="ddp")


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
