"""Exact attention against SDPA in float64 and against explicit matrices."""

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stabilitykit.numerics import exact, scores
from stabilitykit.numerics.exact import (
    attention_rows,
    exact_attention,
    exact_attention_grad,
    plain_attention,
)

few = settings(max_examples=400, deadline=None)


def normal(*shape, seed=0, sd=1.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) * sd).to(dtype)


def inputs(b=1, h=2, h_kv=None, n=7, m=None, d=4, d_v=None, seed=0, sd=1.0, dtype=torch.float64):
    h_kv, m, d_v = h_kv or h, n if m is None else m, d_v or d
    sizes = ((b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, d_v), (b, h, n, d_v))
    sds = (sd, sd, 1.0, 1.0)
    return [normal(*s, seed=9 * seed + i, sd=sds[i], dtype=dtype) for i, s in enumerate(sizes)]


def assert_close(got, want, floor=0.0):
    """Agreement to 1e-12 of the largest entry, with non-finite entries in the same places."""
    assert got.shape == want.shape
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(got[~finite], want[~finite])
    if finite.any():
        error, size = (got - want)[finite].abs().max(), want[finite].abs().max()
        assert error <= 1e-12 * size + floor, f"{error:.3g} against {size:.3g}"


def grad_floor(q, k, v, g, scale=None):
    """8 ulps of what dq and dk sum up: in sharp rows it cancels, and the gradient may be 0."""
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    longest = max(q.abs().max(), k.abs().max()).item()
    return 2**-49 * scale * longest * (g.norm(dim=-1).max() * v.norm(dim=-1).max()).item()


