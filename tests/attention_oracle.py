"""Attention by its definition, the whole [b, h, q, k] matrix at once, in numpy's longdouble.

80 bits on x86, so that what differs from it is exact attention's own rounding.
"""

import math
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from stabilitykit.numerics import scores
from stabilitykit.numerics.exact import exact_attention, exact_attention_grad

CLOSE = 1e-12  # of the largest entry
# What dq and dk sum up may cancel, down to a gradient of 0; then float64 owes them 8 ulps of the summands.
SUMMANDS = 8 * 2.0**-52


class Oracle(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    summands_dq: np.ndarray
    summands_dk: np.ndarray


def normal(*shape, seed=0, sd=1.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g, dtype=torch.float64) * sd).to(dtype)


def inputs(b=1, h=2, h_kv=None, n=7, m=None, d=4, d_v=None, seed=0, sd=1.0, dtype=torch.float64):
    """q, k, v and grad_out."""
    h_kv, m, d_v = h_kv or h, n if m is None else m, d_v or d
    sizes = ((b, h, n, d), (b, h_kv, m, d), (b, h_kv, m, d_v), (b, h, n, d_v))
    sds = (sd, sd, 1.0, 1.0)
    return [normal(*s, seed=9 * seed + i, sd=sds[i], dtype=dtype) for i, s in enumerate(sizes)]


def oracle(
    q, k, v, grad_out=None, *, causal=False, align="top_left", mask=None, scale=None, window=None,
    softcap=None, alibi_slopes=None, cu_seqlens_q=None, cu_seqlens_k=None, rows=None, heads=None,
    dropout_mask=None, dropout_p=0.0,
):  # fmt: skip
    """What exact_attention and exact_attention_grad should give, and how large what they sum up is."""
    (b, h, n, d), (h_kv, m) = q.shape, k.shape[1:3]
    rows = list(range(n)) if rows is None else rows.tolist()
    heads = list(range(h)) if heads is None else [int(head) for head in heads]
    kv = [head // (h // h_kv) for head in heads]
    scale = 1 / np.sqrt(np.longdouble(d)) if scale is None else scale
    q, k, v = _wide(q)[:, heads][:, :, rows], _wide(k)[:, kv], _wide(v)[:, kv]

    def part(x):
        return _wide(x.expand(b, h, n, m))[:, heads][:, :, rows]

    seen, ahead = _positions(n, m, causal, align, window or (-1, -1), cu_seqlens_q, cu_seqlens_k)
    s, slope = q @ _turned(k) * scale, 1
    if softcap:
        tanh = np.tanh(s / softcap)
        s, slope = softcap * tanh, 1 - tanh * tanh
    if alibi_slopes is not None:
        s = s - _wide(alibi_slopes.expand(b, h))[:, heads, None, None] * abs(ahead[rows])
    if mask is not None:
        s = np.where(part(mask) > 0, s, -np.inf) if mask.dtype == torch.bool else s + part(mask)
    s = np.where(seen[rows], s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(top == -np.inf, 0, top))
    total = p.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p /= np.where(total == 0, 1, total)
    keep = 1 if dropout_mask is None else part(dropout_mask) / (1 - np.longdouble(dropout_p))

    g = _wide(torch.zeros(*q.shape[:3], v.shape[3]) if grad_out is None else grad_out)
    dp = g @ _turned(v) * keep
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * slope * scale
    size = abs(g) @ _turned(abs(v)) * keep
    size = p * (size + (p * size).sum(-1, keepdims=True)) * slope * abs(scale)
    shared = (
        _shared(x, b, h_kv, kv) for x in (_turned(ds) @ q, _turned(p * keep) @ g, _turned(size) @ abs(q))
    )
    dk, dv, summands_dk = shared
    return Oracle((p * keep) @ v, lse, ds @ k, dk, dv, size @ abs(k), summands_dk)


def assert_exact(q, k, v, g, **options):
    """Forward and backward are the oracle's, in one block and in many small ones."""
    want = oracle(q, k, v, g, **options)
    for rows, limit in ((scores._ROWS, scores._CPU_SCORES), (3, 40)):
        with mock.patch.multiple(scores, _ROWS=rows, _CPU_SCORES=limit):
            got = (*exact_attention(q, k, v, **options), *exact_attention_grad(q, k, v, g, **options))
        floors = (0, 0, _largest(want.summands_dq), _largest(want.summands_dk), 0)
        for name, mine, its, floor in zip(want._fields, got, want, floors, strict=False):
            assert mine.dtype == torch.float64
            assert_close(mine, its, name, SUMMANDS * floor)


def assert_close(got, want, name="", floor=0.0):
    """Agreement to CLOSE of the largest entry, with non-finite entries in the same places."""
    got, want = (_wide(x) if isinstance(x, torch.Tensor) else x for x in (got, want))
    assert got.shape == want.shape, name
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all(), name
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True), name
    error, size = _largest(got[finite] - want[finite]), _largest(want[finite])
    assert error <= CLOSE * size + floor, f"{name}: {error:.3g} against {size:.3g}"


def _wide(x):
    return x.detach().double().numpy().astype(np.longdouble)


def _turned(x):
    return x.swapaxes(-1, -2)


def _largest(x):
    return float(abs(x).max(initial=0))


def _shared(x, b, h_kv, kv):
    """Per key head, the sum over the query heads that share it."""
    total = np.zeros((b, h_kv, *x.shape[2:]), dtype=np.longdouble)
    for i, head in enumerate(kv):
        total[:, head] += x[:, i]
    return total


def _positions(n, m, causal, align, window, cu_q, cu_k):
    """[n, m]: whether row i may see key j, and how far j is ahead of the key that i is level with."""
    left, right = (math.inf if reach < 0 else reach for reach in window)
    seen, ahead = np.zeros((n, m), dtype=bool), np.zeros((n, m), dtype=np.longdouble)
    cu_q, cu_k = ([0, x] if cu is None else cu.tolist() for cu, x in ((cu_q, n), (cu_k, m)))
    for a, z, c, y in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        shift = (y - c) - (z - a) if align == "bottom_right" else 0
        for i in range(a, z):
            for j in range(c, y):
                ahead[i, j] = far = (j - c) - (i - a) - shift
                seen[i, j] = -left <= far <= (min(right, 0) if causal else right)
    return seen, ahead
