"""Exact attention, forward and backward: the reference every kernel is measured against.

Computed block by block over heads and query rows, so memory grows linearly with the length.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stabilitykit.numerics.scores import Block, Scores, require


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
    call = Scores(**locals())
    with exactly(call):
        return _forward(call, statistics=False)[:2]


def attention_rows(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> AttentionRows:
    """The results of `exact_attention` (same options) and, from the same pass, two statistics.

    The largest logit is the signal of arXiv 2309.14322, the entropy that of arXiv 2303.06296.
    """
    call = Scores(q, k, v, **options)
    with exactly(call):
        return _forward(call, statistics=True)


def exact_attention_grad(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact gradients (dq, dk, dv) of sum(out * grad_out), in `dtype`.

    Options as in `exact_attention`; `grad_out` has the shape of its out. With `rows` or `heads`,
    dq has those rows and heads only, and dk and dv keep the full shapes of k and v but hold only
    what the selected rows and heads contribute (an index given twice counts twice).

    Raises:
        ValueError: as `exact_attention`, and a grad_out that is not like out.
    """
    call = Scores(q, k, v, **options)
    got, expected = tuple(grad_out.shape), (*call.shape, v.shape[-1])
    require(got == expected, f"grad_out must have the shape of out, {expected}, got {got}")
    require(grad_out.device == q.device, f"grad_out must be on {q.device}, got {grad_out.device}")
    require(grad_out.is_floating_point(), f"grad_out must be floating-point, got {grad_out.dtype}")
    with exactly(call):
        return _backward(call, grad_out)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """softmax(q k^T * scale) v [b, h, q, d_v], every step rounded to the inputs' own dtype.

    The textbook baseline of arXiv 2405.02803, differentiable by autograd; options of
    `exact_attention` but for `dtype`. It holds all scores of the selected rows and heads at once.
    """
    call = Scores(q, k, v, **options, dtype=q.dtype)
    pairs, block = slice(0, len(call.head)), call.block(slice(0, len(call.row)))
    with torch.autocast(q.device.type, enabled=False):
        q_ = q[:, call.heads_of_q][:, :, call.row].flatten(0, 1)
        k_, v_ = (x[:, call.heads_of_kv][:, :, block.some].flatten(0, 1) for x in (k, v))
        raw = _product(q_, k_.mT) * call.factor
        logits, _ = call.logits(raw, pairs, block)
        blind = (logits == -math.inf).all(-1, keepdim=True)
        probs = torch.softmax(logits.masked_fill(blind, 0), -1).masked_fill(blind, 0)
        out = _product(call.dropped(probs, pairs, block), v_)
    return out.view(*call.shape, v.shape[-1])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b rounded once to their dtype, with sums in float32, as GPUs do it, for 16-bit formats."""
    if a.device.type != "cpu" or a.dtype not in (torch.bfloat16, torch.float16):
        return a @ b
    # Without AVX-512, torch multiplies 16-bit matrices in a scalar loop, about 20 times slower.
    return (a.float() @ b.float()).to(a.dtype)


def _forward(call: Scores, statistics: bool) -> AttentionRows:
    n_pairs, n_rows, d_v = len(call.head), len(call.row), call.v.shape[-1]
    out, lse = call.full(0, n_pairs, n_rows, d_v), call.full(-math.inf, n_pairs, n_rows)
    max_logit, entropy = call.full(-math.inf, n_pairs), call.full(0, n_pairs)
    counted, rooms, operands = call.full(0, n_pairs), call.rooms(2), _Operands(call)
    for pairs in call.chunks():
        q, k, v = operands.load(pairs)
        for block in call.blocks:
            one, two = (_part(room, len(q), block) for room in rooms)
            raw = one.baddbmm_(q[:, block.rows], k[..., block.some], beta=0, alpha=call.factor)
            logits, _ = call.logits(raw, pairs, block)
            top = logits.amax(-1, keepdim=True)
            probs, blind = _softmax(call, logits, two)
            rows_lse = (top - probs.amax(-1, keepdim=True).log()).squeeze(-1)
            if statistics:
                peak, seen = call.visible(raw, logits, top, block)
                max_logit[pairs] = torch.maximum(max_logit[pairs], peak.amax(-1))
                entropy[pairs] += _entropy(logits, probs, top, rows_lse, seen)
                counted[pairs] += (seen > 1).sum(-1)
            rows_out = torch.bmm(call.dropped(probs, pairs, block), v[..., block.some].mT)
            out[pairs, block.rows], lse[pairs, block.rows] = _unless(blind, rows_out), rows_lse
    entropy /= counted
    shape, heads = call.shape, call.shape[:2]
    return AttentionRows(out.view(*shape, d_v), lse.view(shape), max_logit.view(heads), entropy.view(heads))


def _backward(call: Scores, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, rooms, operands = grad_out.flatten(0, 1), call.rooms(3), _Operands(call)
    dq = call.full(0, len(call.head), len(call.row), call.q.shape[-1])
    dk, dv = call.full(0, *call.k.shape), call.full(0, *call.v.shape)
    sums = [torch.empty_like(room) for room in operands.rooms[1:]]
    for pairs in call.chunks():
        q, k, v = operands.load(pairs)
        grad = grad_out[pairs].to(call.dtype)
        dk_pairs, dv_pairs = (room[: len(k)].zero_() for room in sums)
        for block in call.blocks:
            one, two, three = (_part(room, len(q), block) for room in rooms)
            q_rows, k_seen, v_seen = q[:, block.rows], k[..., block.some], v[..., block.some]
            raw = one.baddbmm_(q_rows, k_seen, beta=0, alpha=call.factor)
            logits, tanh = call.logits(raw, pairs, block)
            probs, blind = _softmax(call, logits, two)
            grad_rows = _unless(blind, grad[:, block.rows])
            dv_pairs[..., block.some].baddbmm_(grad_rows.mT, call.dropped(probs, pairs, block))
            slope = call.dropped(torch.bmm(grad_rows, v_seen, out=one), pairs, block)
            _softmax_backward(slope, probs, -1, call.dtype, grad_input=three)
            if tanh is not None:
                three.mul_(1 - tanh * tanh)
            dq[pairs, block.rows] = torch.bmm(three, k_seen.mT)
            dk_pairs[..., block.some].baddbmm_(q_rows.mT, three, alpha=call.factor)
        for batch, heads, at in _places(call, pairs):
            for i, head in enumerate(call.heads_of_kv[heads], at.start):
                dk[batch, head] += dk_pairs[i].mT
                dv[batch, head] += dv_pairs[i].mT
    return dq.mul_(call.factor).view(*call.shape, dq.shape[-1]), dk, dv


_softmax_backward = torch.ops.aten._softmax_backward_data.out


class _Operands:
    """q [pairs, rows, d], k and v as [pairs, d, keys]: all seven products are fastest on these."""

    def __init__(self, call: Scores) -> None:
        self.call, count = call, call.per_chunk
        (keys, d), d_v = call.k.shape[2:], call.v.shape[3]
        shapes = (count, len(call.row), d), (count, d, keys), (count, d_v, keys)
        self.rooms = [call.q.new_empty(shape, dtype=call.dtype) for shape in shapes]

    def load(self, pairs: slice) -> list[Tensor]:
        """Those of a range of pairs, in memory that the next range takes again."""
        call = self.call
        for batch, heads, at in _places(call, pairs):
            q = _chosen(call.q[batch], call.heads_of_q[heads])
            k, v = (_chosen(x[batch], call.heads_of_kv[heads]) for x in (call.k, call.v))
            q = q if call.rows is None else q[:, call.row]
            for room, x in zip(self.rooms, (q, k.mT, v.mT), strict=True):
                room[at].copy_(x)
        return [room[: pairs.stop - pairs.start] for room in self.rooms]


def _places(call: Scores, pairs: slice) -> Iterator[tuple[int, slice, slice]]:
    """A range of pairs by batch entry: it, which of the wanted heads, and where these are in the range."""
    start = pairs.start
    while start < pairs.stop:
        batch, first = divmod(start, call.shape[1])
        last = min(call.shape[1], first + pairs.stop - start)
        at = start - pairs.start
        yield batch, slice(first, last), slice(at, at + last - first)
        start += last - first


def _chosen(whole: Tensor, index: list[int]) -> Tensor:
    first, stop = index[0], index[-1] + 1
    return whole[first:stop] if index == list(range(first, stop)) else whole[index]


def _part(room: Tensor, pairs: int, block: Block) -> Tensor:
    rows, keys = block.rows.stop - block.rows.start, block.some.stop - block.some.start
    return room[: pairs * rows * keys].view(pairs, rows, keys)


def _softmax(call: Scores, logits: Tensor, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """softmax(logits) and, where there may be any, the rows that see nothing: theirs is only finite."""
    blind = None
    if call.may_be_blind:
        blind = logits.amax(-1, keepdim=True) == -math.inf
        logits[..., :1].masked_fill_(blind, 0)
    return torch.softmax(logits, -1, out=out), blind


def _unless(blind: Tensor | None, rows: Tensor) -> Tensor:
    return rows if blind is None else rows.masked_fill(blind, 0)


def _entropy(logits: Tensor, probs: Tensor, top: Tensor, lse: Tensor, seen: Tensor) -> Tensor:
    """Of each pair, the sum of its rows' entropies over log(seen); writes into `logits`."""
    # A probability of 0 has a shifted logit of -inf or nearly so: clamped, their product is 0.
    lost = logits.sub_(top).clamp_(min=-1e3).mul_(probs).sum(-1)
    share = (lse - top.squeeze(-1) - lost) / seen.log()
    return share.where(seen > 1, 0).sum(-1)


@contextmanager
def exactly(call: Scores) -> Iterator[None]:
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
