"""Sequences spread over ranks: N ranks train as one does."""

import numpy as np
import pytest
import torch

from ranks import ranks
from spread_cases import batch, built, spread_many, step, too_long, without_positions
from stabilitykit.gpt import GPT, GPTConfig
from stabilitykit.gpt.module import GPTModule
from stabilitykit.parallel.layout import LAYOUTS

CASES = {
    "rope": {"length": 32},
    "learned": {"length": 32, "positions": "learned", "tied_head": False},
    "grouped": {"length": 32, "kv_heads": 2, "qk_layernorm": True, "bias": False},
    "uneven": {"length": 31, "z_loss": 0.01},
    "uneven learned": {"length": 29, "positions": "learned", "z_loss": 0.01, "kv_heads": 1},
    "ignored": {"length": 32, "ignored": 13},
    "short": {"length": 1},  # some ranks have nothing but padding
}
TIGHT = {torch.float64: 1e-12, torch.float32: 1e-5}


def alone(*, length, ignored=0, bf16=False, **changes):
    """One rank's answer, by torch's own attention."""
    module = built(**{"context": length, **changes, "attention": "local"})
    return step(module, batch(length, ignored=ignored), bf16=bf16)


def check(found, expected, bound):
    for name, value in expected.items():
        wanted = value.double().numpy()
        np.testing.assert_allclose(
            found[name], wanted, rtol=0, atol=bound * max(abs(wanted).max(), 1e-3), err_msg=name
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("world", "dtype"), [(2, torch.float64), (2, torch.float32), (3, torch.float64)], ids=str
)
def test_n_ranks_have_one_ranks_loss_and_gradients(world, layout, dtype):
    cases = [{"attention": layout, "dtype": dtype, **case} for case in CASES.values()]
    told = ranks(world).run(spread_many, cases=cases)
    for place, case in enumerate(cases):
        expected = alone(**case)
        for rank in range(world):
            check(told[rank][place], expected, TIGHT[dtype])
            count = 3 * (case["length"] - case.get("ignored", 0))
            assert told[rank][place]["tokens"] == pytest.approx(count, rel=1e-6)


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_counted_on_each_rank_are_another_model(layout, changes):
    case = {"length": 32, "attention": layout, "wrong_positions": True, **changes}
    (wrong,) = ranks(2).run(spread_many, cases=[case])[0]
    name = "model.blocks.0.attention.qkv.weight"
    right = alone(length=32, **changes)[name].numpy()
    assert abs(wrong[name] - right).max() > 0.01 * abs(right).max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_autocast_the_ring_works_on_bf16_as_torchs_attention_does(layout):
    case = {"length": 31, "attention": layout, "dtype": torch.float32, "bf16": True, "qk_layernorm": True}
    (found,) = ranks(2).run(spread_many, cases=[case])[0]
    assert found.pop("dtypes") == {"torch.bfloat16"}
    check(found, alone(**case), 0.05)
    exact, own = alone(**{**case, "bf16": False}), alone(**case)
    gaps = [abs(found["loss"] - exact["loss"].item()), abs(own["loss"].item() - exact["loss"].item())]
    assert gaps[0] < 3 * gaps[1] + 1e-3


def test_a_model_alone_is_a_ring_of_one_without_a_process_group():
    for layout in LAYOUTS:
        case = {"length": 31, "kv_heads": 2, "z_loss": 0.01}
        module = built(context=31, kv_heads=2, z_loss=0.01, attention=layout)
        found = {name: value.numpy() for name, value in step(module, batch(31)).items()}
        check(found, alone(**case), 1e-12)
        tokens = batch(30)[0]
        torch.testing.assert_close(
            module(tokens), built(context=31, kv_heads=2)(tokens), rtol=1e-12, atol=1e-12
        )


def test_built_on_meta_it_can_be_made_ready():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=11, context=8, layers=1, heads=2, width=8, attention="zigzag"))
    model.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(model(torch.zeros(1, 8, dtype=torch.int64))).all()


def test_tokens_without_positions_and_too_many_tokens_are_named_on_every_rank():
    for told in ranks(2).run(without_positions):
        assert told == "expected positions with attention 'striped' over 2 ranks, got none"
    for told in ranks(2).run(too_long):
        assert told == "expected at most 8 tokens (the context), got 9"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "diagonal"}, "attention local, contiguous, striped, zigzag, got 'diagonal'"),
        ({"attention": "striped", "dropout": 0.1}, "dropout 0 with attention 'striped' .*, got 0.1"),
    ],
)
def test_what_a_ring_has_not_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTModule(**changes)
