"""FlashAttention re-implemented, forward and backward, with every precision and tile as a knob.

Rows do not interact and a tile that a row sees nothing of leaves it alone, so all rows go at once.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stabilitykit.numerics.exact import exactly
from stabilitykit.numerics.formats import Precision
from stabilitykit.numerics.scores import require
from stabilitykit.numerics.tiles import backward, forward, prepared


def emulated_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    tile_q: int = 64,
    tile_k: int = 64,
    state_dtype: Precision = torch.float32,
    probs_dtype: Precision | None = None,
    input_dtype: Precision | None = None,
    score_dtype: Precision | None = None,
    max_dtype: Precision | None = None,
    sum_dtype: Precision | None = None,
    accumulator_dtype: Precision | None = None,
    output_dtype: Precision | None = None,
    causal: bool = False,
    scale: float | None = None,
    variant: Literal["fa1", "fa2", "stabilised"] = "fa2",
    beta: float = 2.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention output [b, h, q, d] and log-sum-exp [b, h, q], as a tiled kernel would round them.

    By default what production kernels do: float32 state, the probabilities and the result rounded to
    the inputs' dtype. Every product and row sum is computed in the carrier, float32 or, if some
    precision is finer, float64, and rounded once: by itself, or as the sum where it is added to what
    there is. `out` comes in `output_dtype` where that is a torch.dtype, else in the carrier, as does lse.

    Args:
        q: [b, h, q, d], as k, v and GQA in `exact_attention`.
        k: [b, h_kv, k, d].
        v: [b, h_kv, k, d_v].
        tile_q: query rows per tile. The forward does not depend on it, whatever the precisions; in
            the backward it is the step in which dk and dv are accumulated.
        tile_k: keys per tile. Swapped or square tiles are other numbers here; see `tile_sizes`.
        state_dtype: the default of the scores, running max, running sum and accumulator.
        probs_dtype: of the exponentials that multiply v; default `input_dtype`.
        input_dtype: of q, k and v; default that of q.
        score_dtype: of q k^T, of it times scale, of that minus the max, and of its exponential.
        max_dtype: of the running max, of the old one minus the new, and of the exponential of that.
        sum_dtype: of the running sum, when rescaled and when a tile's row sum of exponentials (those
            in `score_dtype`) is added; of lse.
        accumulator_dtype: of the accumulator, when rescaled, when a tile's product with v is added and
            when divided by the running sum. fa1 rounds the tile's product, and it rescaled, too.
        output_dtype: of out; default `input_dtype`.
        causal: as in `exact_attention`.
        scale: of q k^T; 1 / sqrt(d) by default.
        variant: "fa2" divides once, at the end; "fa1" keeps the accumulator normalised, tile by tile
            (Alg. 1 of arXiv 2205.14135); "stabilised" is fa2 with the max of arXiv 2510.04212,
            Alg. 1: where a tile's row holds its max twice, beta * max if that is > 0, 0 if < 0.
        beta: in [2, 8]; a row whose exponentials then all underflow comes out as NaN.
        options: the other options of `exact_attention` but for its dtype. Tiles are cut from key 0
            on, also where sequences are packed.

    Raises:
        ValueError: as `exact_attention`, and a tile, variant, beta or precision that is none.

    >>> q, v = torch.zeros(1, 1, 1, 4), torch.tensor([[[[1.0], [2.0], [4.0]]]])
    >>> emulated_flash_attention(q, q.expand(1, 1, 3, 4), v, probs_dtype=7, output_dtype=2)[0].item()
    2.5
    """
    named = dict(locals())
    kernel, call = prepared(**named.pop("options"), **named)
    with exactly(call):
        return forward(kernel, call)


def emulated_flash_attention_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    *,
    delta: Literal["out", "probs"] = "out",
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of sum(out * grad_out), as FlashAttention-2's backward would round them.

    Options as in `emulated_flash_attention`, whose out and lse it starts from. P = exp(S - lse), dP
    and dS = P (dP - delta) are in `score_dtype`; P and dS are rounded to `probs_dtype` where they
    enter a product, delta to `sum_dtype`; dq, dk and dv are rounded to `accumulator_dtype` each time a
    tile's product is added, and as a whole by scale; they come in `output_dtype`. With GQA the heads
    of a group are summed in the carrier, before that last rounding.

    Args:
        q: as k and v those of the forward.
        k: as q.
        v: as q.
        grad_out: [b, h, q, d_v], rounded to `input_dtype`.
        delta: rowsum(dO * O) of the rounded "out", as kernels do, or rowsum(dP * P) of the "probs",
            whose error is not biased by the rounding of O (arXiv 2510.04212).
        options: as above.

    Raises:
        ValueError: as `emulated_flash_attention`, an unknown delta, or a grad_out not shaped like out.
    """
    kernel, call = prepared(q, k, v, delta=delta, **options)
    got, expected = tuple(grad_out.shape), (*call.shape, v.shape[-1])
    require(got == expected, f"grad_out must have the shape of out, {expected}, got {got}")
    with exactly(call):
        return backward(kernel, call, grad_out, *forward(kernel, call))


def emulated_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The out of `emulated_flash_attention`, differentiable by `emulated_flash_attention_grad`.

    Options as in both: attention for a live model, in place of its kernel.
    """
    return _Emulated.apply(q, k, v, options)  # pyright: ignore[reportReturnType]  apply is untyped


def tile_sizes(sram: int, head_dim: int) -> tuple[int, int]:
    """(tile_q, tile_k) that FlashAttention-1 takes for `sram` elements (not bytes) of fast memory.

    tile_k = ceil(M / 4d), tile_q = min(tile_k, d): arXiv 2205.14135, Alg. 1, line 1.

    >>> tile_sizes(65536, 64)
    (64, 256)
    """
    require(sram > 0 and head_dim > 0, f"sram and head_dim must be >= 1, got {sram} and {head_dim}")
    tile_k = math.ceil(sram / (4 * head_dim))
    return min(tile_k, head_dim), tile_k


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        kernel, call = prepared(q, k, v, **options)
        with exactly(call):
            out, lse = forward(kernel, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse = ctx.saved_tensors
        kernel, call = prepared(q, k, v, **ctx.options)
        with exactly(call):
            return *backward(kernel, call, grad_out, out, lse), None
