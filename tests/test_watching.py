"""Law 1: watching changes nothing. Losses, final weights and the random stream are equal, bit for bit."""

import json
import sys
from pathlib import Path

import pytest
import torch

import stabilitykit
import tiny
from stabilitykit.runlog import read_records
from torchrun import on_two_ranks


def watches():
    """All monitors there are, due as often as they can be; twins in lockstep and in windows."""
    twins = {"lockstep": {"window": None}, "windowed": {"window": 1}}
    for name, window in twins.items():
        chosen = [*stabilitykit.monitors(), stabilitykit.WeightMonitor(1, floor_seeds=1, **window)]
        for monitor in chosen:
            monitor.every_n_steps = 1
        yield name, chosen


def trained(folder, callbacks, **options):
    torch.manual_seed(11)
    module = tiny.module_class("pytorch_lightning")(dropout=0.1)
    run = tiny.trainer(folder, callbacks, max_steps=6, gradient_clip_val=0.5, **options)
    run.fit(module, tiny.batches(24), tiny.batches(2))
    return module.losses, [p.detach().clone() for p in module.parameters()], torch.get_rng_state()


def equal(plain, watched):
    return (
        plain[0] == watched[0]
        and all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
        and torch.equal(plain[2], watched[2])
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_watching_changes_nothing(tmp_path, accumulate, precision):
    options = {"accumulate_grad_batches": accumulate, "precision": precision}
    plain = trained(tmp_path, [], **options)
    for name, monitors in watches():
        watched = trained(tmp_path / name, monitors, **options)
        kinds = {row.kind for row in read_records(tmp_path / name / "stability").rows}
        assert kinds == {"loss", "attention", "precursors", "weights", "overhead"}
        assert equal(plain, watched)


def test_the_comparison_can_fail(tmp_path):
    from pytorch_lightning import Callback

    class Touches(Callback):
        def on_train_batch_start(self, *_):
            torch.rand(1)

    assert not equal(trained(tmp_path, []), trained(tmp_path, [Touches()]))


@pytest.mark.slow
def test_watching_changes_nothing_on_two_ranks(tmp_path):
    on_two_ranks(__file__, tmp_path)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("told-*.json"))]
    assert len(told) == 2
    cases = [f"{name} {accumulate}" for accumulate in (1, 4) for name in ("lockstep", "windowed")]
    assert all(row == dict.fromkeys(cases, True) for row in told)
    assert read_records(tmp_path / "windowed4" / "stability").of("weights")


def two_ranks(folder):
    """Run on each of two gloo ranks by the test above: one start-up serves all cases."""
    import os

    rank, told = int(os.environ["RANK"]), {}
    torch.set_num_threads(1)
    for accumulate in (1, 4):
        options = {"accumulate_grad_batches": accumulate, "devices": 2, "strategy": "ddp"}
        plain = trained(folder / f"p{accumulate}", [], **options)
        for name, monitors in watches():
            watched = trained(folder / f"{name}{accumulate}", monitors, **options)
            told[f"{name} {accumulate}"] = equal(plain, watched)
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
