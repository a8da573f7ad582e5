import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from stabilitykit import watch

HEALTHY_FLOAT32 = 2e-6


def loss(model, index):
    tokens, targets = tiny.batch(index)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def trained(steps, accumulate=1, **options):
    """What `watched` said after every optimizer step of a loop as a user writes it, losses and weights."""
    torch.manual_seed(1)
    model = tiny.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    said, losses = [], []
    with watch(model, **options) as watched:
        for step in range(steps):
            for micro in range(accumulate):
                value = loss(model, step * accumulate + micro) / accumulate
                value.backward()
                losses.append(value.item())
            optimizer.step()
            optimizer.zero_grad()
            said.append((watched.step, watched.numbers, watched.layers))
    return said, losses, [p.detach() for p in model.parameters()]


def test_every_step_has_its_numbers_layers_and_heads():
    said, _, _ = trained(3)
    assert [step for step, _, _ in said] == [1, 2, 3]
    for _, numbers, layers in said:
        assert numbers["attention/rel_l2"] < HEALTHY_FLOAT32
        assert numbers["attention/grad_rel_l2"] < HEALTHY_FLOAT32
        assert list(layers) == ["blocks.0", "blocks.1"]
        assert [head["head"] for head in layers["blocks.0"]["heads"]] == [0, 1]
    assert said[0][1] != said[1][1]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_that_are_not_due_have_none(accumulate):
    said, _, _ = trained(6, accumulate, every_n_steps=3)
    assert [bool(numbers) for _, numbers, _ in said] == [False, False, True, False, False, True]
    assert all(list(layers) == ["blocks.0", "blocks.1"] for _, numbers, layers in said if numbers)


def test_around_one_step_at_a_time_the_numbers_are_there_after_the_backward():
    model = tiny.Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        with watch(model, backward=False) as watched:
            loss(model, step).backward()
            after_backward = watched.numbers
            optimizer.step()
        assert after_backward == watched.numbers
        assert "attention/rel_l2" in after_backward
        assert "attention/grad_rel_l2" not in after_backward


def test_a_forward_alone_is_measured_when_the_block_ends():
    model = tiny.Model()
    with watch(model) as watched, torch.no_grad():
        loss(model, 0)
    assert watched.numbers["attention/rel_l2"] < HEALTHY_FLOAT32
    assert watched.step == 0


def test_the_run_is_unchanged_bit_for_bit():
    plain, watched = trained(4, 2, every_n_steps=9), trained(4, 2)
    assert plain[1] == watched[1]
    assert all(torch.equal(a, b) for a, b in zip(plain[2], watched[2], strict=True))


def test_of_several_optimizers_the_first_counts_and_those_of_others_do_not():
    model, other = tiny.Model(), nn.Linear(2, 2)
    optimizers = [
        torch.optim.SGD(model.blocks.parameters(), 0.1),
        torch.optim.SGD(model.head.parameters(), 0.1),
    ]
    stranger = torch.optim.SGD(other.parameters(), 0.1)
    with watch(model) as watched:
        for step in range(2):
            stranger.step()
            loss(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert watched.step == 2
    assert watched.numbers


def test_the_bias_of_delta_adds_up_and_the_scale_of_the_loss_may_be_a_function():
    said, _, _ = trained(3, loss_scale=lambda: 4.0)
    assert all("delta_bias" in head for _, _, layers in said for head in layers["blocks.0"]["heads"])


def test_nothing_stays_in_place_after_an_error_of_the_users():
    model = tiny.Model()
    with pytest.raises(RuntimeError, match="mine"), watch(model):
        loss(model, 0)
        raise RuntimeError("mine")
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())


def without_attention():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model) as watched:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    return watched


def test_a_model_without_attention_is_told_once():
    with pytest.warns(UserWarning, match="watch measured nothing: saw no attention") as said:
        watched = without_attention()
    assert len(said) == 1
    assert watched.numbers == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "watch: expected every_n_steps >= 1, got 0"),
        ({"heads": []}, r"watch: expected heads >= 1, got \[\]"),
        ({"modules": "decoder.*"}, r"'decoder\.\*' matches none of embed, blocks, blocks.0"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message), watch(tiny.Model(), **options):
        pass


def test_it_needs_no_lightning():
    code = (
        "import sys; from stabilitykit import watch;"
        "print([m for m in ('pytorch_lightning', 'lightning') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_fabric_loop_is_watched():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = tiny.Model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    with watch(model) as watched:
        fabric.backward(loss(model, 0))
        optimizer.step()
    assert watched.step == 1
    assert all("blocks." in name for name in watched.layers)
    assert watched.numbers["attention/roundoff_ratio"] < 3
