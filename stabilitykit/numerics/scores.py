"""The scores of one attention call: its options checked, its rows and keys cut into blocks."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 128  # query rows per block, enough for fast matrix products
_CAUSAL_ROWS = 64  # fewer if causal and short: on the diagonal, half of what a block computes is hidden
# Scores in one block: a CPU wants them in its cache, a GPU wants many.
_CPU_SCORES, _GPU_SCORES = 1 << 17, 1 << 24


class Block(NamedTuple):
    """A range of rows, the keys that some of them may see, and those that all of them may see."""

    rows: slice
    some: slice
    all: slice


@dataclass
class Scores:
    """One attention call with the options of `exact_attention`; ValueError where they do not fit.

    Causal, window and packing become one rule: a row is level with the key `level` and sees the
    keys first <= j < last. The wanted (batch, head) pairs are numbered as in [b, len(heads)].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False
    align: str = "top_left"
    mask: Tensor | None = None
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    rows: Tensor | None = None
    heads: Tensor | Sequence[int] | None = None
    dropout_mask: Tensor | None = None
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        check_tensors(self.q, self.k, self.v)
        _check_options(self)
        (b, h, n, d), device = self.q.shape, self.q.device
        row, head = _indices("rows", self.rows, n), _indices("heads", self.heads, h)
        self.factor = 1 / math.sqrt(d) if self.scale is None else self.scale
        self.span = _spans(self, row)  # kept on the CPU too, to plan blocks without waiting
        sent = [x.to(device, non_blocking=True) for x in (row, *self.span, head)]
        self.row, self.level, self.first, self.last, head_there = sent
        group = h // max(self.k.shape[1], 1)
        self.heads_of_q, self.heads_of_kv = head.tolist(), (head // group).tolist()
        self.batch = torch.arange(b, device=device).repeat_interleave(len(head))
        self.head = head_there.repeat(b)
        self.kv_head = self.head // group
        self.column = torch.arange(self.k.shape[2], device=device)
        self.shape = (b, len(head), len(row))
        self.may_be_blind = self.mask is not None or bool((self.span[1] >= self.span[2]).any())
        self.per_block = _ROWS
        if self.causal or self.window:
            self.per_block = min(_ROWS, max(_CAUSAL_ROWS, self.k.shape[2] // 16))
        self.blocks = self._blocks()
        self.scores = [(z.rows.stop - z.rows.start) * (z.some.stop - z.some.start) for z in self.blocks]
        limit = _CPU_SCORES if device.type == "cpu" else _GPU_SCORES
        most = limit * len(self.blocks) // max(1, sum(self.scores))
        self.per_chunk = max(1, min(most, len(self.head)))
        if self.mask is not None and self.mask.is_floating_point():
            _warn_if_zero_one(self.mask, self.row)

    def full(self, value: float, *shape: int) -> Tensor:
        """A tensor of the call's dtype and device."""
        return torch.full(shape, value, dtype=self.dtype, device=self.q.device)

    def chunks(self) -> Iterator[slice]:
        """Ranges of pairs: short ones share one batch of matrix products."""
        n, size = len(self.head), self.per_chunk
        return (slice(i, min(i + size, n)) for i in range(0, n, size))

    def rooms(self, count: int) -> list[Tensor]:
        """`count` flat tensors that hold the scores of any one block, to be used again and again."""
        size = self.per_chunk * max(self.scores, default=0)
        return [torch.empty(size, dtype=self.dtype, device=self.q.device) for _ in range(count)]

    def _blocks(self) -> list[Block]:
        """The rows in ranges, without those ranges that see no key."""
        n, size = len(self.row), self.per_block
        blocks = [self.block(slice(i, min(i + size, n))) for i in range(0, n, size)]
        return [block for block in blocks if block.some.start < block.some.stop]

    def block(self, rows: slice) -> Block:
        """The block of one range of rows."""
        _, first, last = (x[rows].tolist() for x in self.span)
        some = slice(min(first, default=0), max(last, default=0))
        return Block(rows, some, slice(max(first, default=0), min(last, default=0)))

    def take(self, pairs: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The wanted rows of q, and all of k and v, of a range of pairs: [pairs, :, d] in `dtype`."""
        batch, kv_head = self.batch[pairs], self.kv_head[pairs]
        q = self.q[batch[:, None], self.head[pairs, None], self.row]
        k, v = self.k[batch, kv_head], self.v[batch, kv_head]
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)

    def part(self, whole: Tensor, pairs: slice, block: Block) -> Tensor:
        """The block [pairs, rows, keys] of a tensor that broadcasts to [b, h, q, k]."""
        whole = whole.expand(*self.q.shape[:3], self.k.shape[2])
        at = self.batch[pairs, None], self.head[pairs, None], self.row[block.rows]
        return whole[(*at, block.some)]

    def logits(self, raw: Tensor, pairs: slice, block: Block) -> tuple[Tensor, Tensor | None]:
        """Scaled scores after softcap, bias and mask, and the tanh that the softcap took, if any.

        Writes into `raw`, and returns it, where causal, window and packing are all there is.
        """
        logits, tanh = raw, None
        if self.softcap:
            tanh = torch.tanh(raw / self.softcap)
            logits = tanh * self.softcap
        if self.alibi_slopes is not None:
            logits = logits - self._alibi(pairs, block)
        if self.mask is not None:
            part = self.part(self.mask, pairs, block)
            if part.dtype == torch.bool:
                logits = logits.masked_fill(~part, -math.inf)
            else:
                logits = logits + part.to(self.dtype)
        self._hide(logits, block)
        return logits, tanh

    def _alibi(self, pairs: slice, block: Block) -> Tensor:
        assert self.alibi_slopes is not None
        slopes = self.alibi_slopes.expand(self.q.shape[:2])[self.batch[pairs], self.head[pairs]]
        distance = (self.level[block.rows, None] - self.column[block.some]).abs()
        return slopes.to(self.dtype)[:, None, None] * distance

    def _hide(self, logits: Tensor, block: Block) -> None:
        """Causal, window and packing, in place; keys that all rows see, the most, cost nothing."""
        column, start, stop = self.column[block.some], block.some.start, block.some.stop
        left, right = max(block.all.start - start, 0), max(block.all.stop - start, 0)
        if left > 0:
            unseen = column[:left] < self.first[block.rows, None]
            logits[..., :left].masked_fill_(unseen, -math.inf)
        if right < stop - start:
            unseen = column[right:] >= self.last[block.rows, None]
            logits[..., right:].masked_fill_(unseen, -math.inf)

    def visible(self, raw: Tensor, logits: Tensor, top: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Per row, the largest raw score of a visible key and the number of visible keys."""
        if raw is logits:
            return top.squeeze(-1), (self.last - self.first)[block.rows].to(self.dtype)
        floor = -math.inf
        if self.mask is not None and self.mask.dtype != torch.bool:
            # Many models hide a key by adding the lowest finite number.
            floor = torch.finfo(self.mask.dtype).min / 2
        hidden = (logits <= floor) | (top == -math.inf)
        return raw.masked_fill_(hidden, -math.inf).amax(-1), (~hidden).sum(-1).to(self.dtype)

    def dropped(self, probs: Tensor, pairs: slice, block: Block) -> Tensor:
        """Probabilities, or their gradients, after dropout."""
        if self.dropout_mask is None:
            return probs
        return probs * self.part(self.dropout_mask, pairs, block) / (1 - self.dropout_p)


def require(holds: bool, message: str) -> None:
    """ValueError with `message` unless `holds`."""
    if not holds:
        raise ValueError(message)


def _spans(scores: Scores, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Level, first and last (exclusive) key of each row by causal, window and packing."""
    cu_q = _offsets("q", scores.cu_seqlens_q, scores.q.shape[2])
    cu_k = _offsets("k", scores.cu_seqlens_k, scores.k.shape[2])
    require(
        len(cu_q) == len(cu_k),
        f"cu_seqlens_q and cu_seqlens_k must have one length, got {len(cu_q)} and {len(cu_k)}",
    )
    segment = torch.searchsorted(cu_q[1:], row, right=True)
    start, end = cu_k[segment], cu_k[segment + 1]
    level = row - cu_q[segment] + start
    if scores.align == "bottom_right":
        level += (end - start) - (cu_q[segment + 1] - cu_q[segment])
    left, right = scores.window or (-1, -1)
    first, last = start, end
    if left >= 0:
        first = torch.minimum(torch.maximum(start, level - left), end)
    for reach in [right] * (right >= 0) + [0] * scores.causal:
        last = torch.minimum(last, level + reach + 1)
    return level, first, torch.maximum(last, first)


def _offsets(name: str, cu_seqlens: Tensor | None, total: int) -> Tensor:
    if cu_seqlens is None:
        return torch.tensor([0, total])
    cu = cu_seqlens.cpu().long()
    good = cu.ndim == 1 and len(cu) > 1 and bool((cu.diff() >= 0).all())
    require(
        good and cu[0].item() == 0 and cu[-1].item() == total,
        f"cu_seqlens_{name} must rise from 0 to {name}'s length {total}, got {cu.tolist()}",
    )
    return cu


def _indices(name: str, wanted: Tensor | Sequence[int] | None, size: int) -> Tensor:
    if wanted is None:
        return torch.arange(size)
    index = wanted.cpu() if isinstance(wanted, Tensor) else torch.tensor(wanted, dtype=torch.long)
    require(
        index.ndim == 1 and index.dtype in (torch.int64, torch.int32),
        f"{name} must be a list of int64 indices, got {index.dtype} {tuple(index.shape)}",
    )
    outside = index[(index < 0) | (index >= size)]
    require(not len(outside), f"{name} must lie in 0..{size - 1}, got {outside.tolist()}")
    return index.long()


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError unless q [b, h, q, d] and k, v [b, h_kv, k, d] fit together."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    require(
        q.ndim == k.ndim == v.ndim == 4,
        f"q, k and v must be [batch, heads, length, head_dim], got {shapes}",
    )
    for name in ("dtype", "device"):
        found = [str(getattr(x, name)) for x in (q, k, v)]
        require(len(set(found)) == 1, f"q, k and v must have one {name}, got {', '.join(found)}")
    require(q.is_floating_point(), f"q, k and v must be floating-point, got {q.dtype}")
    require(q.shape[0] == k.shape[0] == v.shape[0], f"q, k and v must have one batch, got {shapes}")
    require(k.shape[1:3] == v.shape[1:3], f"k and v must have equal heads and length, got {shapes}")
    require(q.shape[3] == k.shape[3] > 0, f"q and k must have one head_dim >= 1, got {shapes}")
    h, h_kv = q.shape[1], k.shape[1]
    require(
        h == h_kv or (h_kv > 0 and h % h_kv == 0),
        f"q's heads must be a multiple of k's, got {h} and {h_kv}",
    )


def _check_options(s: Scores) -> None:
    aligns = ("top_left", "bottom_right")
    require(s.align in aligns, f"align must be one of {aligns}, got {s.align!r}")
    require(
        s.window is None or (len(s.window) == 2 and min(s.window) >= -1),
        f"window must be (left, right), each >= -1, got {s.window}",
    )
    require(not s.softcap or s.softcap > 0, f"softcap must be > 0, or 0 for none, got {s.softcap}")
    require(0 <= s.dropout_p < 1, f"dropout_p must lie in [0, 1), got {s.dropout_p}")
    require(
        s.dropout_p == 0 or s.dropout_mask is not None,
        f"dropout_p {s.dropout_p} needs the dropout_mask the kernel used, got None",
    )
    packed = s.cu_seqlens_q is not None
    require(
        packed == (s.cu_seqlens_k is not None),
        f"cu_seqlens_q and cu_seqlens_k go together, got only {'q' if packed else 'k'}'s",
    )
    require(not packed or s.q.shape[0] == 1, f"packed sequences need batch 1, got {s.q.shape[0]}")
    whole = (*s.q.shape[:3], s.k.shape[2])
    _check_broadcast("mask", s.mask, whole, s.q.device)
    _check_broadcast("dropout_mask", s.dropout_mask, whole, s.q.device)
    _check_broadcast("alibi_slopes", s.alibi_slopes, whole[:2], s.q.device)
    if s.mask is not None:
        good = s.mask.dtype == torch.bool or s.mask.is_floating_point()
        require(good, f"mask must be bool (True = keep) or float (added), got {s.mask.dtype}")
    if s.dropout_mask is not None:
        good = s.dropout_mask.dtype == torch.bool
        require(good, f"dropout_mask must be bool (True = kept), got {s.dropout_mask.dtype}")


def _check_broadcast(name: str, tensor: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor is None:
        return
    pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
    require(
        tensor.ndim <= len(shape) and all(size in (1, wanted) for size, wanted in pairs),
        f"{name} must broadcast to {shape}, got {tuple(tensor.shape)}",
    )
    require(tensor.device == device, f"{name} must be on {device}, got {tensor.device}")


def _warn_if_zero_one(mask: Tensor, row: Tensor) -> None:
    """A float mask of zeros and ones was most likely meant as a bool one."""
    seen = mask[..., row, :] if mask.ndim > 1 and mask.shape[-2] > 1 else mask
    if seen.numel() and seen.min() == 0 and seen.max() == 1 and ((seen == 0) | (seen == 1)).all():
        warnings.warn(
            "the float mask holds only 0 and 1 and is added to the scores as it is; "
            "to keep where it is 1, pass mask.bool()",
            stacklevel=2,
        )
