"""Arms of the optimizer: each equals the same done by hand, bit for bit, and is 0 where nothing changes."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from stabilitykit.observe.exactly import attend_exactly
from stabilitykit.observe.tap import Tap
from stabilitykit.observe.twin import Twin
from stabilitykit.observe.update import update_rms

STEPS, LR, BETAS = 6, 1e-2, (0.9, 0.999)


def start(dtype=torch.float32):
    torch.manual_seed(0)
    return tiny.Model(layers=1, dropout=0.0).to(dtype)


def loss_of(module, index, falling=False):
    tokens, targets = tiny.batch(index, size=2)
    jump = 30.0 if index >= 3 else 1.0  # the second moment is stale from here on
    return (0.1**index if falling else jump) * F.cross_entropy(
        module(tokens).flatten(0, 1), targets.flatten()
    )


def schedule(optimizer, on):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5 if on else 1.0)


def run(module, text, kind=torch.optim.AdamW, decays=True, falling=False, lr=LR, **settings):
    """The run with one twin beside it; the twin's weights."""
    optimizer = kind(module.parameters(), lr=lr, **settings)
    scheduler = schedule(optimizer, decays)
    twin = Twin(module, [optimizer], text)
    for index in range(STEPS):
        twin.forward_backward(lambda index=index: loss_of(module, index, falling))
        loss_of(module, index, falling).backward()
        groups = [dict(group) for group in twin.optimizers[0].param_groups]
        twin.step()
        optimizer.step()
        assert [g["lr"] for g in twin.optimizers[0].param_groups] == [g["lr"] for g in optimizer.param_groups]
        assert len(twin.optimizers[0].param_groups) == len(groups)
        optimizer.zero_grad()
        scheduler.step()
    return twin


def by_hand(factor=1.0, hold=False, clip=None, betas=BETAS, skip=(), rms=False, attention=None, dtype=None):
    """The twin's training as a user would write it, with a group per tensor so that each has its own rate."""
    module = start(dtype or torch.float32)
    optimizer = torch.optim.AdamW([{"params": [p]} for p in module.parameters()], lr=LR, betas=betas)
    for index in range(STEPS):
        rate = LR if hold else LR * 0.5 ** (index // 2)
        if index in skip:
            continue
        with Tap(module, replace=attention) if attention else nullcontext():
            loss_of(module, index).backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
            if rms:
                (p,) = group["params"]
                v = optimizer.state[p].get("exp_avg_sq", torch.zeros_like(p)).double()
                t = int(optimizer.state[p].get("step", 0)) + 1
                square = p.grad.double() ** 2
                v = (betas[1] * v + (1 - betas[1]) * square) / (1 - betas[1] ** t)
                size = (square / torch.maximum(v, torch.tensor(1e-16))).mean().sqrt().item()
                group["lr"] /= size if size > 1.001 else 1
        optimizer.step()
        optimizer.zero_grad()
    return module


HANDS = {
    "lr*0.5": {"factor": 0.5},
    "lr*0": {"factor": 0.0},
    "lr_hold": {"hold": True},
    "clip=0.1": {"clip": 0.1},
    "beta2=0.9": {"betas": (0.9, 0.9)},
    "skip=2": {"skip": [2]},
    "skip=1-2+skip=4": {"skip": [1, 2, 4]},
    "update_rms_clip": {"rms": True},
    "lr_hold+lr*0.5": {"hold": True, "factor": 0.5},
    "clip=0.5+update_rms_clip+beta2=0.95": {"clip": 0.5, "rms": True, "betas": (0.9, 0.95)},
    "lr*0.5+skip=3+exact_attention": {"factor": 0.5, "skip": [3], "attention": attend_exactly},
    "float64+lr_hold+clip=0.1": {"hold": True, "clip": 0.1, "dtype": torch.float64},
}


@pytest.mark.parametrize("text", HANDS)
def test_an_arm_equals_its_parts_applied_by_hand(text):
    module = start()
    twin = run(module, text)
    expected = dict(by_hand(**HANDS[text]).named_parameters())
    for name, own in twin.pairs()[1].items():
        assert torch.equal(own, expected[name]), name
    main, own = twin.pairs()
    assert any(not torch.equal(own[name].to(p.dtype), p) for name, p in main.items())


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("lr*0.5", {"lr": 0.0}),
        ("lr_hold", {"decays": False}),
        ("clip=1e9", {}),
        ("beta2=0.999", {}),
        ("skip=1000-1001", {}),
        ("update_rms_clip", {"falling": True}),
        ("eager", {}),
    ],
)
def test_an_arm_that_changes_nothing_is_at_distance_0(text, options):
    module = start()
    main, own = run(module, text, **options).pairs()
    assert all(torch.equal(own[name], p) for name, p in main.items())


