"""Attention by hand in which more happens than q k^T, softmax and v: right numbers or a true reason."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from model_cases import BATCH, HEADS, TOKENS, WIDTH
from stabilitykit.observe.tap import Tap
from watching import Attends, assert_watched, run

HIDDEN = torch.ones(TOKENS, TOKENS).triu(1).bool()
SCALE = (WIDTH // HEADS) ** -0.5
CAUSAL = torch.zeros(TOKENS, TOKENS).masked_fill(HIDDEN, -math.inf)


class ByFunction(Attends):
    """Attention of a function of q, k, v [b, h, n, d]; where it returns two, the second is a further loss."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def attend(self, q, k, v):
        out = self.function(*(t.transpose(1, 2) for t in (q, k, v)))
        out, self.further = out if isinstance(out, tuple) else (out, 0.0)
        return out.transpose(1, 2)


def model_of(function):
    return nn.Sequential(ByFunction(function), ByFunction(function))


def loss(model):
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    return model(x).square().sum() + sum(block.further for block in model)


def assert_unseen(function, reason):
    calls, unseen = run(model_of(function), loss)
    assert calls == []
    assert sorted(unseen) == ["0", "1"]
    assert all(reason in why for why in unseen.values()), unseen


def single(function, q, k, v):
    """The function of each sequence and head, tensors of two axes."""
    return torch.stack([torch.stack([function(*of) for of in zip(*parts)]) for parts in zip(q, k, v)])  # noqa: B905


def less_its_peak(q, k, v):
    s = q @ k.mT * SCALE
    return (s - s.amax(-1, keepdim=True).clamp(min=0) * 1.0).softmax(-1) @ v


def looked_at(q, k, v):
    p = (q @ k.mT * SCALE).softmax(-1)
    assert p.mean().item() > 0
    assert p.topk(2).values.detach().min() > 0
    return p @ v


def summed_by_keywords(q, k, v):
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    s = torch.baddbmm(input=CAUSAL, batch1=q, batch2=k.mT, beta=1, alpha=SCALE)
    p = torch.softmax(input=s, dim=-1)
    return torch.matmul(input=p, other=v).unflatten(0, (BATCH, HEADS))


SEEN = {
    "less its peak": less_its_peak,
    "less the largest of all": lambda q, k, v: (lambda s: s - s.max())(q @ k.mT).softmax(-1) @ v,
    "looked at by the way": looked_at,
    "keywords": summed_by_keywords,
    "mm": lambda q, k, v: single(lambda q, k, v: torch.mm(torch.mm(q, k.T).softmax(-1), v), q, k, v),
    "addmm": lambda q, k, v: single(
        lambda q, k, v: torch.addmm(CAUSAL, q, k.T, alpha=SCALE).softmax(-1) @ v, q, k, v
    ),
    "linalg.matmul": lambda q, k, v: torch.linalg.matmul(torch.linalg.matmul(q, k.mT).softmax(-1), v),
    "einsum without a result": lambda q, k, v: single(
        lambda q, k, v: torch.einsum("id,jd", q, k).softmax(-1) @ v, q, k, v
    ),
    "a function checkpointed": lambda q, k, v: checkpoint(
        lambda q, k, v: (q @ k.mT * SCALE + CAUSAL).softmax(-1) @ v, q, k, v, use_reentrant=False
    ),
}


@pytest.mark.parametrize("function", SEEN.values(), ids=SEEN)
def test_it_is_measured(function):
    model = model_of(function)
    count = BATCH * HEADS if function in (SEEN["mm"], SEEN["addmm"], SEEN["einsum without a result"]) else 1
    names = [f"{layer}#{i}" if i else layer for layer in "01" for i in range(count)]
    assert_watched(model, loss, sorted(names))


def filled_by_a_view(q, k, v):
    s = q @ k.mT * SCALE
    s.view(-1, TOKENS, TOKENS).masked_fill_(HIDDEN, -math.inf)
    return s.softmax(-1) @ v


def filled_in_a_slice(q, k, v):
    s = q @ k.mT * SCALE
    s[..., 5:].fill_(-1e9)
    return s.softmax(-1) @ v


def filled_by_data(q, k, v):
    s = q @ k.mT * SCALE
    s.data.masked_fill_(HIDDEN, -math.inf)
    return s.softmax(-1) @ v


