"""Exact attention of tokens that are spread over ranks: one loop for every layout, forward and backward.

Ring Attention (arXiv 2310.01889) where the layout is contiguous, else Striped (2311.09431) or zigzag.
"""

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from stabilitykit.numerics.scores import check_tensors, require
from stabilitykit.parallel.call import Log, Merge, Options, Plan, Round, checksum, watchers
from stabilitykit.parallel.kernel import KernelName, kernel_for
from stabilitykit.parallel.layout import Layout, Run, runs
from stabilitykit.parallel.tiles import Part, Tiles, Window, parts
from stabilitykit.parallel.transport import Group, Homeward, Ring


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    layout: Layout = "striped",
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    mask: Tensor | None = None,
    documents: Tensor | None = None,
    kernel: KernelName = "fused",
    merge: Merge = Merge(),  # noqa: B008 (immutable)
    tile: int = 1024,
    dropout_p: float = 0.0,
) -> Tensor:
    """Attention output [b, h, n, d] of this rank's n tokens over the tokens of all ranks of `group`.

    All ranks call it with equal shapes and options, and the tokens in the layout's order (`shard`);
    RoPE and the like go by `layout.positions`. Rows that see no key have out 0 and gradients 0.
    Memory is linear in n, forward and backward.

    Args:
        q: [b, h, n, d].
        k: [b, h_kv, n, d]; query head i uses key head i // (h / h_kv).
        v: [b, h_kv, n, d].
        group: process group or one-dimensional DeviceMesh; the default group if None.
        layout: how tokens are spread over the ranks.
        causal: a token sees no later position.
        scale: of q k^T; 1 / sqrt(d) by default.
        window: positions seen to the left and right, inclusive; -1 = unbounded.
        mask: bool [b, n], True = keep: this rank's keys that may be seen.
        documents: int [b, n], >= 0: this rank's tokens see only keys of their own document.
        kernel: "fused", or "exact" for float64 maths in every part.
        merge: dtypes in which the parts of a row meet.
        tile: side of the squares of scores that are skipped if nothing in them is visible.
        dropout_p: must be 0.

    Raises:
        ValueError: inputs that do not fit, here or from rank to rank, before anything is sent.
        RuntimeError: another rank is gone, or silent for longer than the group's timeout.
    """
    if has_torch_function((q, k, v)):  # whoever overrides attention gets all of it, not its tiles
        return handle_torch_function(
            ring_attention, (q, k, v), q, k, v, group=group, layout=layout, causal=causal, scale=scale,
            window=window, mask=mask, documents=documents, kernel=kernel, merge=merge, tile=tile,
            dropout_p=dropout_p,
        )  # fmt: skip
    ring = Ring(group)
    try:
        _check(q, k, v, mask, documents, window, tile, dropout_p)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        options = Options(layout, causal, factor, window, kernel, merge, tile)
        runs(ring.world * q.shape[2], ring.rank, ring.world, layout)
        labels = _labels(mask, documents)
        engine = kernel_for(q, v, kernel, masked=bool(labels) or window is not None)
    except ValueError as error:
        ring.agree(f"refused: {error}", q.device)  # the others must not wait for a rank that has left
        raise
    told = tuple((watcher.on_call, watcher.name()) for watcher in watchers)
    plan = Plan(ring, options, labels, engine, Log(), told)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    ring.agree(_said(plan, needs_grad, q, k, v), q.device)
    out, lse = _RingAttention.apply(q, k, v, plan)
    if not needs_grad:
        plan.hand_over(q, k, v, out, lse)
    return out


