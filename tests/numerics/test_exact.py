"""Exact attention against explicit matrices in longdouble and against SDPA in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_oracle import SUMMANDS, assert_close, assert_exact, inputs, normal, oracle
from stabilitykit.numerics.exact import exact_attention, exact_attention_grad

ALIGNS = ("top_left", "bottom_right")

# --- against explicit matrices -------------------------------------------------------------------


@st.composite
def calls(draw):
    """q, k, v, grad_out and options: everything the signature knows, together."""
    size, seed = st.integers(0, 8), draw(st.integers(0, 99))
    (b, h_kv), (n, m) = draw(st.tuples(*[st.integers(1, 2)] * 2)), draw(st.tuples(size, size))
    h, d = h_kv * draw(st.integers(1, 3)), draw(st.sampled_from((4, 1, 80, 100, 256)))
    options = {
        "causal": draw(st.booleans()),
        "align": draw(st.sampled_from(ALIGNS)),
        "window": draw(st.none() | st.tuples(st.integers(-1, 4), st.integers(-1, 4))),
        "scale": draw(st.sampled_from((None, 0.0, 1.5 / d, -1 / d))),
        "softcap": draw(st.sampled_from((None, 0.0, 1.5))),
    }
    if draw(st.booleans()):  # packed; repeated cuts are empty sequences
        b, cuts = 1, draw(st.integers(0, 3))
        for name, total in (("cu_seqlens_q", n), ("cu_seqlens_k", m)):
            inner = draw(st.lists(st.integers(0, total), min_size=cuts, max_size=cuts))
            options[name] = torch.tensor([0, *sorted(inner), total])
    shapes = ((n, m), (m,), (1, m), (b, 1, n, m), (1, h, n, 1), (b, h, 1, m), (b, h, n, m))
    kind, shape = draw(st.sampled_from(("none", "bool", "float", "both"))), draw(st.sampled_from(shapes))
    keep, bias = normal(*shape, seed=seed + 1) > -0.5, normal(*shape, seed=seed + 2, sd=2.0)
    hidden = bias.masked_fill(~keep, -torch.inf)
    options["mask"] = {"none": None, "bool": keep, "float": bias, "both": hidden}[kind]
    slopes = st.sampled_from((None, torch.linspace(0.1, 0.9, h), normal(b, h, seed=seed).abs()))
    options["alibi_slopes"] = draw(slopes)
    if draw(st.booleans()):
        kept = normal(*draw(st.sampled_from(shapes)), seed=seed + 3) > -0.7
        options |= {"dropout_mask": kept, "dropout_p": draw(st.sampled_from((0.0, 0.25)))}
    if n and draw(st.booleans()):
        options["rows"] = torch.tensor(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5)))
    if draw(st.booleans()):
        options["heads"] = draw(st.lists(st.integers(0, h - 1), min_size=1, max_size=3))
    q, k, v, _ = inputs(b, h, h_kv, n, m, d, draw(st.sampled_from((None, 1, 3))), seed=seed)
    wanted = len(options.get("heads", range(h))), len(options.get("rows", range(n)))
    return q, k, v, normal(b, *wanted, v.shape[3], seed=seed + 4), options


@settings(max_examples=250, deadline=None)
@given(calls())
def test_all_options_together(call):
    *tensors, options = call
    assert_exact(*tensors, **options)


KEEP = torch.rand(1, 2, 7, 9, generator=torch.Generator().manual_seed(5)) > 0.4
KEEP[..., 3, :] = False
ADDED = torch.where(KEEP, normal(1, 2, 7, 9, seed=6), -torch.inf)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (2, 1)},
        {"window": (-1, 2), "causal": True},
        {"window": (3, 0), "align": "bottom_right"},
        {"softcap": 1.5},
        {"alibi_slopes": torch.tensor([0.5, 0.25]), "align": "bottom_right"},
        {"mask": KEEP},
        {"mask": ADDED},
        {"causal": True, "align": "bottom_right"},
        {"causal": True, "align": "top_left"},
        {"rows": torch.tensor([6, 0, 3, 4])},
        {"heads": [1]},
        {"dropout_mask": KEEP, "dropout_p": 0.25},
        {"scale": -0.3},
    ],
    ids=lambda options: "-".join(options),
)
def test_each_option_alone(options):
    q, k, v, g = inputs(n=7, m=9, d_v=3)
    rows, heads = options.get("rows", torch.arange(7)), options.get("heads", [0, 1])
    assert_exact(q, k, v, g[:, heads][:, :, rows], **options)


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize(("n", "m"), [(3, 11), (11, 3), (1, 6), (6, 1), (1, 1)])
def test_causal_with_unequal_lengths(n, m, align):
    q, k, v, g = inputs(n=n, m=m)
    assert_exact(q, k, v, g, causal=True, align=align)


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_see_only_themselves(causal, align):
    cu_q, cu_k = torch.tensor([0, 4, 4, 5, 12]), torch.tensor([0, 3, 5, 11, 11])
    q, k, v, _ = inputs(h=4, h_kv=2, n=12, m=11)
    rule = {"causal": causal, "align": align}
    out, lse = exact_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **rule)
    alone = exact_attention(q[:, :, 4:5], k[:, :, 5:11], v[:, :, 5:11], **rule)
    assert_close(out[:, :, 4:5], alone[0])
    assert (out[:, :, 5:] == 0).all()  # the last segment has queries but no key
    assert (lse[:, :, 5:] == -torch.inf).all()


def test_the_oracle_by_hand():
    """Two keys with scores 0 and log 3: probabilities 1/4 and 3/4."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 3.0]).log().view(1, 1, 2, 1)
    v, g = torch.tensor([1.0, 5.0]).view(1, 1, 2, 1), torch.ones(1, 1, 1, 1)
    found = oracle(q, k, v, g)
    assert [float(x) for x in found.out.flat] == pytest.approx([4.0])
    assert [float(x) for x in found.lse.flat] == pytest.approx([torch.tensor(4.0).log().item()])
    assert [float(x) for x in found.dk.flat] == pytest.approx([-0.75, 0.75])
    assert [float(x) for x in found.dv.flat] == pytest.approx([0.25, 0.75])