def oracle(
    q, k, v, g=None, *, causal=False, align="top_left", mask=None, scale=None, window=(-1, -1),
    softcap=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_k=None, rows=None, heads=None,
    dropout_mask=None, dropout_p=0.0,
):  # fmt: skip
    """The definition, one score at a time: out, lse and, given g, dq, dk, dv by autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    (b, h, n, d), (h_kv, m) = q.shape, k.shape[1:3]
    rows = range(n) if rows is None else rows.tolist()
    heads = range(h) if heads is None else list(heads)
    cu_q = [0, n] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    cu_k = [0, m] if cu_seqlens_k is None else cu_seqlens_k.tolist()
    bias = torch.zeros(b, h, n, m, dtype=torch.float64)
    for a, z, c, y in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        bias[:, :, a:z, :c] = bias[:, :, a:z, y:] = -math.inf
        shift = (y - c) - (z - a) if align == "bottom_right" else 0
        for i in range(a, z):
            for j in range(c, y):
                ahead = (j - c) - (i - a) - shift
                too_far = -1 < window[0] < -ahead or -1 < window[1] < ahead
                if too_far or (causal and ahead > 0):
                    bias[:, :, i, j] = -math.inf
                elif alibi_slopes is not None:
                    bias[:, :, i, j] = -(alibi_slopes.double() * abs(ahead))
    if mask is not None:
        added = mask if mask.is_floating_point() else torch.zeros(()).where(mask, -math.inf)
        bias = bias + added.double()
    outs, lses = [], []
    for head in heads:
        kv = head // (h // h_kv)
        s = q[:, head] @ k[:, kv].mT * (d**-0.5 if scale is None else scale)
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        s = s + bias[:, head]
        lse = s.detach().logsumexp(-1)
        p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0)[..., None])
        p = p / (p.sum(-1, keepdim=True) + (lse == -math.inf)[..., None])
        if dropout_mask is not None:
            p = p * dropout_mask.expand(b, h, n, m)[:, head] / (1 - dropout_p)
        outs.append((p @ v[:, kv])[:, rows])
        lses.append(lse[:, rows])
    out, lse = torch.stack(outs, 1), torch.stack(lses, 1)
    grads = () if g is None else torch.autograd.grad(out, (q, k, v), g.double(), allow_unused=True)
    return out.detach(), lse.detach(), *(grads[:1] and (grads[0][:, heads][:, :, rows], *grads[1:]))


def assert_exact(q, k, v, g, **options):
    """Forward and backward against the oracle, in one block and in many small ones."""
    out, lse, dq, dk, dv = oracle(q, k, v, g, **options)
    floor = grad_floor(q, k, v, g, options.get("scale"))
    for rows, limit in ((scores._ROWS, scores._CPU_SCORES), (3, 40)):
        with mock.patch.multiple(scores, _ROWS=rows, _CPU_SCORES=limit):
            got = exact_attention(q, k, v, **options)
            grads = exact_attention_grad(q, k, v, g, **options)
        assert_close(got[0], out)
        assert_close(got[1], lse)
        assert_close(grads[0], dq, floor)
        assert_close(grads[1], dk, floor)
        assert_close(grads[2], dv)


# --- against PyTorch -----------------------------------------------------------------------------


@few
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
    options = {"causal": causal, "scale": scale}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale, enable_gqa=True)
    assert_close(exact_attention(q, k, v, **options)[0], want.detach())
    wanted = torch.autograd.grad(want, leaves, g)
    floor = grad_floor(q, k, v, g, scale)
    for got, grad in zip(exact_attention_grad(q, k, v, g, **options), wanted, strict=True):
        assert_close(got, grad, floor)


def test_16_bit_inputs_are_taken_as_they_are():
    q, k, v, g = inputs(n=50, d=16, dtype=torch.bfloat16)
    assert_close(exact_attention(q, k, v)[0], exact_attention(*(x.double() for x in (q, k, v)))[0])
    dq, dk, dv = exact_attention_grad(q, k, v, g)
    assert dq.dtype == dk.dtype == dv.dtype == torch.float64


def test_float32_results_are_float32_and_close():
    q, k, v, g = inputs(n=50, d=16)
    for pair in zip(
        (
            *exact_attention(q, k, v, dtype=torch.float32),
            *exact_attention_grad(q, k, v, g, dtype=torch.float32),
        ),
        (*exact_attention(q, k, v), *exact_attention_grad(q, k, v, g)),
        strict=True,
    ):
        assert pair[0].dtype == torch.float32
        assert (pair[0] - pair[1]).abs().max() < 1e-5 * pair[1].abs().max()


# --- against explicit matrices -------------------------------------------------------------------

KEEP = torch.rand(1, 2, 7, 9, generator=torch.Generator().manual_seed(5)) > 0.4
KEEP[..., 3, :] = False
ADDED = torch.where(KEEP, normal(1, 2, 7, 9, seed=6), -math.inf)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (2, 1)},
        {"window": (0, -1)},
        {"window": (-1, 2), "causal": True},
        {"window": (3, 0), "align": "bottom_right"},
        {"softcap": 1.5},
        {"softcap": 0.0},
        {"alibi_slopes": torch.tensor([0.5, 0.25])},
        {"alibi_slopes": torch.tensor([0.5, 0.25]), "align": "bottom_right", "causal": True},
        {"mask": KEEP},
        {"mask": KEEP[0, 0]},
        {"mask": KEEP[:, :1, :1]},
        {"mask": ADDED},
        {"mask": ADDED, "softcap": 0.7, "causal": True},
        {"causal": True, "align": "bottom_right"},
        {"causal": True, "align": "top_left"},
        {"rows": torch.tensor([6, 0, 3, 4])},
        {"heads": [1]},
        {"dropout_mask": KEEP, "dropout_p": 0.25},
        {"scale": 0.0},
    ],
    ids=lambda options: "-".join(options),
)
def test_each_option(options):
    q, k, v, g = inputs(n=7, m=9, d_v=3)
    rows, heads = options.get("rows", torch.arange(7)), options.get("heads", [0, 1])
    assert_exact(q, k, v, g[:, heads][:, :, rows], **options)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize(("n", "m"), [(3, 11), (11, 3), (1, 6), (6, 1), (1, 1)])
def test_causal_with_unequal_lengths(n, m, align):
    q, k, v, g = inputs(n=n, m=m)
    assert_exact(q, k, v, g, causal=True, align=align)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_see_only_themselves(causal, align):
    cu_q, cu_k = torch.tensor([0, 4, 4, 5, 12]), torch.tensor([0, 3, 5, 11, 11])
    q, k, v, g = inputs(h=4, h_kv=2, n=12, m=11)
    options = {"causal": causal, "align": align, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    assert_exact(q, k, v, g, **options)
    out, lse = exact_attention(q, k, v, **options)
    alone = exact_attention(q[:, :, 4:5], k[:, :, 5:11], v[:, :, 5:11], causal=causal, align=align)
    assert_close(out[:, :, 4:5], alone[0])
    assert (out[:, :, 5:] == 0).all()  # the last segment has queries but no key
    assert (lse[:, :, 5:] == -math.inf).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mixture_of_options(data):
    draw, size = data.draw, st.integers(1, 9)
    b, h_kv, group, n, m = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(size),
        draw(size),
    )
    h, seed = h_kv * group, draw(st.integers(0, 99))
    q, k, v, g = inputs(b, h, h_kv, n, m, seed=seed)
    rows = torch.tensor(draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5)))
    heads = draw(st.lists(st.integers(0, h - 1), min_size=1, max_size=3, unique=True))
    options = {
        "causal": draw(st.booleans()),
        "align": draw(st.sampled_from(("top_left", "bottom_right"))),
        "window": draw(st.sampled_from(((-1, -1), (2, -1), (0, 0), (-1, 1), (3, 2)))),
        "mask": draw(st.sampled_from((None, normal(n, m) > -0.5, normal(b, 1, 1, m)))),
        "softcap": draw(st.sampled_from((None, 2.0))),
        "alibi_slopes": draw(st.sampled_from((None, torch.linspace(0.1, 0.3, h)))),
        "dropout_mask": normal(b, h, n, m, seed=seed) > -0.7,
        "dropout_p": 0.25,
        "rows": rows.unique(),
        "heads": heads,
    }
    assert_exact(q, k, v, g[:, heads][:, :, rows.unique()], **options)


def test_rows_and_heads_pick_from_the_whole_result():
    q, k, v, _ = inputs(b=2, h=4, h_kv=2, n=20)
    rows, heads = torch.tensor([13, 2, 2]), torch.tensor([3, 0])
    out, lse = exact_attention(q, k, v, causal=True)
    some = exact_attention(q, k, v, causal=True, rows=rows, heads=heads)
    assert torch.equal(some[0], out[:, heads][:, :, rows]) or (
        (some[0] - out[:, heads][:, :, rows]).abs().max() < 1e-14
    )
    assert_close(some[1], lse[:, heads][:, :, rows])


def test_gradients_of_parts_sum_to_the_whole():
    q, k, v, g = inputs(b=2, h=4, h_kv=2, n=20)
    _, dk, dv = exact_attention_grad(q, k, v, g, causal=True)
    parts = [
        exact_attention_grad(q, k, v, g[:, heads][:, :, rows], causal=True, rows=rows, heads=heads)
        for rows in torch.arange(20).split(7)
        for heads in ([0, 3], [1, 2])
    ]
    assert_close(sum(part[1] for part in parts), dk)
    assert_close(sum(part[2] for part in parts), dv)


# --- cases from public trouble reports -----------------------------------------------------------


def test_fully_masked_rows_are_zero_and_never_nan():
    """pytorch#103749, #110213: versions gave NaN, zeros or uniform averages."""
    q, k, v, g = inputs(n=5)
    keep = torch.ones(5, 5, dtype=torch.bool)
    keep[2] = False
    out, lse = exact_attention(q, k, v, mask=keep)
    grads = exact_attention_grad(q, k, v, g, mask=keep)
    assert (out[:, :, 2] == 0).all()
    assert (lse[:, :, 2] == -math.inf).all()
    assert (grads[0][:, :, 2] == 0).all()
    assert all(x.isfinite().all() for x in (out, *grads))
    blind = torch.zeros(5, 5, dtype=torch.bool)
    assert all((x == 0).all() for x in exact_attention_grad(q, k, v, g, mask=blind))


