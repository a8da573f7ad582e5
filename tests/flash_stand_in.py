"""flash-attn 2's own Python layer on a CPU: its compiled kernel's four ops by their formulas.

Importing this installs it. FlashAttention-2, arXiv 2307.08691, Alg. 1 and 2, without the tiles: scores,
softmax and sums in float32, the operands of each matrix product in the inputs' dtype, as the kernel's.
"""

import math
import sys
import types
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

sys.modules.setdefault("flash_attn_2_cuda", types.ModuleType("flash_attn_2_cuda"))
flash_attn = pytest.importorskip("flash_attn", reason="flash-attn's Python layer comes with `make setup`")


@dataclass(frozen=True)
class Options:
    dropout_p: float
    scale: float
    causal: bool
    left: int
    right: int
    softcap: float
    slopes: Tensor | None

    def visible(self, queries: int, keys: int) -> Tensor:
        """[q, k]: aligned at the bottom right."""
        ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
        right = 0 if self.causal else self.right
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if self.left >= 0:
            seen &= ahead >= -self.left
        return seen & (ahead <= right) if right >= 0 else seen

    def kept(self, probs: Tensor, rng_state: Tensor, sequence: int) -> Tensor:
        """Dropout's factor on each probability; the backward draws it again from the state."""
        draw = torch.Generator().manual_seed(int(rng_state[0]) + sequence)
        return (torch.rand(probs.shape, generator=draw) >= self.dropout_p) / (1 - self.dropout_p)


def one_forward(q, k, v, options, slopes, kept):
    """out [q, h, d] in the inputs' dtype and lse [h, q] of one sequence; inf where no key is seen."""
    scores, _ = scores_of(q, k, options, slopes)
    lse = scores.logsumexp(-1).masked_fill_((scores == -math.inf).all(-1), math.inf)
    probs = (scores - lse[..., None]).exp()
    probs = (probs * kept(probs)).to(q.dtype).float()
    out = torch.einsum("hqk,khd->qhd", probs, heads_of(v, q).float())
    return out.to(q.dtype), lse


def one_backward(grad_out, q, k, v, out, lse, options, slopes, kept):
    """dq, dk, dv of one sequence, delta [h, q] last."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    scores, slope_of_cap = scores_of(q, k, options, slopes)
    probs = (scores - lse[..., None]).exp()
    factor = kept(probs)
    grad = grad_out.float()
    delta = (grad * out.float()).sum(-1).T
    grad_probs = torch.einsum("qhd,khd->hqk", grad, heads_of(v, q).float()) * factor
    grad_scores = probs * (grad_probs - delta[..., None]) * slope_of_cap
    grad_scores, probs = grad_scores.to(dtype).float(), (probs * factor).to(dtype).float()
    dq = torch.einsum("hqk,khd->qhd", grad_scores, heads_of(k, q).float()) * options.scale
    dk = torch.einsum("hqk,qhd->khd", grad_scores, q.float()) * options.scale
    dv = torch.einsum("hqk,qhd->khd", probs, grad)
    dk, dv = (t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv))
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), delta


def scores_of(q, k, options, slopes):
    """Scores [h, q, k] after softcap, ALiBi and mask, and the derivative of the softcap."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), heads_of(k, q).float()) * options.scale
    slope_of_cap = torch.ones(())
    if options.softcap > 0:
        tanh = torch.tanh(scores / options.softcap)
        scores, slope_of_cap = tanh * options.softcap, 1 - tanh**2
    queries, keys = scores.shape[1:]
    if slopes is not None:
        distance = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
        scores = scores - slopes[:, None, None] * distance.abs()
    return scores.masked_fill(~options.visible(queries, keys), -math.inf), slope_of_cap


def heads_of(keys, q):
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)


def forward(q, k, v, spans, options):
    """(out, lse) of every sequence, and the state that its dropout came from."""
    rng_state = torch.randint(2**30, (2,)) if options.dropout_p > 0 else torch.zeros(2, dtype=torch.int64)
    results = [
        one_forward(q[rows], k[keys], v[keys], options, slopes_of(options, i), keeper(options, rng_state, i))
        for i, (rows, keys) in enumerate(spans)
    ]
    return zip(*results, strict=True), rng_state


