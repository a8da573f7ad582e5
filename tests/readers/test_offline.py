"""W&B's local file, written by W&B itself in offline mode."""

import math
import subprocess
import sys

import pytest

from stabilitykit.readers.losses import read_losses

WRITE = """
import sys, wandb
quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True)
run = wandb.init(mode="offline", dir=sys.argv[1], project="p", settings=quiet)
for i in range(1200):
    value = float("nan") if i == 1100 else 3 + i / 1000
    run.log({"text": "x" * 70, "train/loss": value, "nested": {"lr": 0.5}, "trainer/global_step": 10 * i + 9})
    if i % 100 == 0:
        run.log({"val_loss": 4.0, "trainer/global_step": 10 * i + 9})
run.finish()
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    subprocess.run([sys.executable, "-c", WRITE, str(folder)], check=True, capture_output=True, timeout=120)
    return folder


@pytest.mark.slow
def test_the_history_of_an_offline_run(run_folder):
    losses = read_losses(run_folder)
    rows = list(losses.rows)
    assert (losses.loss_column, losses.step_column) == ("train/loss", "trainer/global_step")
    assert [row for row in rows if row[0] != 11009] == [
        (10 * i + 9, 3 + i / 1000) for i in range(1200) if i != 1100
    ]
    assert math.isnan(rows[1100][1])
    assert losses.problems == []
    (file,) = run_folder.rglob("*.wandb")
    assert file.stat().st_size > 2 * 32768  # records that straddle the blocks of the file are among them
    assert next(read_losses(file, loss="nested.lr").rows) == (9, 0.5)
    with pytest.raises(ValueError, match="'nested.lr'"):
        read_losses(file, loss="none")


@pytest.mark.slow
def test_a_run_killed_while_it_wrote(run_folder, tmp_path):
    (file,) = run_folder.rglob("*.wandb")
    whole = file.read_bytes()
    (tmp_path / "run-x.wandb").write_bytes(whole[: len(whole) // 2])
    losses = read_losses(tmp_path / "run-x.wandb")
    assert 400 < len(list(losses.rows)) < 800
    assert losses.problems == ["run-x.wandb: the last row is torn and was skipped"]


def test_a_foreign_file_is_one_line(tmp_path):
    (tmp_path / "run-x.wandb").write_bytes(b"step,loss\n1,2\n")
    with pytest.raises(ValueError, match="expected a W&B run"):
        read_losses(tmp_path / "run-x.wandb")
