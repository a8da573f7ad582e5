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