def test_update_rms_against_a_second_moment_kept_by_hand():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], lr=0.1, betas=(0.9, 0.99))
    v = torch.zeros(5, dtype=torch.float64)
    sizes = []
    for t in range(1, 8):
        p.grad = torch.randn(5, dtype=torch.float64) * (10 if t == 7 else 1)
        v = 0.99 * v + 0.01 * p.grad**2
        expected = (p.grad**2 / (v / (1 - 0.99**t))).mean().sqrt().item()
        sizes.append(update_rms(p, optimizer.param_groups[0], optimizer.state[p]))
        assert sizes[-1] == pytest.approx(expected, rel=1e-12)
        optimizer.step()
    assert sizes[0] == pytest.approx(1)
    assert sizes[-1] > 2
    p.grad.zero_()
    assert update_rms(p, optimizer.param_groups[0], optimizer.state[p]) == 0


def test_decay_in_the_gradient_counts_as_gradient():
    p = nn.Parameter(torch.full((2,), 3.0))
    optimizer = torch.optim.Adam([p], lr=0.1, weight_decay=1.0)
    p.grad = torch.zeros(2)
    assert update_rms(p, optimizer.param_groups[0], optimizer.state[p]) == pytest.approx(1)


def test_several_optimizers_each_get_what_they_have():
    module = start()
    first = torch.optim.AdamW(module.blocks.parameters(), lr=LR)
    second = torch.optim.SGD([*module.embed.parameters(), *module.head.parameters()], lr=0.1)
    twin = Twin(module, [first, second], "beta2=0.5+lr*0.5+update_rms_clip")
    mine = copy.deepcopy(module)
    own = torch.optim.AdamW(mine.blocks.parameters(), lr=LR / 2, betas=(0.9, 0.5))
    other = torch.optim.SGD([*mine.embed.parameters(), *mine.head.parameters()], lr=0.05)
    for _ in range(2):
        twin.forward_backward(lambda: loss_of(module, 0))
        twin.step()
        loss_of(mine, 0).backward()
        own.step(), other.step(), own.zero_grad(), other.zero_grad()
    for name, p in mine.named_parameters():
        torch.testing.assert_close(twin.pairs()[1][name], p.detach(), rtol=1e-5, atol=1e-7)


def test_a_scaled_run_clips_unscaled_gradients():
    module = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
    scaled = Twin(module, [optimizer], "clip=0.1", scaler=scaler)
    plain = Twin(module, [optimizer], "clip=0.1")
    for twin in (scaled, plain):
        twin.forward_backward(lambda: loss_of(module, 0))
        twin.step()
    for name, p in plain.pairs()[1].items():
        assert torch.equal(p, scaled.pairs()[1][name])


@pytest.mark.parametrize(
    ("text", "optimizers", "words"),
    [
        ("beta2=0.9", lambda p: [torch.optim.SGD(p, 0.1)], "setting 'betas', got SGD"),
        ("update_rms_clip", lambda p: [torch.optim.RMSprop(p, 0.1)], "setting 'betas', got RMSprop"),
        ("lr*0.5", lambda p: [], "setting 'lr', got no optimizer"),
        ("clip=1", lambda p: [], "setting 'lr', got no optimizer"),
        ("float16+clip=1", lambda p: [torch.optim.AdamW(p, 0.1, fused=True)], "got AdamW, fused"),
    ],
)
def test_what_the_optimizers_lack_is_said(text, optimizers, words):
    module = start()
    with pytest.raises(ValueError, match=words) as caught:
        Twin(module, optimizers(list(module.parameters())), text)
    assert text in str(caught.value)
