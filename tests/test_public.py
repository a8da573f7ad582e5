"""The public surface, frozen: growing it is a decision."""

import subprocess
import sys

import pytest

import stabilitykit

NAMES = [
    "Arm",
    "AttentionCall",
    "AttentionMonitor",
    "LossMonitor",
    "PrecursorMonitor",
    "RingMonitor",
    "SkippingBatchSampler",
    "SpikeDetector",
    "Tap",
    "Twin",
    "WeightMonitor",
    "deviation",
    "emulated_flash_attention",
    "emulated_flash_attention_grad",
    "exact_attention",
    "exact_attention_grad",
    "monitors",
    "ring_attention",
    "shard",
    "unshard",
    "wasserstein",
    "watch",
]


def test_the_public_names_are_exactly_these():
    assert sorted(stabilitykit.__all__) == NAMES
    assert all(getattr(stabilitykit, name) is not None for name in NAMES)


def test_an_unknown_name_lists_those_there_are():
    with pytest.raises(AttributeError, match="has no attribute 'Watch'; it has .*Tap"):
        stabilitykit.Watch


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, stabilitykit, stabilitykit.cli, stabilitykit.report.page, stabilitykit.readers.losses;"
        "print([m for m in ('torch', 'pytorch_lightning', 'wandb', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_monitors_are_one_of_each_kind():
    kinds = [monitor.kind for monitor in stabilitykit.monitors()]
    assert kinds == ["loss", "attention", "precursors"]