def backward(grad_out, q, k, v, out, lses, grads, spans, options, rng_state):
    """Writes dq, dk, dv into `grads`; delta of every sequence."""
    deltas = []
    for i, (rows, keys) in enumerate(spans):
        tensors = grad_out[rows], q[rows], k[keys], v[keys], out[rows], lses[i]
        special = slopes_of(options, i), keeper(options, rng_state, i)
        *parts, delta = one_backward(*tensors, options, *special)
        for grad, part, span in zip(grads, parts, (rows, keys, keys), strict=True):
            grad[span] = part
        deltas.append(delta)
    return deltas


def slopes_of(options, sequence):
    slopes = options.slopes
    return slopes if slopes is None or slopes.dim() == 1 else slopes[sequence]


def keeper(options, rng_state, sequence):
    if options.dropout_p == 0:
        return lambda probs: 1.0
    return lambda probs: options.kept(probs, rng_state, sequence)


def packed(cu_seqlens_q, cu_seqlens_k):
    """The ranges of rows and keys of each sequence."""
    rows, keys = (map(slice, ends, ends[1:]) for ends in (cu_seqlens_q.tolist(), cu_seqlens_k.tolist()))
    return list(zip(rows, keys, strict=True))


def check(q, k, v, *unsupported):
    """What the compiled kernel refuses too, and what this stand-in leaves out."""
    assert all(t.stride(-1) == 1 and t.dtype == q.dtype and t.shape[-1] % 8 == 0 for t in (q, k, v))
    assert not any(unsupported), "the stand-in knows no paging, padding or returned softmax"


@torch.library.register_kernel("flash_attn::_flash_attn_forward", "cpu")
def fixed_forward(q, k, v, dropout_p, scale, causal, left, right, softcap, slopes, return_softmax):
    check(q, k, v, return_softmax)
    options = Options(dropout_p, scale, causal, left, right, softcap, slopes)
    (outs, lses), rng_state = forward(q, k, v, [(i, i) for i in range(len(q))], options)
    return torch.stack(outs), torch.stack(lses), q.new_empty(0), rng_state


@torch.library.register_kernel("flash_attn::_flash_attn_backward", "cpu")
def fixed_backward(
    dout, q, k, v, out, lse, dq, dk, dv,
    dropout_p, scale, causal, left, right, softcap, slopes, deterministic, rng_state=None,
):  # fmt: skip
    options = Options(dropout_p, scale, causal, left, right, softcap, slopes)
    spans = [(i, i) for i in range(len(q))]
    return torch.stack(backward(dout, q, k, v, out, lse, (dq, dk, dv), spans, options, rng_state))


@torch.library.register_kernel("flash_attn::_flash_attn_varlen_forward", "cpu")
def packed_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p, scale, causal, left=-1, right=-1, softcap=0.0, slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    check(q, k, v, return_softmax, *(t is not None for t in (block_table, leftpad_k, seqused_k)))
    options = Options(dropout_p, scale, causal, left, right, softcap, slopes)
    (outs, lses), rng_state = forward(q, k, v, packed(cu_seqlens_q, cu_seqlens_k), options)
    return torch.cat(outs), torch.cat(lses, 1), q.new_empty(0), rng_state


@torch.library.register_kernel("flash_attn::_flash_attn_varlen_backward", "cpu")
def packed_backward(
    dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p, scale, causal, left, right, softcap, slopes, deterministic,
    rng_state=None, zero_tensors=False,
):  # fmt: skip
    options = Options(dropout_p, scale, causal, left, right, softcap, slopes)
    spans = packed(cu_seqlens_q, cu_seqlens_k)
    lses = [lse[:, rows] for rows, _ in spans]
    return torch.cat(backward(dout, q, k, v, out, lses, (dq, dk, dv), spans, options, rng_state), 1)