def merge_part(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Adds a part over further keys to `out` and `lse`, in place; rows without keys have lse -inf.

    >>> out, lse = torch.zeros(1, 1), torch.full((1,), -math.inf)
    >>> for value, weight in ((1.0, 3.0), (5.0, 1.0)):
    ...     merge_part(out, lse, torch.full((1, 1), value), torch.tensor([math.log(weight)]))
    >>> round(out.item(), 6), round(lse.exp().item(), 6)
    (2.0, 4.0)
    """
    whole = torch.logaddexp(lse, part_lse.to(lse.dtype))
    base = whole.masked_fill(whole == -math.inf, 0)  # -inf - -inf would be NaN
    kept, added = ((x - base).exp().unsqueeze(-1) for x in (lse, part_lse))
    out.mul_(kept.to(out.dtype)).add_(part_out.to(out.dtype) * added.to(out.dtype))
    lse.copy_(whole)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        out, lse = _forward(plan, q, k, v)
        out = out.to(q.dtype)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore (once_differentiable)
        plan, (q, k, v, out, lse) = ctx.plan, ctx.saved_tensors
        with torch._C.DisableTorchFunction():  # as in the forward: an op of its own, not its tiles
            found = _backward(plan, q, k, v, out, lse, grads[0])
            dq, dk, dv = (x.to(q.dtype) for x in found)
            plan.hand_over(q, k, v, out, lse, grads[0], dq, dk, dv)
        return dq, dk, dv, None


def _forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    kernel, merge = plan.kernel, plan.options.merge
    q = q.to(kernel.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=_sums(plan))
    lse = q.new_full(q.shape[:3], -math.inf, dtype=merge.lse or torch.float64)
    mass = plan.log.mass = lse.double().clone() if plan.watchers else None
    for k_, v_, todo in _rounds(plan, k, v, plan.log.forward):
        for part in todo:
            at, keys = _along(part)
            part_out, part_lse = kernel.forward(q[at], k_[keys], v_[keys], part, plan.options.scale)
            part_out, part_lse = _rounded(part_out, merge.partials), _rounded(part_lse, merge.lse)
            merge_part(out[at], lse[at], part_out, part_lse)
            if mass is not None:
                mass[at] = torch.logaddexp(mass[at], part_lse.double())
    return out, lse


def _backward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor
) -> list[Tensor]:
    kernel, sums = plan.kernel, _sums(plan)
    q, out, grad_out = (x.to(kernel.dtype) for x in (q, out, grad_out))
    # A row without keys has only masked scores left: exp(-inf - 0) is 0, exp(-inf + inf) NaN.
    lse = lse.masked_fill(lse == -math.inf, 0).to(torch.promote_types(kernel.dtype, torch.float32))
    dq, tally = torch.zeros_like(q, dtype=sums), Homeward(plan.ring)
    for k_, v_, todo in _rounds(plan, k, v, plan.log.backward):
        dk, dv = torch.zeros_like(k_, dtype=sums), torch.zeros_like(v_, dtype=sums)
        for part in todo:
            at, keys = _along(part)
            rows = grad_out[at], q[at], k_[keys], v_[keys], out[at], lse[at]
            shares = kernel.backward(*rows, part, plan.options.scale)
            for total, where, share in zip((dq, dk, dv), (at, keys, keys), shares, strict=True):
                total[where] += _rounded(share, plan.options.merge.partials)
        tally.add([dk, dv])
    return [dq, *tally.home()]


def _rounds(
    plan: Plan, k: Tensor, v: Tensor, kept: list[Round]
) -> Iterator[tuple[Tensor, Tensor, Iterator[Part]]]:
    """Each round's keys and values, in the kernel's dtype, and the parts to compute with them."""
    ring, options, dtype = plan.ring, plan.options, plan.kernel.dtype
    length, left = ring.world * k.shape[2], time.perf_counter()
    mine = runs(length, ring.rank, ring.world, options.layout)
    for owner, (k_, v_, *labels) in ring.blocks([k, v, *plan.labels[1:]]):
        this = Round(owner, wait_s=time.perf_counter() - left)
        theirs = runs(length, owner, ring.world, options.layout)
        began = time.thread_time()
        yield k_.to(dtype), v_.to(dtype), _parts(plan, mine, theirs, labels, this.tiles)
        this.work_s = time.thread_time() - began
        if plan.watchers:
            this.mark = checksum(k_, v_)
            kept.append(this)
        left = time.perf_counter()


def _parts(
    plan: Plan, mine: list[Run], theirs: list[Run], labels: list[Tensor], tiles: Tiles
) -> Iterator[Part]:
    options, of_rows = plan.options, plan.labels[:1]

    def kept(rows: slice, keys: slice) -> Tensor:
        return of_rows[0][:, None, rows, None] == labels[0][:, None, None, keys]

    return parts(
        mine, theirs, causal=options.causal, window=options.window, tile=options.tile, counted=tiles,
        kept=kept if labels else None, granule=plan.kernel.granule,
    )  # fmt: skip


def _along(part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part's rows and its keys as indices of [b, h, n, ...]."""
    return (slice(None), slice(None), part.rows), (slice(None), slice(None), part.keys)


def _rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def _sums(plan: Plan) -> torch.dtype:
    return plan.options.merge.sums or torch.promote_types(torch.float32, plan.kernel.dtype)


def _labels(mask: Tensor | None, documents: Tensor | None) -> tuple[Tensor, ...]:
    """Documents of the rows and of the keys, -1 for keys that are masked; nothing if all is one."""
    if mask is None:
        return () if documents is None else (documents.long(), documents.long())
    of_rows = torch.zeros_like(mask, dtype=torch.int64) if documents is None else documents.long()
    return of_rows, of_rows.masked_fill(~mask, -1)


def _said(plan: Plan, needs_grad: bool, q: Tensor, k: Tensor, v: Tensor) -> str:
    """All that the ranks must have in common, in words."""
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
    labels = "with labels" if plan.labels else "no labels"
    return (
        f"{shapes}, {q.dtype}, {plan.options}, {labels}, gradient {needs_grad}, {len(plan.watchers)} watchers"
    )


def _check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, documents: Tensor | None, window: Window | None,
    tile: int, dropout_p: float,
) -> None:  # fmt: skip
    check_tensors(q, k, v)
    require(
        q.shape[2] == k.shape[2] > 0, f"q and k must have the same tokens, got {q.shape[2]} and {k.shape[2]}"
    )
    require(dropout_p == 0, f"ring_attention has no dropout, got dropout_p {dropout_p}")
    require(tile >= 1, f"tile must be >= 1, got {tile}")
    require(
        window is None or (len(window) == 2 and min(window) >= -1),
        f"window must be (left, right), each >= -1, got {window}",
    )
    tokens = (q.shape[0], q.shape[2])
    for name, x in (("mask", mask), ("documents", documents)):
        require(
            x is None or x.shape == tokens, f"{name} must be {tokens}, got {x is not None and tuple(x.shape)}"
        )
    require(
        mask is None or mask.dtype == torch.bool, f"mask must be bool, got {mask is not None and mask.dtype}"
    )
    if documents is not None:
        whole = not documents.is_floating_point() and not documents.is_complex()
        require(
            whole and bool((documents >= 0).all()), f"documents must be integers >= 0, got {documents.dtype}"
        )
