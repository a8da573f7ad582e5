"""Every recipe parses, is commented, and runs; the planted batch is found and nothing else."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stabilitykit.cli import main
from stabilitykit.runlog import read_records

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def short(folder, steps, *more):
    return [
        f"--trainer.default_root_dir={folder}",
        "--trainer.logger=false",
        "--trainer.enable_progress_bar=false",
        f"--trainer.max_steps={steps}",
        *more,
    ]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_key_of_a_recipe_is_commented(recipe):
    lines = recipe.read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\s*(- )?[a-z_]+:", line) and line.strip() != "init_args:":
            assert "#" in line or lines[number - 1].strip().startswith("#"), f"{recipe.name}: {line}"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    smaller = ["--trainer.limit_val_batches=1", "--trainer.enable_checkpointing=false"]
    callbacks = ["--trainer.callbacks=[]", "--trainer.callbacks+=stabilitykit.LossMonitor"]
    callbacks += ["--trainer.callbacks+=stabilitykit.AttentionMonitor", "--trainer.callbacks.every_n_steps=2"]
    argv = ["fit", "--config", str(recipe), *callbacks, *short(tmp_path, 3, *smaller)]
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert f"report: {tmp_path}/stability/report.html" in told
    records = read_records(tmp_path / "stability")
    assert [record.step for record in records.of("loss")] == [0, 1, 2]
    layers = records.of("attention")[0].detail["layers"]
    assert len(layers) >= 4
    assert all(row["dtype"] == "bfloat16" for row in layers.values())


def start(folder, *more):
    argv = [sys.executable, "-m", "stabilitykit.cli", "fit", "--config", str(ROOT / "recipes/gpt-nano.yaml")]
    small = ["--model.init_args.layers=2", "--model.init_args.width=32", "--data.init_args.batch_size=2"]
    small += ["--data.init_args.context=32", "--model.init_args.context=32"]
    small += ["--trainer.val_check_interval=1000000", "--trainer.num_sanity_val_steps=0"]
    callbacks = ["--trainer.callbacks=[]", "--trainer.callbacks+=stabilitykit.LossMonitor"]
    callbacks += ["--trainer.callbacks+=stabilitykit.AttentionMonitor", "--trainer.callbacks.every_n_steps=7"]
    callbacks += ["--trainer.callbacks+=ModelCheckpoint", f"--trainer.callbacks.dirpath={folder}/ckpt"]
    callbacks += ["--trainer.callbacks.every_n_train_steps=20", "--trainer.callbacks.save_top_k=-1"]
    return subprocess.Popen(
        [*argv, *small, *callbacks, *short(folder, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def finished(process):
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out[-3000:]


@pytest.mark.slow
def test_a_killed_run_loses_nothing_and_its_resume_continues_the_curve_exactly(tmp_path):
    finished(start(tmp_path / "whole", 120))
    victim = start(tmp_path / "cut", 100_000)
    log = tmp_path / "cut" / "stability" / "records.jsonl"
    deadline = time.monotonic() + 240
    while not log.is_file() or log.read_text().count('"kind":"loss"') < 50:
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()

    before = read_records(log.parent)
    seen = [record.step for record in before.of("loss")]
    assert seen == list(range(len(seen)))
    assert len(seen) >= 50
    saved = max((tmp_path / "cut" / "ckpt").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    steps_done = int(re.search(r"step=(\d+)", saved.name).group(1))
    assert seen[-1] >= steps_done - 2  # all but the last completed step, whose loss is read one step late

    finished(start(tmp_path / "cut", 120, f"--ckpt_path={saved}"))
    whole, cut = (read_records(tmp_path / name / "stability") for name in ("whole", "cut"))
    assert {record.attempt for record in cut.of("loss")} == {1, 2}
    for kind in ("loss", "attention"):
        expected = [(record.step, record.values) for record in whole.of(kind) if record.step < 120]
        assert [(r.step, r.values) for r in cut.of(kind) if r.step < 120] == expected
    assert cut.problems == []


@pytest.mark.slow
def test_the_planted_batch_is_found_and_nothing_else(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = ROOT / "recipes/zoo/bad-batch.yaml"
    planted = int(re.search(r"at_batch: (\d+)", recipe.read_text()).group(1))
    assert main(["fit", "--config", str(recipe), f"--trainer.default_root_dir={tmp_path}",
                 "--trainer.logger=false", "--trainer.enable_progress_bar=false"]) == 0  # fmt: skip
    told = capsys.readouterr().out
    assert re.search(r"report: .*report\.html", told)
    records = read_records(tmp_path / "stability")
    opened = [record.detail for record in records.of("event") if record.detail["end"] is None]
    assert len(opened) == 1
    assert planted <= opened[0]["start"] <= planted + 2
    losses = [record.values["loss/value"] for record in records.of("loss")]
    assert sum(losses[-20:]) / 20 < 0.6 * losses[0]
