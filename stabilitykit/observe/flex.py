"""Tap's view of FlexAttention: its mods are Python, so what they do to every score can be asked."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stabilitykit.observe.calls import Calls, Operand, as_autocast


def _attend(
    calls: Calls,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> Any:
    v, k, q = (calls.alias(as_autocast(tensor)) for tensor in (value, key, query))
    rest = (score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers)
    result = func(q, k, v, *rest)
    bias = _bias(score_mod, score_buffers, q, k)
    if bias is None or q.shape[0] != k.shape[0]:
        what = "a score_mod that does not add" if bias is None else "keys that are shared over the batch"
        calls.report(f"FlexAttention with {what}")
        return result
    kwargs: dict[str, Any] = {
        "attn_mask": _joined(_visible(block_mask, mask_buffers, q, k), bias),
        "dropout_p": 0.0,
        "is_causal": False,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    out, lse, *more = result
    if calls.replace:
        out = calls.replace(q, k, v, **kwargs)
    backend = "replaced" if calls.replace else "flex"
    natural = lse.detach() * math.log(2)  # the op's are of base 2
    calls.record(Operand(q), Operand(k), Operand(v), Operand(out), kwargs, backend, lse=natural)
    return out, lse, *more


def _flex(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    return _attend(calls, func, *args, **kwargs)


def _bias(mod: Callable[..., Tensor], buffers: tuple[Any, ...], q: Tensor, k: Tensor) -> Tensor | None:
    """What the mod adds to each score, float64 [b, h, q, k] or [] for nothing; None where it does not add.

    Its effect on scores of 0 is compared with that on others.
    """
    zero = torch.zeros((), dtype=torch.float64, device=q.device)
    if mod.__name__ == "_identity":  # what flex_attention puts where the caller has none
        return zero
    shape = (*q.shape[:3], k.shape[2])
    others = torch.linspace(-3, 3, math.prod(shape), dtype=torch.float64, device=q.device).view(shape)
    added = _of_each(mod, buffers, zero.expand(shape))
    return added if torch.allclose(_of_each(mod, buffers, others) - others, added, atol=1e-9) else None


def _visible(block_mask: tuple[Any, ...], buffers: tuple[Any, ...], q: Tensor, k: Tensor) -> Tensor | None:
    """The mask that the blocks were made of, bool [b or 1, h or 1, q, k]; None for none."""
    mod, blocks = block_mask[-1], block_mask[2]
    if mod.__name__ == "noop_mask":
        return None
    shape = (*blocks.shape[:2], q.shape[2], k.shape[2])
    return _of_each(lambda _, *where: mod(*where), buffers, torch.zeros(shape, device=q.device))


def _joined(visible: Tensor | None, bias: Tensor) -> Tensor | None:
    if bias.dim() == 0:
        return visible
    return bias if visible is None else bias.where(visible, -math.inf)


def _of_each(mod: Callable[..., Tensor], buffers: tuple[Any, ...], scores: Tensor) -> Tensor:
    """`mod(score, b, h, q, k, *buffers)` of every score [b, h, q, k]."""
    each: Callable[..., Tensor] = lambda *where: mod(*where, *buffers)  # noqa: E731
    for axis in (4, 3, 2, 1):
        mapped = (0, *(0 if place == axis else None for place in (1, 2, 3, 4)))
        each = torch.vmap(each, in_dims=mapped)
    return each(scores, *(torch.arange(size, device=scores.device) for size in scores.shape))


HANDLERS = {"flex_attention": _flex}
