"""Planted faults: what moved first, and how many steps after the fault it was seen."""

import pytest
import torch
from torch import nn

import tiny
from stabilitykit import LossMonitor, PrecursorMonitor
from stabilitykit.faults import PlantedLearningRate, PlantedScale, PlantedSecondMoment
from stabilitykit.gpt.module import GPTModule, TextData
from stabilitykit.report.movers import first_movers
from stabilitykit.report.reading import events
from stabilitykit.runlog import read_records

FIRST = {f"precursors/{name}" for name in ("update_ratio", "rms", "entropy", "max_logit")}


def base():
    """2 layers, width 64, 4 heads, context 64, untied, AdamW 3e-3 after 50 steps of warm-up."""
    module = GPTModule(
        layers=2, width=64, heads=4, context=64, tied_head=False, learning_rate=3e-3,
        min_learning_rate_ratio=1.0, warmup_steps=50, betas=(0.9, 0.999), weight_decay=0.0,
    )  # fmt: skip
    for name, p in module.named_parameters():
        if p.dim() == 2:
            std = (
                0.02 if "tokens" in name else p.shape[1] ** -0.5 * (0.5 if name.endswith("out.weight") else 1)
            )
            nn.init.normal_(p, std=std)
    return module


# Steps after the fault at which the first signal may be seen: the flag's delay minus the signal's lead.
# A wrong scale hurts only once attention has learnt to look somewhere, so it is planted later.
FAULTS = {
    "learning rate x30 for one step": (lambda at: PlantedLearningRate(at, factor=30.0), 100, 0),
    "second moment zeroed": (PlantedSecondMoment, 100, 0),
    "scale 0 in 4 heads": (lambda at: PlantedScale(at, layer=0, heads=4, factor=0.0), 240, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_first_movers_of_a_planted_fault(tmp_path, name):
    fault, at, seen_after = FAULTS[name]
    torch.manual_seed(0)
    callbacks = [LossMonitor(), PrecursorMonitor(1), fault(at)]
    run = tiny.trainer(tmp_path, callbacks, max_steps=at + 12, gradient_clip_val=1.0)
    run.fit(base(), datamodule=TextData(batch_size=16, context=64))
    records = read_records(tmp_path / "stability")
    event = events(records)[0]
    assert at <= event["start"] <= at + 3
    movers = first_movers(records, event)
    assert movers
    assert movers[0].key in FIRST
    assert movers[0].since <= at + seen_after
    # Nothing was outside its band before: the fault, not noise, is what was seen.
    assert not any(row.detail["moved"] for row in records.of("precursors") if row.step < at)
