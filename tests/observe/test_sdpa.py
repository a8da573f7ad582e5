"""torch's scaled_dot_product_attention on tensors of any number of axes, and with masks of its own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from stabilitykit.observe.exactly import attend_exactly
from stabilitykit.observe.tap import Tap
from watching import assert_measured

N, D = 7, 8


def run(shape, key_shape=None, replace=None, attn_mask=None):
    """The calls, what is unseen, and the gradients of q, k and v with and without the tap."""
    torch.manual_seed(3)
    shapes = (shape, key_shape or shape, key_shape or shape)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in shapes]
    weight = torch.randn(shape)

    def grads():
        out = F.scaled_dot_product_attention(*leaves, attn_mask=attn_mask)
        return torch.autograd.grad((out * weight).sum(), leaves)

    calls, plain = [], grads()
    with Tap(nn.Identity(), calls.append, replace) as tap:
        watched = grads()
    return calls, tap.unseen, plain, watched


MASKS = {"none": lambda lead: None, "shared": lambda lead: torch.ones(N, N).tril().bool()}
MASKS["own"] = lambda lead: torch.randn(*lead, N, N)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 3, 2)], ids=str)
def test_any_number_of_axes_is_seen_as_sequences_and_heads(lead, mask):
    calls, unseen, plain, watched = run((*lead, N, D), attn_mask=mask(lead))
    (call,) = calls
    assert call.q.shape == call.dq.shape == (*(*lead, 1, 1)[:1], call.q.shape[1], N, D)
    assert call.q.numel() == torch.Size((*lead, N, D)).numel()
    assert_measured(call)
    assert unseen == {}
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_any_number_of_axes_is_replaced():
    mask = torch.randn(2, 1, 2, N, N)
    calls, _, plain, replaced = run((2, 3, 2, N, D), replace=attend_exactly, attn_mask=mask)
    assert calls[0].backend == "replaced"
    torch.testing.assert_close(plain, replaced)


@pytest.mark.parametrize(("bias", "keys"), [(causal_lower_right, 11), (causal_upper_left, 11)])
def test_a_causal_bias_says_how_it_is_aligned(bias, keys):
    calls, _, plain, watched = run((2, 3, N, D), (2, 3, keys, D), attn_mask=bias(N, keys))
    assert calls[0].kwargs["attn_mask"] is None
    assert_measured(calls[0])
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.parametrize(("q", "k"), [((2, 3, N, D), (1, 3, N, D)), ((2, 3, N, D), (3, N, D))])
def test_keys_shared_by_the_sequences_are_named(q, k):
    calls, unseen, plain, watched = run(q, k)
    assert calls == []
    assert "leading axes (2, 3)" in unseen[""]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own, on its way
def test_nested_tensors_are_named():
    rows, calls = torch.randn(8, 2, D, requires_grad=True), []
    with Tap(nn.Identity(), calls.append) as tap:
        x = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 8])).transpose(1, 2)
        out = F.scaled_dot_product_attention(x, x, x)
        out.transpose(1, 2).values().sum().backward()
    assert calls == []
    assert "nested" in tap.unseen[""]