def test_huge_bf16_logits_stay_finite():
    """pytorch#121558: q = k = 133120 gave NaN in the kernel."""
    q = torch.full((1, 1, 4, 8), 133120.0, dtype=torch.bfloat16)
    rows = attention_rows(q, q, normal(1, 1, 4, 8, dtype=torch.bfloat16))
    assert rows.out.isfinite().all()
    assert rows.max_logit.item() == pytest.approx(133120.0**2 * 8**0.5)


def test_bool_true_keeps_and_float_zero_keeps():
    """pytorch#170415, transformers#38094: polarity."""
    q, k, v, _ = inputs(n=7, m=9)
    added = torch.zeros(1, 2, 7, 9).masked_fill(~KEEP, -math.inf)
    by_bool, by_float = exact_attention(q, k, v, mask=KEEP), exact_attention(q, k, v, mask=added)
    assert_close(by_bool[0], by_float[0])


def test_zero_one_float_mask_is_added_and_warned_about():
    q, k, v, _ = inputs(n=7, m=9)
    with pytest.warns(UserWarning, match="only 0 and 1"):
        out, _ = exact_attention(q, k, v, mask=KEEP.float())
    assert_close(out, oracle(q, k, v, mask=KEEP.float())[0])


def test_real_strides_change_nothing():
    """pytorch#187506, #191937: non-contiguous and stride-0 inputs."""
    q, k, v, g = inputs(h=4, h_kv=4, n=33, d=8)
    turned = [x.mT.contiguous().mT for x in (q, k, v, g)]
    assert turned[0].stride(-1) != 1
    for got, want in zip(exact_attention_grad(*turned), exact_attention_grad(q, k, v, g), strict=True):
        assert_close(got, want)
    one_k, one_v = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    assert_close(exact_attention(q, one_k, one_v)[0], exact_attention(q, k[:, :1], v[:, :1])[0])


