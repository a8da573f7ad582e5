"""Tap's view of attention written out by hand: a product, a softmax over its rows, a second product."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stabilitykit.observe import ops, product
from stabilitykit.observe.calls import FLEETING, Calls, Operand, as_autocast, is_fleeting
from stabilitykit.observe.chain import Chain, forked, note, noted, opaque, relaid, strayed
from stabilitykit.observe.ops import spelled
from stabilitykit.observe.product import Product, arranged

_LEARNED = "a parameter in the place of queries, keys or values"
_PRODUCTS = {
    **dict.fromkeys([*spelled("matmul", "bmm", "mm", "__matmul__"), torch.linalg.matmul], product.matmul),
    **dict.fromkeys(spelled("baddbmm", "addmm"), product.baddbmm),
    torch.einsum: product.einsum,
}


def _multiply(calls: Calls, func: Any, args: Any, kwargs: Any) -> Any:
    made = _PRODUCTS[func](func, args, kwargs)
    if made is None:
        result = func(*args, **kwargs)
        strayed(calls, func, args, kwargs, result)
        return result
    for first in (True, False):
        probs, axes = (made.a, made.in_a) if first else (made.b, made.in_b)
        chain = noted(probs)
        if chain is not None and chain.soft and made.summed == axes[-1]:
            return _weigh(calls, made, chain, probs_first=first)
    scores = _score(calls, made)
    forked(calls, [made.a, made.b], scores, in_place=False)
    return scores


def _score(calls: Calls, made: Product) -> Tensor:
    """A product that may be q k^T: its operands get aliases, so that their gradients are known."""
    reason = _no_scores(made)
    if reason:
        into = noted(made.a) or noted(made.b)
        return note(made.run(made.a, made.b), into.lost(reason) if into else opaque(reason, made.batched))
    lead, rows, keys = made.out[:-2], made.out[-2], made.out[-1]
    sides = sorted((made.in_a, made.in_b), key=lambda axes: keys in axes)
    # b first, or a tensor that is both gets its gradients added in another order.
    b, a = calls.alias(as_autocast(made.b)), calls.alias(as_autocast(made.a))
    scores = made.run(a, b)
    if scores.numel() == 0:
        return scores
    q, k = (a, b) if rows in made.in_a else (b, a)
    chain = Chain(
        Operand(q, lambda t: arranged(t, sides[0], lead + rows + made.summed)),
        Operand(k, lambda t: arranged(t, sides[1], lead + keys + made.summed)),
        scores.shape[0] if len(lead) > 1 else None,
        scale=made.alpha,
        mask=made.bias,
        batched=made.batched,
    )
    if made.a is made.b:
        chain = chain.lost("a product of a tensor with itself")
    if len(lead) == 1 and calls.heads:
        chain = replace(chain, batch=scores.shape[0] // calls.heads)
    return note(scores, chain)


def _no_scores(made: Product) -> str | None:
    """Why a product is not one of rows with keys, each in its own factor; None where it is."""
    if is_fleeting(made.a) or is_fleeting(made.b):
        return FLEETING
    if made.learned:
        return _LEARNED
    rows, keys = made.out[-2:] if len(made.out) > 1 else ("", "")
    factors = [made.in_a, made.in_b]
    apart = any(rows in one and keys not in one for one in factors) and any(
        keys in one and rows not in one for one in factors
    )
    return None if apart and len(made.summed) == 1 else "a product that is not of rows with keys"


def _weigh(calls: Calls, made: Product, chain: Chain, *, probs_first: bool) -> Tensor:
    """The product of probabilities and values, with which the attention is complete."""
    probs, axes = (made.a, made.in_a) if probs_first else (made.b, made.in_b)
    value, v_axes = (made.b, made.in_b) if probs_first else (made.a, made.in_a)
    lead, rows, keys, wide = axes[:-2], axes[-2], axes[-1], "".join(set(v_axes) - set(axes))
    if len(wide) != 1 or rows in v_axes or set(made.out) != {*lead, rows, wide} or made.bias is not None:
        chain = chain.lost("its second product is not that of probabilities and values")
    if made.learned:
        chain = chain.lost(_LEARNED)
    if chain.blind():
        chain = chain.lost("rows whose keys are all hidden, by a finite number")
    if chain.fate.calls:
        chain = chain.lost("its probabilities weigh two values, and dq is that of both")
        assert chain.unknown
        calls.take_back(chain.fate.calls[0], chain.unknown)
    v = Operand(value, lambda t: arranged(t, v_axes, lead + keys + wide))
    reason = chain.unknown or _misfit(*(operand.seen().shape[:-2] for operand in (chain.q, chain.k, v)))
    if reason:
        chain.fate.calls.append(None)
        calls.report(f"attention written by hand, not understood: {reason}")
        return made.run(made.a, made.b)
    batch = chain.batch or (probs.shape[0] if lead else 1)
    q, k = (operand._replace(form=_by_heads(operand.form, batch)) for operand in (chain.q, chain.k))
    v = Operand(calls.alias(as_autocast(value)), _by_heads(v.form, batch))
    kwargs = _kwargs(chain, probs.shape[:-2], batch, q.seen().shape[1] != k.seen().shape[1])
    if calls.replace and not chain.learned:
        heads_out = calls.replace(*(operand.form(operand.tensor) for operand in (q, k, v)), **kwargs)
        out = heads_out.reshape(*probs.shape[:-1], heads_out.shape[-1])
        out, backend = arranged(out, lead + rows + wide, made.out), "replaced"
    else:
        out, backend = made.run(*((probs, v.tensor) if probs_first else (v.tensor, probs))), "eager"
        if calls.replace:
            calls.report("attention written by hand, not replaced: its scale is learned")
    seen = Operand(out, _by_heads(lambda t: arranged(t, made.out, lead + rows + wide), batch))
    chain.fate.calls.append(calls.record(q, k, v, seen, kwargs, backend))
    return out


def _misfit(q: torch.Size, k: torch.Size, v: torch.Size) -> str | None:
    """Why operands with these axes before rows and width are no attention of heads, None where they are."""
    if q.numel() == k.numel() == v.numel():
        return None
    shared = k[: max((i + 1 for i, size in enumerate(k) if size > 1), default=0)]
    if k == v and len(k) == len(q) > 1 and q[0] == k[0] and q[: len(shared)] == shared:
        return None
    return f"q, k and v with leading axes {tuple(q)}, {tuple(k)}, {tuple(v)}"


def _by_heads(form: Callable[[Tensor], Tensor], batch: int) -> Callable[[Tensor], Tensor]:
    def formed(tensor: Tensor) -> Tensor:
        laid = form(tensor)
        return laid.reshape(batch, laid.shape[:-2].numel() // batch, *laid.shape[-2:])

    return formed


def _kwargs(chain: Chain, lead: torch.Size, batch: int, grouped: bool) -> dict[str, Any]:
    folded = (batch, lead.numel() // batch)
    cap = 1.0 if chain.softcap is None else chain.softcap
    kwargs: dict[str, Any] = {
        "attn_mask": relaid(chain.mask, lead, folded),
        "dropout_p": chain.dropout_p,
        "is_causal": False,
        "scale": chain.scale * cap,
        "enable_gqa": grouped,
    }
    if chain.softcap is not None:
        kwargs["softcap"] = chain.softcap
    if chain.kept is not None:
        kwargs["dropout_mask"] = relaid(chain.kept, lead, folded)
    return kwargs


HANDLERS = {**ops.HANDLERS, **dict.fromkeys(_PRODUCTS, _multiply)}