# --- against PyTorch -----------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    b=st.integers(1, 2), h_kv=st.integers(1, 2), group=st.integers(1, 3), n=st.integers(2, 60),
    d=st.sampled_from((1, 5, 64, 80)), causal=st.booleans(), seed=st.integers(0, 99),
    scale=st.sampled_from((None, 0.05, 1.0)), peak=st.sampled_from((0.1, 5.0, 50.0)),
)  # fmt: skip
def test_it_is_sdpa_in_float64(b, h_kv, group, n, d, causal, seed, scale, peak):
    assert_sdpa(*inputs(b, h_kv * group, h_kv, n, d=d, seed=seed), causal, scale, peak)


@pytest.mark.parametrize(("n", "d"), [(300, 64), (129, 100), (64, 256)])
def test_it_is_sdpa_over_several_blocks(n, d):
    assert_sdpa(*inputs(2, 4, 2, n, d=d), causal=True, scale=None, peak=20.0)


def assert_sdpa(q, k, v, g, causal, scale, peak):
    """Forward and backward, q scaled so that the largest logit is `peak`."""
    group, scaling = q.shape[1] // k.shape[1], scale or q.shape[-1] ** -0.5
    q = q * (peak / ((q @ k.repeat_interleave(group, 1).mT).abs().max() * scaling))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale, enable_gqa=True)
    assert_close(exact_attention(q, k, v, causal=causal, scale=scale)[0], want)
    wanted = torch.autograd.grad(want, leaves, g)
    # Both sides round here; in sharp rows dq and dk cancel, and the gradient may be 0.
    longest, largest = max(q.abs().max(), k.abs().max()), g.norm(dim=-1).max() * v.norm(dim=-1).max()
    floor = (SUMMANDS * scaling * longest * largest).item()
    for got, grad in zip(exact_attention_grad(q, k, v, g, causal=causal, scale=scale), wanted, strict=True):
        assert_close(got, grad, floor=floor)


@pytest.mark.parametrize("n", [62, 63, 64, 65, 66, 127, 128, 129])
def test_lengths_around_block_sizes(n):
    assert_sdpa(*inputs(h=1, n=n, d=3), causal=True, scale=None, peak=5.0)


# --- dtypes --------------------------------------------------------------------------------------


def test_16_bit_inputs_are_taken_as_they_are():
    q, k, v, g = inputs(n=50, d=16, dtype=torch.bfloat16)
    assert_close(exact_attention(q, k, v)[0], exact_attention(*(x.double() for x in (q, k, v)))[0])
    dq, dk, dv = exact_attention_grad(q, k, v, g)
    assert dq.dtype == dk.dtype == dv.dtype == torch.float64


def test_float32_results_are_float32_and_close():
    q, k, v, g = inputs(n=50, d=16)
    narrow = (
        *exact_attention(q, k, v, dtype=torch.float32),
        *exact_attention_grad(q, k, v, g, dtype=torch.float32),
    )
    for got, want in zip(narrow, (*exact_attention(q, k, v), *exact_attention_grad(q, k, v, g)), strict=True):
        assert got.dtype == torch.float32
        assert (got - want).abs().max() < 1e-5 * want.abs().max()
