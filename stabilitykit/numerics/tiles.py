"""The tile loops of an emulated FlashAttention kernel, with a rounding after every operation."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabilitykit.numerics.formats import Precision, rounded, unit_roundoff
from stabilitykit.numerics.scores import Block, Scores, require

Rounding = Callable[[Tensor], Tensor]


@dataclass(kw_only=True)
class Kernel:
    """The knobs of `emulated_flash_attention` and its grad; ValueError where they are none."""

    input_dtype: Precision
    tile_q: int = 64
    tile_k: int = 64
    state_dtype: Precision = torch.float32
    probs_dtype: Precision | None = None
    score_dtype: Precision | None = None
    max_dtype: Precision | None = None
    sum_dtype: Precision | None = None
    accumulator_dtype: Precision | None = None
    output_dtype: Precision | None = None
    variant: str = "fa2"
    beta: float = 2.0
    delta: str = "out"

    def __post_init__(self) -> None:
        for name in ("tile_q", "tile_k"):
            size = getattr(self, name)
            require(isinstance(size, int) and size >= 1, f"{name} must be an int >= 1, got {size!r}")
        variants = ("fa1", "fa2", "stabilised")
        require(self.variant in variants, f"variant must be one of {variants}, got {self.variant!r}")
        require(2 <= self.beta <= 8, f"beta must lie in [2, 8], got {self.beta}")
        require(self.delta in ("out", "probs"), f"delta must be 'out' or 'probs', got {self.delta!r}")
        state = (self.score_dtype, self.max_dtype, self.sum_dtype, self.accumulator_dtype)
        chosen = [self.state_dtype if x is None else x for x in state]
        chosen += [self.input_dtype if x is None else x for x in (self.probs_dtype, self.output_dtype)]
        finest = min(unit_roundoff(x) for x in (self.input_dtype, *chosen))
        self.carrier = torch.float32 if finest >= unit_roundoff(torch.float32) else torch.float64
        self.score, self.max, self.sum, self.acc, self.probs, self.out = (
            partial(rounded, precision=x) for x in chosen
        )
        self.out_dtype = chosen[-1] if isinstance(chosen[-1], torch.dtype) else self.carrier

    def taken(self, x: Tensor) -> Tensor:
        """An input in the carrier, rounded once from what it was."""
        x = x.detach()
        x = x if x.dtype == self.input_dtype else rounded(x.double(), self.input_dtype)
        return x.to(self.carrier)

    def factor(self, old: Tensor, new: Tensor) -> Tensor:
        """exp(old - new) of two maxima, by which what was made with the old one is rescaled."""
        return self.max(torch.exp(self.max(old - _or_zero(new))))

    def result(self, x: Tensor) -> Tensor:
        """A result in the dtype it is handed out in, rounded once."""
        return self.out(x).to(self.out_dtype)


def prepared(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Kernel, Scores]:
    """The kernel and the call that the options of `emulated_flash_attention` describe."""
    knobs = {f.name: options.pop(f.name) for f in fields(Kernel) if f.name in options}
    if knobs.get("input_dtype") is None:
        knobs["input_dtype"] = q.dtype
    kernel = Kernel(**knobs)
    call = Scores(q, k, v, **options, dtype=kernel.carrier)
    call.q, call.k, call.v = (kernel.taken(x) for x in (q, k, v))
    return kernel, call


class State(NamedTuple):
    """Running max, running sum and accumulator of the rows, [pairs, rows, 1 or d_v]."""

    top: Tensor
    total: Tensor
    acc: Tensor


class Tiles:
    """One call's tensors in the carrier, and what a kernel computes of them tile by tile.

    A tile is a `Block` whose `some` are its keys. Shapes are [pairs, rows, keys or d], as in `Scores`.
    """

    def __init__(self, kernel: Kernel, call: Scores):
        self.kernel, self.call, self.pairs = kernel, call, slice(0, len(call.head))
        self.q, self.k, self.v = call.take(self.pairs)

    def scores(self, tile: Block) -> tuple[Tensor, Tensor | None]:
        """The rounded scores after softcap, bias and mask, and the softcap's tanh, if any."""
        kernel = self.kernel
        raw = kernel.score(kernel.score(self.q[:, tile.rows] @ self.k[:, tile.some].mT) * self.call.factor)
        logits, tanh = self.call.logits(raw, self.pairs, tile)
        return (logits if logits is raw else kernel.score(logits)), tanh

    def weighed(self, tile: Block, scores: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        """Row sums of exp(scores - top), and its product with v, both not rounded yet."""
        kernel = self.kernel
        weights = kernel.score(torch.exp(kernel.score(scores - _or_zero(top))))
        kept = kernel.probs(self.call.dropped(weights, self.pairs, tile))
        return weights.sum(-1, keepdim=True), kept @ self.v[:, tile.some]

    def slopes(self, tile: Block, grad: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The backward's P and dP, after dropout, and the tanh."""
        kernel = self.kernel
        scores, tanh = self.scores(tile)
        probs = kernel.score(torch.exp(kernel.score(scores - _or_zero(lse[:, tile.rows]))))
        slope = kernel.score(grad[:, tile.rows] @ self.v[:, tile.some].mT)
        return probs, self.call.dropped(slope, self.pairs, tile), tanh

    def cells(self) -> Iterator[Block]:
        """The tiles of the backward, key tiles outermost, without those that no row sees."""
        blocks = [self.call.block(rows) for rows in _slices(len(self.call.row), self.kernel.tile_q)]
        for keys in _slices(self.call.k.shape[2], self.kernel.tile_k):
            for block in blocks:
                if block.some.start < keys.stop and keys.start < block.some.stop:
                    yield block._replace(some=keys)

    def columns(self) -> Iterator[Block]:
        """The tiles of the forward: of each key tile, all rows from the first that sees it to the last."""
        _, first, last = self.call.span
        for keys in _slices(self.call.k.shape[2], self.kernel.tile_k):
            seeing = ((first < keys.stop) & (last > keys.start)).nonzero().flatten().tolist()
            if seeing:
                yield self.call.block(slice(seeing[0], seeing[-1] + 1))._replace(some=keys)


def forward(kernel: Kernel, call: Scores) -> tuple[Tensor, Tensor]:
    """The out and lse of `emulated_flash_attention`."""
    n_pairs, n_rows, d_v = len(call.head), len(call.row), call.v.shape[-1]
    sizes = ((-math.inf, 1), (0, 1), (0, d_v))
    state = State(*(call.full(value, n_pairs, n_rows, size) for value, size in sizes))
    tiles = Tiles(kernel, call)
    update = _normalised if kernel.variant == "fa1" else _unnormalised
    for tile in tiles.columns():
        old = State(*(x[:, tile.rows] for x in state))
        for x, new in zip(old, update(tiles, tile, old), strict=True):
            x.copy_(new)
    # A row that saw no key has out 0; one whose exponentials all underflowed is lost, and says so.
    total = state.total.where(state.total != 0, math.nan).where(state.top != -math.inf, 1)
    out = state.acc if kernel.variant == "fa1" else kernel.acc(state.acc / total)
    lse = kernel.sum(state.top + total.log())
    return kernel.result(out).view(*call.shape, d_v), lse.view(call.shape)


def backward(
    kernel: Kernel, call: Scores, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `emulated_flash_attention_grad`, from the forward's out and lse."""
    tiles = Tiles(kernel, call)
    grad, lse = kernel.taken(grad_out).flatten(0, 1), lse.view(len(call.head), -1, 1)
    if kernel.delta == "out":
        deltas = kernel.sum((grad * out.to(call.dtype).flatten(0, 1)).sum(-1, keepdim=True))
    else:
        deltas = torch.zeros_like(lse)
        for tile in tiles.cells():
            probs, slope, _ = tiles.slopes(tile, grad, lse)
            _add(deltas[:, tile.rows], (probs * slope).sum(-1, keepdim=True), kernel.sum)
    dq, dk, dv = (torch.zeros_like(x) for x in (tiles.q, tiles.k, tiles.v))
    for tile in tiles.cells():
        rows, keys = tile.rows, tile.some
        probs, slope, tanh = tiles.slopes(tile, grad, lse)
        slope = kernel.score(probs * kernel.score(slope - deltas[:, rows]))
        if tanh is not None:
            slope = kernel.score(slope * (1 - tanh * tanh))
        slope, kept = kernel.probs(slope), kernel.probs(call.dropped(probs, tiles.pairs, tile))
        _add(dv[:, keys], kept.mT @ grad[:, rows], kernel.acc)
        _add(dk[:, keys], slope.mT @ tiles.q[:, rows], kernel.acc)
        _add(dq[:, rows], slope @ tiles.k[:, keys], kernel.acc)
    dq, dk = kernel.acc(dq * call.factor), kernel.acc(dk * call.factor)
    kv_pair = call.batch * call.k.shape[1] + call.kv_head
    dk, dv = (
        torch.zeros_like(x).flatten(0, 1).index_add_(0, kv_pair, each).view_as(x)
        for x, each in ((call.k, dk), (call.v, dv))
    )
    return kernel.result(dq).view(*call.shape, -1), kernel.result(dk), kernel.result(dv)


def _unnormalised(tiles: Tiles, tile: Block, old: State) -> State:
    """FlashAttention-2, Alg. 1, lines 8-10; the stabilised max of arXiv 2510.04212, Alg. 1."""
    kernel = tiles.kernel
    scores, _ = tiles.scores(tile)
    top = scores.amax(-1, keepdim=True)
    if kernel.variant == "stabilised":
        tied = (scores == top).sum(-1, keepdim=True) > 1
        top = top.where(~tied | (top == -math.inf), (kernel.beta * top).clamp(min=0))
    top = kernel.max(torch.maximum(old.top, top))
    total, product = tiles.weighed(tile, scores, top)
    decay = kernel.factor(old.top, top)
    return State(
        top,
        kernel.sum(kernel.sum(old.total * decay) + total),
        kernel.acc(kernel.acc(old.acc * decay) + product),
    )


def _normalised(tiles: Tiles, tile: Block, old: State) -> State:
    """FlashAttention-1, Alg. 1, lines 10-13: the accumulator is divided at every tile."""
    kernel = tiles.kernel
    scores, _ = tiles.scores(tile)
    tile_top = kernel.max(scores.amax(-1, keepdim=True))
    tile_total, product = tiles.weighed(tile, scores, tile_top)
    top = torch.maximum(old.top, tile_top)
    decay, gain = kernel.factor(old.top, top), kernel.factor(tile_top, top)
    kept = kernel.sum(old.total * decay)
    total = kernel.sum(kept + kernel.sum(kernel.sum(tile_total) * gain))
    acc = kernel.acc(kernel.acc(kernel.acc(kept * old.acc) + kernel.acc(gain * kernel.acc(product))) / total)
    # Dividing again what a tile adds nothing to would only round it again.
    return State(top, total, acc.where(tile_top != -math.inf, old.acc))


def _add(total: Tensor, term: Tensor, rounding: Rounding) -> None:
    total.copy_(rounding(total + term))


def _or_zero(top: Tensor) -> Tensor:
    """`top`, or 0 where nothing was seen, so that exp(-inf - top) is 0 and not NaN."""
    return top.masked_fill(top == -math.inf, 0)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, length)) for i in range(0, length, size)]
