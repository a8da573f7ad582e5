"""Every recipe parses, is commented, and runs; the planted batch is found and nothing else."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from stabilitykit.cli import main
from stabilitykit.gpt.module import GPTModule
from stabilitykit.runlog import find_folder, read_meta, read_records

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
LONG = [ROOT / f"recipes/gpt-long-{kind}.yaml" for kind in ("ring", "striped")]
ON_A_CPU = [recipe for recipe in RECIPES if recipe.stem != "gpt2-124m" and recipe not in LONG]


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


@pytest.mark.parametrize("recipe", ON_A_CPU, ids=lambda path: path.stem)
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


def test_the_long_recipes_differ_in_how_tokens_are_dealt_out_and_in_nothing_else():
    ring, striped = (yaml.safe_load(recipe.read_text()) for recipe in LONG)
    assert ring["model"]["init_args"].pop("attention") == "contiguous"
    assert striped["model"]["init_args"].pop("attention") == "striped"
    assert ring == striped
    assert ring["trainer"]["devices"] == 2
    assert ring["data"]["init_args"]["context"] >= 4096


def run(command, folder, recipe, steps, *more):
    """A command that starts its own further rank, finished."""
    argv = [sys.executable, *command, "fit", "--config", str(recipe), *short(folder, steps, *more)]
    return subprocess.run(argv, capture_output=True, text=True, cwd=folder, timeout=500, env=os.environ)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LONG, ids=lambda path: path.stem)
def test_one_command_starts_both_ranks_and_one_of_them_reports(recipe, tmp_path):
    done = run(["-m", "stabilitykit.cli"], tmp_path, recipe, 3, "--trainer.limit_val_batches=1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("report: ") == 1
    assert f"report: {tmp_path}/stability/report.html" in done.stdout
    assert [record.step for record in read_records(tmp_path / "stability").of("loss")] == [0, 1, 2]
    assert read_meta(tmp_path / "stability")["devices"]["world_size"] == 2


@pytest.mark.slow
def test_a_mistake_that_both_ranks_find_is_told_once(tmp_path):
    script = str(Path(sys.executable).with_name("stabilitykit"))
    done = run([script], tmp_path, LONG[1], 3, "--data.init_args.path=nowhere")
    assert done.returncode == 2
    assert done.stderr.count("error") == 1
    assert "stabilitykit: error: expected a corpus at nowhere, got no such file or folder" in done.stderr
    assert "report" not in done.stdout


def gpt2_124m():
    return yaml.safe_load((ROOT / "recipes/gpt2-124m.yaml").read_text())


def test_gpt2_124m_has_gpt2s_parameters():
    with torch.device("meta"):
        module = GPTModule(**gpt2_124m()["model"]["init_args"])
    # https://huggingface.co/openai-community/gpt2: 124,439,808, the tied head counted once
    assert sum(parameter.numel() for parameter in module.parameters()) == 124_439_808


def test_gpt2_124m_runs_at_reduced_depth_with_every_monitor(tmp_path, monkeypatch, wandb_home):
    monkeypatch.chdir(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 50257, 4000, dtype=np.uint16)
    for name in ("train.bin", "val.bin"):
        tokens.tofile(tmp_path / name)
    recipe = gpt2_124m()
    recipe["model"]["init_args"] |= {"layers": 2, "width": 32, "heads": 2, "context": 32}
    recipe["data"]["init_args"] |= {"path": str(tmp_path), "context": 32, "batch_size": 2}
    recipe["data"]["init_args"]["validation_batches"] = 1
    small = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "accumulate_grad_batches": 2}
    recipe["trainer"] |= {**small, "enable_progress_bar": False, "val_check_interval": 4}
    recipe["trainer"]["logger"]["init_args"] |= {"offline": True, "save_dir": str(tmp_path)}
    _loss, attention, weights, _save = recipe["trainer"]["callbacks"]
    attention["init_args"]["every_n_steps"] = 2
    weights["init_args"] |= {"every_n_steps": 2, "window": 1}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["fit", "--config", str(tmp_path / "small.yaml")]) == 0
    records = read_records(find_folder(tmp_path))
    assert [row.step for row in records.of("loss")] == [0, 1]
    assert [row.step for row in records.of("attention")] == [1]
    assert records.of("weights")[0].values["weights/float32/rel_l2"] > 0
    assert list(tmp_path.rglob("*.wandb"))


def test_without_a_wandb_login_training_goes_on_and_offline_is_suggested(
    tmp_path, monkeypatch, wandb_home, capsys
):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_SILENT", "false")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load((ROOT / "recipes/gpt-nano.yaml").read_text())
    recipe["model"]["init_args"] |= {"layers": 1, "width": 16, "context": 16}
    recipe["data"]["init_args"] |= {"context": 16, "batch_size": 1}
    recipe["trainer"] |= {"max_steps": 2, "val_check_interval": 4, "enable_progress_bar": False}
    wandb_logger = {"class_path": "pytorch_lightning.loggers.WandbLogger", "init_args": {"project": "p"}}
    recipe["trainer"] |= {"logger": wandb_logger, "default_root_dir": str(tmp_path)}
    (tmp_path / "online.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["fit", "--config", str(tmp_path / "online.yaml")]) == 0
    told = capsys.readouterr().err
    assert "stabilitykit: training goes on without W&B" in told
    assert "--trainer.logger.init_args.offline=true" in told
    assert [row.step for row in read_records(find_folder(tmp_path)).of("loss")] == [0, 1]


def start(folder, *more):
    argv = [sys.executable, "-m", "stabilitykit.cli", "fit", "--config", str(ROOT / "recipes/gpt-nano.yaml")]
    small = ["--model.init_args.layers=2", "--model.init_args.width=32", "--data.init_args.batch_size=2"]
    small += ["--data.init_args.context=32", "--model.init_args.context=32"]
    small += ["--model.init_args.decay_steps=5000"]  # or max_steps would decide the learning rate
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


def killed(folder, more_records, *more):
    """Trains until that many more losses are on disk, kills, and gives the newest checkpoint."""
    log = folder / "stability" / "records.jsonl"
    before = log.read_text().count('"kind":"loss"') if log.is_file() else 0
    victim = start(folder, 100_000, *more)
    deadline = time.monotonic() + 240
    while not log.is_file() or log.read_text().count('"kind":"loss"') < before + more_records:
        assert time.monotonic() < deadline
        assert victim.poll() is None
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    saved = max((folder / "ckpt").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    seen = [record.step for record in read_records(log.parent).of("loss")]
    assert seen == list(range(len(seen)))
    # the last completed step's loss is read one step late
    assert seen[-1] >= int(re.search(r"step=(\d+)", saved.name).group(1)) - 2
    return saved


@pytest.mark.soak
def test_killed_runs_lose_nothing_and_their_resumes_continue_the_curve_exactly(tmp_path):
    draw, kills = random.Random(0), int(os.environ.get("SOAK", "1"))
    steps, resume = 60 * kills + 60, []
    finished(start(tmp_path / "whole", steps))
    for _ in range(kills):
        saved = killed(tmp_path / "cut", draw.randint(40, 80), *resume)
        resume = [f"--ckpt_path={saved}"]
    finished(start(tmp_path / "cut", steps, *resume))
    whole, cut = (read_records(tmp_path / name / "stability") for name in ("whole", "cut"))
    assert {record.attempt for record in cut.of("loss")} >= {1, kills + 1}
    for kind in ("loss", "attention"):
        expected = [(record.step, record.values) for record in whole.of(kind)]
        assert [(r.step, r.values) for r in cut.of(kind) if r.step < steps] == expected
    print(f"{kills} kills, {steps} steps, {len(cut.problems)} torn lines")


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
    assert [event["kind"] for event in opened] == ["spike", "gradient_spike"]
    assert all(planted <= event["start"] <= planted + 2 for event in opened)
    losses = [record.values["loss/value"] for record in records.of("loss")]
    assert sum(losses[-20:]) / 20 < 0.6 * losses[0]
