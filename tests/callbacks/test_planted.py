"""Kernel faults, planted in one head of the second layer, are found and named; healthy ones raise nothing."""

import os

import pytest
import torch

import planted
import tiny
from planted import Fault
from stabilitykit import AttentionMonitor
from stabilitykit.gpt.module import GPTModule, TextData
from stabilitykit.runlog import read_records

LAYERS, HEADS = 2, 4
PLACE = "model.blocks.1.attention head 2"


def events(folder, steps=12, precision="bf16-mixed", sharp=False, every=1, **shape):
    torch.manual_seed(3)
    shape = {"layers": LAYERS, "width": 64, "heads": HEADS, "context": 64, **shape}
    module = GPTModule(vocab_size=256, **shape)
    if sharp:
        with torch.no_grad():
            for block in module.model.blocks:
                block.attention.qkv.weight[: 2 * shape["width"]] *= 40
    monitor = AttentionMonitor(every)
    run = tiny.trainer(folder, [monitor], max_steps=steps * every, precision=precision)
    run.fit(module, datamodule=TextData(batch_size=4, context=shape["context"]))
    records = read_records(folder / "stability")
    assert len(records.of("attention")) == steps
    return records.of("event")


FAULTS = {
    "scale": Fault(scale=1.1),
    "mask": Fault(mask=1),
    "fp8 values": Fault(fp8_values=True),
    "dk": Fault(dk=1.05),
    "delta": Fault(delta=0.05),
}


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(tmp_path, monkeypatch, name, precision):
    planted.plant(monkeypatch, planted.faulty(FAULTS[name], LAYERS))
    found = events(tmp_path, precision=precision)
    assert found
    opened = found[0].detail
    assert (opened["kind"], opened["monitor"], opened["end"]) == ("deviation", "attention", None)
    assert PLACE in opened["message"]
    assert {(place["layer"], place["head"]) for place in opened["places"]} == {
        ("model.blocks.1.attention", 2)
    }


HEALTHY = {
    "flash": (planted.flash, {}),
    "the planted kernel without a fault": (planted.faulty(Fault(layer=-1), LAYERS), {}),
    "eager": (planted.eager, {}),
    "float32": (planted.flash, {"precision": "32-true"}),
    "sharp": (planted.flash, {"sharp": True}),
    "sharp float32": (planted.flash, {"sharp": True, "precision": "32-true"}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_kernel_raises_nothing(tmp_path, monkeypatch, name):
    kernel, options = HEALTHY[name]
    planted.plant(monkeypatch, kernel)
    assert events(tmp_path, **options) == []


@pytest.mark.soak
def test_a_thousand_due_steps_of_gpt_nano_raise_nothing(tmp_path):
    steps = 50 * int(os.environ.get("SOAK", "1"))
    shape = {"layers": 4, "width": 128, "heads": 4, "context": 256}
    assert events(tmp_path, steps=steps, **shape) == []