@pytest.mark.parametrize(("n", "m", "d"), [(1, 1, 16), (5, 2, 16), (2, 5, 1)])
def test_tiny_shapes_have_finite_gradients(n, m, d):
    """flash-attention#334, #443: NaN in dq only."""
    q, k, v, g = inputs(n=n, m=m, d=d, sd=3.0)
    grads = exact_attention_grad(q, k, v, g, causal=True, align="bottom_right")
    assert all(x.isfinite().all() for x in grads)


def test_windows_are_inclusive():
    """flash-attention#1133, transformers#39408: (w, 0) keeps w + 1 keys."""
    q, k, v = torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4)
    _, lse = exact_attention(q, k, v, window=(3, 0))
    assert lse.exp().round().flatten().tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]
    whole = exact_attention(*inputs(n=9)[:3], window=(8, 0))[0]
    assert_close(whole, exact_attention(*inputs(n=9)[:3], causal=True)[0])


@pytest.mark.parametrize("n", [62, 63, 64, 65, 66, 127, 128, 129])
def test_lengths_around_block_sizes(n):
    """torch-spyre#4331: only multiples of 64 were right."""
    q, k, v, g = inputs(h=1, n=n, d=3)
    assert_exact(q, k, v, g, causal=True)


def test_a_value_of_one_comes_back_as_one():
    """flash-attention#2721: a row sum in another precision shows here."""
    q, k, v, _ = inputs(n=300)
    out, _ = exact_attention(q, k, torch.ones_like(v), causal=True)
    assert (out - 1).abs().max() < 1e-14


# --- the house's own rules -----------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside had."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, torch.Tensor):
                owned = x.untyped_storage().nbytes() // x.element_size()
                self.numel = max(self.numel, owned)
        return made


@pytest.mark.parametrize("n", [512, 4096])
def test_memory_is_linear_in_length(n):
    q, k, v, g = inputs(h=1, n=n, d=4, dtype=torch.float32)
    with Largest() as seen:
        exact_attention(q, k, v, causal=True, softcap=5.0)
        exact_attention_grad(q, k, v, g)
    assert seen.numel <= 128 * n


