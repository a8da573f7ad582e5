"""Exact attention, forward and backward: the reference every kernel is measured against.

Computed block by block over heads and query rows, so memory grows linearly with the length.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stabilitykit.numerics.scores import Scores, require


class AttentionRows(NamedTuple):
    """What one pass over the score blocks yields; q counts the selected rows, h the selected heads.

    `out` [b, h, q, d]; `lse` [b, h, q], natural logarithm; `max_logit` [b, h], the largest
    q k^T * scale of a visible key, before softcap and bias (-inf if no key is visible); `entropy`
    [b, h] in 0..1, the mean over rows of the entropy of the attention row over log(visible keys),
    rows with fewer than 2 visible keys left out (NaN if none is left).
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    entropy: Tensor


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    align: Literal["top_left", "bottom_right"] = "top_left",
    mask: Tensor | None = None,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    rows: Tensor | None = None,
    heads: Tensor | Sequence[int] | None = None,
    dropout_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention output [b, h, q, d] and log-sum-exp [b, h, q] (natural logarithm), in `dtype`.

    Rows that see no key have out 0 and lse -inf. NaN and infinity in the inputs reach the results;
    a value that is masked for one row but seen by its neighbours may reach that row too, as in
    any kernel, because 0 * NaN is NaN.

    Args:
        q: [b, h, q, d].
        k: [b, h_kv, k, d]; query head i uses key head i // (h / h_kv).
        v: [b, h_kv, k, d_v].
        causal: row i sees the keys up to the one it is level with.
        align: the key that row i is level with: i, or i + (k - q). Windows and ALiBi use it too.
        mask: broadcastable to [b, h, q, k]; bool (True = keep) or float (added).
        scale: of q k^T; 1 / sqrt(d) by default.
        window: keys seen to the left and right of the level one, inclusive; -1 = unbounded.
        softcap: scores become softcap * tanh(scores / softcap), before bias and mask; 0 = off.
        alibi_slopes: [h] or [b, h]; adds -slope * distance to the level key.
        cu_seqlens_q: [n + 1] offsets of n sequences packed in one (b = 1), each on its own.
        cu_seqlens_k: the same for the keys.
        rows: int64 indices of the query rows wanted; results have them in this order.
        heads: indices of the query heads wanted; results have them in this order.
        dropout_mask: bool, broadcastable to [b, h, q, k], True where the kernel kept a probability.
        dropout_p: the probability it dropped with; what it kept is divided by 1 - dropout_p.
        dtype: float64, or float32 (with TF32 off).

    Raises:
        ValueError: shapes, dtypes, devices, indices or options that do not fit together.

    >>> q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
    >>> exact_attention(q, q, v, causal=True)[0].flatten().tolist()
    [1.0, 2.0]
    """
    return attention_rows(**locals())[:2]


def attention_rows(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionRows:
    """The results of `exact_attention` (same options) and, from the same pass, two statistics.

    The largest logit is the signal of arXiv 2309.14322, the entropy that of arXiv 2303.06296.
    """
    call = Scores(q, k, v, **options)
    with _exactly(call):
        return _forward(call)


def exact_attention_grad(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact gradients (dq, dk, dv) of sum(out * grad_out), in `dtype`.

    Options as in `exact_attention`; `grad_out` has the shape of its out. With `rows` or `heads`,
    dq has those rows and heads only, and dk and dv keep the full shapes of k and v but hold only
    what the selected rows and heads contribute (an index given twice counts twice).

    Raises:
        ValueError: as `exact_attention`, and a grad_out whose shape is not that of out.
    """
    call = Scores(q, k, v, **options)
    got, expected = tuple(grad_out.shape), (*call.shape, v.shape[-1])
    require(got == expected, f"grad_out must have the shape of out, {expected}, got {got}")
    with _exactly(call):
        return _backward(call, grad_out)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """softmax(q k^T * scale) v [b, h, q, d_v], every step rounded to the inputs' own dtype.

    The textbook baseline of arXiv 2405.02803, differentiable by autograd; options of
    `exact_attention` but for `dtype`. It holds all scores of the selected rows and heads at once.
    """
    call = Scores(q, k, v, **options, dtype=q.dtype)
    pairs, block = slice(0, len(call.head)), call.block(slice(0, len(call.row)))
    with torch.autocast(q.device.type, enabled=False):
        q_, k_, v_ = call.take(pairs)
        raw = _product(q_, k_[:, block.some].mT) * call.factor
        logits, _ = call.logits(raw, pairs, block)
        blind = (logits == -math.inf).all(-1, keepdim=True)
        probs = torch.softmax(logits.masked_fill(blind, 0), -1).masked_fill(blind, 0)
        out = _product(call.dropped(probs, pairs, block), v_[:, block.some])
    return out.view(*call.shape, v.shape[-1])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b rounded once to their dtype, with sums in float32, as GPUs do it, for 16-bit formats."""
    if a.device.type != "cpu" or a.dtype not in (torch.bfloat16, torch.float16):
        return a @ b
    # Without AVX-512, torch multiplies 16-bit matrices in a scalar loop, about 20 times slower.
    return (a.float() @ b.float()).to(a.dtype)


def _forward(call: Scores) -> AttentionRows:
    n_pairs, n_rows, d_v = len(call.head), len(call.row), call.v.shape[-1]
    out, lse = call.full(0, n_pairs, n_rows, d_v), call.full(-math.inf, n_pairs, n_rows)
    max_logit, entropy = call.full(-math.inf, n_pairs), call.full(0, n_pairs)
    counted = call.full(0, n_pairs)
    for pairs in call.chunks():
        q, k, v = call.take(pairs)
        q = q * call.factor
        for block in call.blocks():
            raw = torch.bmm(q[:, block.rows], k[:, block.some].mT)
            logits, _ = call.logits(raw, pairs, block)
            peak, seen = call.visible(raw, logits, block)
            max_logit[pairs] = torch.maximum(max_logit[pairs], peak.amax(-1))
            weights, total, lse[pairs, block.rows] = _softmax(logits)
            # A weight of 0 has a shifted logit of -inf or nearly so: clamped, their product is 0.
            lost = logits.clamp_(min=-1e3).mul_(weights).sum(-1, keepdim=True)
            share = (total.log() - lost / total).squeeze(-1) / seen.log()
            entropy[pairs] += share.where(seen > 1, 0).sum(-1)
            counted[pairs] += (seen > 1).sum(-1)
            weights = call.dropped(weights, pairs, block)
            out[pairs, block.rows] = torch.bmm(weights, v[:, block.some]).div_(total)
    entropy /= counted
    shape, heads = call.shape, call.shape[:2]
    return AttentionRows(out.view(*shape, d_v), lse.view(shape), max_logit.view(heads), entropy.view(heads))


def _backward(call: Scores, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad_out = grad_out.flatten(0, 1)
    dq = call.full(0, len(call.head), len(call.row), call.q.shape[-1])
    dk, dv = call.full(0, *call.k.shape), call.full(0, *call.v.shape)
    for pairs in call.chunks():
        q, k, v = call.take(pairs)
        q, grad = q * call.factor, grad_out[pairs].to(call.dtype)
        dk_pairs, dv_pairs = torch.zeros_like(k), torch.zeros_like(v)
        for block in call.blocks():
            q_rows, k_seen, v_seen = q[:, block.rows], k[:, block.some], v[:, block.some]
            logits, tanh = call.logits(torch.bmm(q_rows, k_seen.mT), pairs, block)
            weights, total, _ = _softmax(logits)
            grad_rows = grad[:, block.rows] / total  # so that the weights need no division
            kept = call.dropped(weights, pairs, block)
            dv_pairs[:, block.some].baddbmm_(kept.mT, grad_rows)
            slope = torch.bmm(grad_rows, v_seen.mT, out=logits)
            slope = call.dropped(slope, pairs, block).mul_(weights)
            slope.addcmul_(weights, slope.sum(-1, keepdim=True) / total, value=-1)
            if tanh is not None:
                slope.mul_(1 - tanh * tanh)
            dq[pairs, block.rows] = torch.bmm(slope, k_seen).mul_(call.factor)
            dk_pairs[:, block.some].baddbmm_(slope.mT, q_rows)
        kv_pair = call.batch[pairs] * call.k.shape[1] + call.kv_head[pairs]
        dk.flatten(0, 1).index_add_(0, kv_pair, dk_pairs)
        dv.flatten(0, 1).index_add_(0, kv_pair, dv_pairs)
    return dq.view(*call.shape, dq.shape[-1]), dk, dv


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(logits - max), its row sums (1 where all is hidden), lse; shifts `logits` in place."""
    top = logits.amax(-1, keepdim=True)
    weights = logits.sub_(top.masked_fill(top == -math.inf, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1)
    return weights, total.masked_fill_(total == 0, 1), lse


@contextmanager
def _exactly(call: Scores) -> Iterator[None]:
    """No autograd, autocast or TF32, and only a dtype in which results may be called exact."""
    allowed = (torch.float64, torch.float32)
    require(call.dtype in allowed, f"dtype must be float64 or float32, got {call.dtype}")
    strict = _ieee_float32() if call.dtype == torch.float32 else nullcontext()
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False), strict:
        yield


@contextmanager
def _ieee_float32() -> Iterator[None]:
    """Float32 matrix products without TF32 or bf16 shortcuts; the settings found are put back."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch < 2.9
        found = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(found)
        return
    mkldnn: Any = torch.backends.mkldnn  # its stubs do not list matmul
    settings = (torch.backends.cuda.matmul, mkldnn.matmul)
    found = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, found, strict=True):
            setting.fp32_precision = precision