def with_a_mask_that_changes(q, k, v):
    mask = CAUSAL.clone()
    s = q @ k.mT + mask
    mask.zero_()
    return s.softmax(-1) @ v


@pytest.mark.parametrize(
    "function", [filled_by_a_view, filled_in_a_slice, filled_by_data, with_a_mask_that_changes]
)
def test_a_write_that_does_not_pass_the_scores_is_noticed(function):
    assert_unseen(function, "a write into its scores or mask that went another way")


def scaled_in_place(q, k, v):
    out = (q @ k.mT * SCALE).softmax(-1) @ v
    return out.mul_(0.5)


def fused_with_a_mask_that_changes(q, k, v):
    mask = ~HIDDEN
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    mask.fill_(True)
    return out


@pytest.mark.parametrize("function", [scaled_in_place, fused_with_a_mask_that_changes])
def test_a_tensor_written_to_before_the_backward_is_not_compared(function):
    assert_unseen(function, "written to, in place, before")


def probabilities_in_the_loss(q, k, v):
    p = (q @ k.mT * SCALE).softmax(-1)
    return p @ v, -(p * (p + 1e-9).log()).sum()


def scores_in_the_loss(q, k, v):
    s = q @ k.mT * SCALE
    return s.softmax(-1) @ v, s.logsumexp(-1).square().mean()


def probabilities_in_a_list(q, k, v):
    p = (q @ k.mT * SCALE).softmax(-1)
    return p @ v, torch.stack([p, p]).square().sum()


def assigned_elsewhere(q, k, v):
    p, kept = (q @ k.mT * SCALE).softmax(-1), torch.zeros(BATCH, HEADS, TOKENS, TOKENS)
    kept[:] = p
    return p @ v, kept.square().sum()


def merged_parts(q, k, v):
    parts = [q @ k[:, :, some].mT for some in (slice(6), slice(6, None))]
    outs = [s.softmax(-1) @ v[:, :, some] for s, some in zip(parts, (slice(6), slice(6, None)), strict=True)]
    weights = torch.stack([s.logsumexp(-1, keepdim=True) for s in parts]).softmax(0)
    return (torch.stack(outs) * weights).sum(0)


@pytest.mark.parametrize(
    "function",
    [
        probabilities_in_the_loss,
        scores_in_the_loss,
        probabilities_in_a_list,
        assigned_elsewhere,
        merged_parts,
    ],
)
def test_scores_whose_gradient_is_not_of_attention_alone_are_named(function):
    assert_unseen(function, "its scores are used elsewhere too")


def test_scores_that_the_next_layer_takes_on_are_named_and_the_next_layer_measured():
    before = []

    def residual(q, k, v):
        s = q @ k.mT * SCALE + (before.pop() if before else 0.0)
        before.append(s)
        return s.softmax(-1) @ v

    calls, unseen = run(model_of(residual), loss)
    assert [call.name for call in calls] == ["1"]
    assert list(unseen) == ["0"]
    assert "its scores are used elsewhere too" in unseen["0"]


def of_windows(q, k, v):
    k, v = (F.pad(t, (0, 0, 3, 0)).unfold(2, 4, 1) for t in (k, v))
    s = torch.einsum("bhnd,bhndw->bhnw", q, k) * SCALE
    return torch.einsum("bhnw,bhndw->bhnd", s.softmax(-1), v)


def talking_heads(q, k, v):
    return torch.einsum("bhij,hg->bgij", q @ k.mT, torch.eye(HEADS)).softmax(-1) @ v


def hidden_rows(q, k, v):
    padded = torch.zeros(BATCH, 1, 1, TOKENS)
    padded[1, ..., :4] = 1
    return (q @ k.mT + (HIDDEN.float() + padded) * -1e9).softmax(-1) @ v


def softmax_plus_one(q, k, v):
    weights = torch.exp(q @ k.mT * SCALE)
    return weights / (1 + weights.sum(-1, keepdim=True)) @ v


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        probs = scores.softmax(-1)
        ctx.save_for_backward(probs)
        return probs

    @staticmethod
    def backward(ctx, *grads):
        (probs,) = ctx.saved_tensors
        return probs * (grads[0] - (grads[0] * probs).sum(-1, keepdim=True))


