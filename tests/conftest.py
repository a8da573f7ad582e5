"""Stricter than production: warnings are errors (pyproject.toml), one thread, seeded."""

import logging

import pytest
import torch

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
logging.getLogger("lightning").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _repeatable():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def wandb_home(tmp_path, monkeypatch):
    """A W&B that finds no key, no settings and no network, and leaves nothing behind."""
    for name in ("HOME", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "home").mkdir()
    import wandb

    yield tmp_path / "home"
    wandb.finish()
    wandb.teardown()  # a run left open would fail whichever test comes next
