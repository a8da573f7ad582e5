import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stabilitykit.observe.attention import measured
from stabilitykit.observe.bias import DeltaWalk
from stabilitykit.observe.sample import Look, Sample
from stabilitykit.observe.tap import Tap


def looks(count, replace=None, loss_scale=1.0, scaled=1.0):
    """The z of head 0 after each of `count` looks at values and gradients of one sign."""
    walk, found = DeltaWalk(), []
    for number in range(count):
        q, k = (torch.randn(1, 2, 64, 16).bfloat16().requires_grad_() for _ in range(2))
        v = torch.randn(1, 2, 64, 16).mul(0.4).sub(1.5).bfloat16().requires_grad_()
        calls = []
        with Tap(nn.Identity(), calls.append, replace=replace):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out.backward((torch.randn(out.shape) - 0.3).mul(scaled).bfloat16())
        size = {"heads": 2, "rows": 64, "sequences": 1, "look": Look(number)}
        row = measured(calls[0], Sample.draw(calls[0], str(number), **size), loss_scale=loss_scale)
        walk.add({"a": row})
        found.append(row["heads"][0]["delta_bias"])
    return found, walk, row


def away_from_zero(q, k, v, **kwargs):
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **kwargs)
    out = exact.bfloat16()
    further = torch.nextafter(out, out.sign() * math.inf)
    return torch.where(out.float().abs() < exact.abs(), further, out) + 0 * (q + k + v).mean()


def test_by_hand():
    walk = DeltaWalk()
    layers = {"a": {"heads": [{"head": 3, "delta_walk": [2.0, 4.0, 10.0]}]}}
    walk.add(layers)
    assert layers["a"]["delta_bias"] == layers["a"]["heads"][0]["delta_bias"] == 1.0
    layers = {"a": {"heads": [{"head": 3, "delta_walk": [-8.0, 5.0, 10.0]}, {"head": 1}]}}
    walk.add(layers)
    assert layers["a"]["delta_bias"] == -6 / 3
    again = DeltaWalk()
    again.load_state_dict(walk.state_dict())
    assert again.state_dict() == walk.state_dict()


def test_a_healthy_kernel_walks_at_random_and_a_bias_grows_with_the_root_of_the_rows():
    healthy, _, _ = looks(16)
    biased, _, _ = looks(16, away_from_zero)
    assert max(map(abs, healthy)) < 5
    assert abs(biased[0]) > 5
    assert abs(biased[15]) == pytest.approx(4 * abs(biased[0]), rel=0.4)


def test_the_scale_of_the_loss_is_divided_out():
    plain = looks(1)[2]["heads"][0]["delta_walk"]
    torch.manual_seed(0)
    scaled = looks(1, loss_scale=1024.0, scaled=1024.0)[2]["heads"][0]["delta_walk"]
    torch.manual_seed(0)
    plain = looks(1)[2]["heads"][0]["delta_walk"]
    assert scaled == pytest.approx(plain, rel=1e-6)