MEMORY = nn.Parameter(torch.ones(1, HEADS, 3, WIDTH // HEADS))
REASONS = {
    softmax_plus_one: "do not come from a call of softmax",
    lambda q, k, v: F.log_softmax(q @ k.mT, -1).exp() @ v: "do not come from a call of softmax",
    lambda q, k, v: (q @ k.mT * SCALE - 2).sigmoid() @ v: "do not come from a call of softmax",
    of_windows: "a product that is not of rows with keys",
    talking_heads: "a product that is not of rows with keys",
    hidden_rows: "all hidden, by a finite number",
    lambda q, k, v: (q @ k.mean(0).mT).softmax(-1) @ v.mean(0): "leading axes (2, 4), (1, 4), (1, 4)",
    lambda q, k, v: torch.einsum("bhij,bhjd->bhid", topped(q @ k.mT), v): "topk on its scores",
    lambda q, k, v: (q @ k.mT).mT.softmax(-1) @ v: "mT on its scores",
    lambda q, k, v: checkpoint(lambda q, k: (q @ k.mT).softmax(-1), q, k, use_reentrant=True) @ v: (
        "a part of it inside an autograd function"
    ),
    lambda q, k, v: Softmax.apply(q @ k.mT) @ v: "a part of it inside an autograd function",
    lambda q, k, v: (nn.Parameter(torch.ones(BATCH, HEADS, TOKENS, 8)) @ k.mT).softmax(-1) @ v: "a parameter",
    lambda q, k, v: (q @ MEMORY.expand(BATCH, -1, -1, -1).mT).softmax(-1) @ MEMORY: "a parameter",
    lambda q, k, v: (q @ k.mT).softmax(-1) @ nn.Parameter(torch.ones(BATCH, HEADS, TOKENS, 8)): "a parameter",
    lambda q, k, v: torch.vmap(lambda q, k, v: (q @ k.mT + CAUSAL).softmax(-1) @ v)(q, k, v): "torch.func",
    lambda q, k, v: torch.vmap(F.scaled_dot_product_attention)(q, k, v): "torch.func",
}


def topped(scores):
    top, where = scores.topk(4, -1)
    return torch.zeros_like(scores).scatter(-1, where, top.softmax(-1))


@pytest.mark.parametrize("function", REASONS, ids=REASONS.values())
def test_what_is_no_softmax_of_rows_with_keys_is_named(function):
    assert_unseen(function, REASONS[function])


WRITTEN = [
    filled_by_a_view,
    filled_in_a_slice,
    scaled_in_place,
    probabilities_in_the_loss,
    assigned_elsewhere,
]


@pytest.mark.parametrize("function", [*SEEN.values(), *WRITTEN, merged_parts, *REASONS])
def test_watching_it_changes_no_bit(function):
    def trained(tap):
        model = model_of(function)
        model.load_state_dict(state)
        with tap:
            loss(model).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    state = model_of(function).state_dict()
    plain, watched = trained(nullcontext()), trained(Tap(nn.Identity(), lambda call: None))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def router(q, k, v):
    """Of a mixture of experts, with weights that are computed: no attention."""
    x = q.flatten(0, 2)
    gates = (x @ F.normalize(torch.eye(x.shape[-1])[:, :2] * 1.0, dim=0)).softmax(-1)
    return v * gates.amax(-1).view(*v.shape[:-1], 1)


def contrast(q, k, v):
    one, two = (F.normalize(t.mean((1, 2)), dim=-1) for t in (q, k))
    return v, -(one @ two.T / 0.1).softmax(-1).diagonal().log().sum()


def experts(q, k, v):
    """Of learned weights that are three-dimensional, with gates over them."""
    gates = torch.einsum("bhnd,hde->bhne", q, nn.Parameter(torch.ones(HEADS, 8, 2))).softmax(-1)
    return v @ nn.Parameter(torch.ones(HEADS, 8, 8)) * gates.amax(-1, keepdim=True)


@pytest.mark.parametrize("function", [router, contrast, experts])
def test_a_softmax_of_other_products_is_no_attention(function):
    assert run(model_of(function), loss) == ([], {})


def test_inference_mode_is_watched():
    model = model_of(less_its_peak)
    calls = []
    with Tap(model, calls.append), torch.inference_mode():
        loss(model)
    assert [call.name for call in calls] == ["0", "1"]
