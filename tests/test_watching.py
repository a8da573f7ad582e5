"""Law 1: watching changes nothing. Losses, final weights and the random stream are equal, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stabilitykit
import tiny


def every_monitor():
    """All monitors there are, due as often as they can be."""
    chosen = stabilitykit.monitors()
    for monitor in chosen:
        monitor.every_n_steps = 1
    return chosen


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
    watched = trained(tmp_path, every_monitor(), **options)
    assert (tmp_path / "stability" / "records.jsonl").stat().st_size > 0
    assert equal(plain, watched)


def test_the_comparison_can_fail(tmp_path):
    from pytorch_lightning import Callback

    class Touches(Callback):
        def on_train_batch_start(self, *_):
            torch.rand(1)

    assert not equal(trained(tmp_path, []), trained(tmp_path, [Touches()]))


@pytest.mark.slow
def test_watching_changes_nothing_on_two_ranks(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--standalone",
    ]
    run = subprocess.run(
        [*command, str(Path(__file__)), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("told-*.json"))]
    assert len(told) == 2
    assert all(row == {"1": True, "4": True} for row in told)
    record = json.loads((tmp_path / "w1" / "stability" / "records.jsonl").read_text().splitlines()[0])
    assert record["step"] == 0


def two_ranks(folder):
    """Run on each of two gloo ranks by the test above: one start-up serves all cases."""
    import os

    rank, told = int(os.environ["RANK"]), {}
    torch.set_num_threads(1)
    for accumulate in (1, 4):
        options = {"accumulate_grad_batches": accumulate, "devices": 2, "strategy": "ddp"}
        plain = trained(folder / f"p{accumulate}", [], **options)
        watched = trained(folder / f"w{accumulate}", every_monitor(), **options)
        told[str(accumulate)] = equal(plain, watched)
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