def test_nothing_else_is_touched():
    q, k, v, g = (x.requires_grad_() for x in inputs(n=40))
    before, rng = [x.detach().clone() for x in (q, k, v, g)], torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = (
            *attention_rows(q, k, v, dtype=torch.float32),
            *exact_attention_grad(q, k, v, g, dtype=torch.float32),
        )
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()
    assert not any(x.requires_grad for x in results)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v, g), before, strict=True))
    plain = attention_rows(q, k, v)
    assert (results[0] - plain.out).abs().max() < 1e-5  # bfloat16 would leave 1e-3


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_float32_is_full_float32_inside_and_put_back_after(precision):
    q, k, v, _ = inputs(n=10)
    inside = []

    def fail(*_, **__):
        inside.append(torch.backends.mkldnn.matmul.fp32_precision)
        raise MemoryError

    found = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        exact_attention(q, k, v, dtype=torch.float32)
        with mock.patch.object(exact, "_forward", fail), pytest.raises(MemoryError):
            exact_attention(q, k, v, dtype=torch.float32)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(found)
    assert inside == ["ieee"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_reaches_the_result(which, value):
    tensors = inputs(n=6)
    tensors[which][0, 0, 2, 1] = value
    out, _ = exact_attention(*tensors[:3])
    assert not out[0, 0].isfinite().all()
    assert out[0, 1].isfinite().all()
    exact_attention_grad(*tensors)


@pytest.mark.parametrize(
    ("b", "h", "n", "m"), [(1, 2, 0, 3), (1, 2, 3, 0), (0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 0)]
)
def test_lengths_of_zero_give_empty_results(b, h, n, m):
    q, k, g = torch.ones(b, h, n, 4), torch.ones(b, h, m, 4), torch.ones(b, h, n, 4)
    rows = attention_rows(q, k, k, causal=True)
    assert rows.out.shape == (b, h, n, 4)
    assert rows.lse.shape == (b, h, n)
    assert (rows.max_logit.numel(), rows.entropy.numel()) == (b * h, b * h)
    if m == 0:
        assert (rows.out == 0).all()
        assert (rows.lse == -math.inf).all()
        assert (rows.max_logit == -math.inf).all()
    grads = exact_attention_grad(q, k, k, g)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    assert plain_attention(q, k, k).shape == q.shape
    assert exact_attention(q, k, k, heads=[])[0].shape == (b, 0, n, 4)


def test_a_grad_out_of_another_shape_is_named():
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match=r"shape of out, \(1, 4, 1, 8\), got \(1, 4, 3, 8\)"):
        exact_attention_grad(q, q, q, q, rows=torch.tensor([1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_only_wide_precisions_are_called_exact(dtype):
    q, k, v, g = inputs()
    with pytest.raises(ValueError, match=f"dtype must be float64 or float32, got {dtype}"):
        exact_attention(q, k, v, dtype=dtype)
    with pytest.raises(ValueError, match="dtype must be"):
        exact_attention_grad(q, k, v, g, dtype=dtype)


# --- statistics of the rows ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"mask": ADDED[..., :7]},
        {"mask": KEEP[..., :7]},
        {"softcap": 0.5},
        {"alibi_slopes": torch.full((2,), 0.5)},
    ],
    ids=lambda options: "-".join(options) or "none",
)
def test_largest_logit_and_entropy(options):
    q, k, v, _ = inputs(n=7)
    for rows in (scores._ROWS, 2):
        with mock.patch.object(scores, "_ROWS", rows):
            stats = attention_rows(q, k, v, **options)
        for head in range(2):
            # Attention over the identity gives the probabilities themselves.
            p = oracle(q, k, torch.eye(7).expand(1, 2, 7, 7), **options)[0][0, head]
            raw = (q @ k.mT)[0, head] / 2
            assert stats.max_logit[0, head].item() == pytest.approx(raw[p > 0].max().item(), rel=1e-14)
            shares = [
                -(r[r > 0] * r[r > 0].log()).sum() / math.log((r > 0).sum())
                for r in p if (r > 0).sum() > 1
            ]  # fmt: skip
            assert stats.entropy[0, head].item() == pytest.approx(sum(shares).item() / len(shares), rel=1e-12)


def test_entropy_runs_from_one_key_to_all():
    zero = torch.zeros(1, 1, 6, 4)
    assert attention_rows(zero, zero, zero, causal=True).entropy.item() == pytest.approx(1.0)
    sharp = torch.eye(6)[None, None] * 100
    assert attention_rows(sharp, sharp, sharp).entropy.item() == pytest.approx(0.0, abs=1e-12)
    assert attention_rows(zero, zero, zero, window=(0, 0)).entropy.isnan().all()


def test_lowest_finite_masks_hide_keys_from_the_statistics():
    q, k, v, _ = inputs(n=7, m=9)
    lowest = torch.zeros(1, 2, 7, 9).masked_fill(~KEEP, torch.finfo(torch.float32).min)
    got, want = attention_rows(q, k, v, mask=lowest), attention_rows(q, k, v, mask=KEEP)
    assert_close(got.max_logit, want.max_logit)
    assert_close(got.entropy, want.entropy)


# --- the textbook baseline -----------------------------------------------------------------------


def test_plain_attention_rounds_every_step():
    q, k, v, _ = inputs(n=30, d=16, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.float16):
        got = plain_attention(q, k, v, causal=True)
    s = (q @ k.mT) * 0.25
    s = s.masked_fill(~torch.ones(30, 30, dtype=torch.bool).tril(), -math.inf)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.softmax(s, -1) @ v)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "align": "bottom_right", "window": (2, -1)},
        {"mask": KEEP, "softcap": 0.9},
        {"mask": ADDED, "alibi_slopes": torch.tensor([0.5, 0.2]), "dropout_mask": KEEP, "dropout_p": 0.5},
        {"rows": torch.tensor([3, 6, 0]), "heads": [1]},
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_plain_attention_in_float64_is_exact(options):
    q, k, v, g = (x.requires_grad_() for x in inputs(n=7, m=9))
    rows, heads = options.get("rows", torch.arange(7)), options.get("heads", [0, 1])
    g = g.detach()[:, heads][:, :, rows]
    out = plain_attention(q, k, v, **options)
    assert_close(out.detach(), exact_attention(q, k, v, **options)[0])
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
    want = exact_attention_grad(q, k, v, g, **options)
    for got, wanted in zip((dq[:, heads][:, :, rows], dk, dv), want, strict=True):
        assert_close(got, wanted)
