"""The ladder on its smallest: what each rung is, and that rows are what training says."""

import pytest
import torch

from stabilitykit.numerics.exact import plain_attention
from stabilitykit.observe.arm import Arm
from stabilitykit.studies import ladder
from stabilitykit.studies.ladder import (
    BASE,
    FULL,
    OTHER,
    RUNGS,
    at,
    baseline,
    beside_baseline,
    floor_at,
    slopes,
)

FEW = {name: RUNGS[name] for name in ("same", "jitter 0", "jitter 1", "flash", "bfloat16")}


@pytest.fixture(scope="module")
def rows():
    return ladder.ladder([3], 4, ["lr*0.5", "same"], FEW)


def test_identical_starts_and_distances_that_begin_at_zero(rows):
    assert {row["step"] for row in rows} == {0, 1, 2, 3, 4}
    assert {row["rung"] for row in rows} == {*FEW, OTHER, "arm lr*0.5", "arm same"}
    for rung in ("same", "flash", "bfloat16", "arm lr*0.5"):
        assert at(rows, rung, "max_abs", 0) == [0]
    for step in (1, 4):
        assert at(rows, "same", "max_abs", step) == at(rows, "arm same", "max_abs", step) == [0]
        for rung in ("flash", "bfloat16", "arm lr*0.5"):
            assert at(rows, rung, "rel_l2", step)[0] > 0
    assert 0 < at(rows, "jitter 0", "rel_l2", 0)[0] < 1e-7  # one ulp of float32
    assert at(rows, "jitter 0", "rel_l2", 4) != at(rows, "jitter 1", "rel_l2", 4)
    assert at(rows, OTHER, "rel_l2", 0)[0] > 0.1
    jitters = [at(rows, f"jitter {place}", "w1", 4)[0] for place in (0, 1)]
    assert floor_at(rows, "w1", 4) == [sum(jitters) / 2]


def test_a_rung_is_a_training_run_of_its_own(rows):
    """bfloat16 against float32, trained by hand."""
    module = ladder._model(3)
    weights = {}
    for dtype in (torch.bfloat16, torch.float32):
        twin = ladder._twin(module, BASE if dtype == torch.bfloat16 else FULL, 0)
        draw, batches = ladder._markov(3), torch.Generator().manual_seed(3)
        for _ in range(4):
            ladder._train(twin, module, draw(batches))
        weights[dtype] = torch.cat([p.flatten().double() for p in twin.pairs()[1].values()])
    low, full = weights.values()
    assert at(rows, "bfloat16", "rel_l2", 4)[0] == pytest.approx(float((low - full).norm() / full.norm()))


def test_slopes_by_hand():
    rows = [
        {"seed": seed, "rung": "r", "step": step, "w1": seed * step + 1.0}
        for seed in (2, 3)
        for step in (0, 5)
    ]
    assert slopes(rows, "r", "w1") == [2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_baseline_is_textbook_attention_in_the_inputs_format(dtype):
    draw = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 16, 8, generator=draw).to(dtype).unbind(0)
    out = baseline(q, k, v, is_causal=True)
    textbook = plain_attention(q, k, v, causal=True)
    exact = plain_attention(q.double(), k.double(), v.double(), causal=True)
    assert out.dtype == dtype
    worst = float((textbook.double() - exact).abs().max())
    assert 0 < float((out.double() - exact).abs().max()) < 2 * worst
    assert float((out.double() - textbook.double()).abs().max()) < 2 * worst


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("lr*0.5", "bfloat16+ATTENTION+lr*0.5"),
        ("float16", "ATTENTION+float16"),
        ("exact_attention", "bfloat16+exact_attention"),
        ("float32+attention=math", "float32+attention=math"),
        ("same", "bfloat16+ATTENTION"),
    ],
)
def test_a_users_arm_stands_beside_the_baseline(text, own):
    assert beside_baseline(text) == own.replace("ATTENTION", ladder.BASELINE)
    assert Arm.parse(beside_baseline(text)).attention


def test_every_rung_is_an_arm_and_none_is_another():
    arms = [Arm.parse(text) for text, _ in RUNGS.values()]
    assert all(arm.attention for arm in arms)
    assert {of for _, of in RUNGS.values()} == {BASE, FULL}
