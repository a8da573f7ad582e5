"""How several tests watch a model: every call of a step, each measured in full."""

import torch
from torch import nn

from model_cases import HEADS, WIDTH
from stabilitykit.observe.attention import measured, unmeasurable
from stabilitykit.observe.sample import Sample
from stabilitykit.observe.tap import Tap

# One operation in float32 is 6e-8 off, in bfloat16 .4 %; what is compared was rounded up to four times.
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 4 * 2**-8}


def run(model, loss):
    """Every call of one forward and backward, and what was said to be unseen."""
    calls = []
    with Tap(model, calls.append) as tap:
        loss(model).backward()
    return calls, tap.unseen


def assert_measured(call):
    """All heads, rows and sequences of a call, forward and backward, are as exact as its format allows."""
    got = {"grad_out": call.grad_out, "dq": call.dq, "dk": call.dk, "dv": call.dv}
    assert not [name for name, tensor in got.items() if tensor is None]
    assert unmeasurable(call) is None
    numbers = measured(call, Sample.whole(call))
    for name in ("rel_l2", "dq_rel_l2", "dk_rel_l2", "dv_rel_l2"):
        assert numbers[name] < LIMIT[call.q.dtype], f"{call.name}: {name}"


def assert_watched(model, loss, names):
    calls, unseen = run(model, loss)
    assert sorted(call.name for call in calls) == names
    assert unseen == {}
    for call in calls:
        assert_measured(call)


class Attends(nn.Module):
    """Attention over x [b, t, width], the part after the projection left to the heirs."""

    def __init__(self, kv_heads=HEADS, **options):
        super().__init__()
        self.width, self.options = WIDTH // HEADS, options
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * self.width)

    def forward(self, x, memory=None):
        q = self.q(x).unflatten(-1, (-1, self.width))
        k, v = self.kv(x if memory is None else memory).unflatten(-1, (2, -1, self.width)).unbind(-3)
        return x + self.attend(q, k, v).flatten(-2)  # without x the tokens grow alike, and dq is all roundoff
