"""How far one attention call is from exact attention, on a sample of its rows, heads and sequences."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabilitykit.numerics.deviation import deviation, perturb
from stabilitykit.numerics.exact import AttentionRows, attention_rows, exact_attention_grad, plain_attention
from stabilitykit.numerics.ties import row_ties
from stabilitykit.observe.exactly import exact_options, part_of
from stabilitykit.observe.sample import Sample, logit_bounds
from stabilitykit.observe.tap import AttentionCall

LOW_IS_BAD = ("entropy",)
SUMMED = ("nonfinite", "grad_nonfinite")
SIGNED = ("sign_bias", "delta_bias")
_OUT = (
    "roundoff_ratio",
    "rel_l2",
    "max_abs",
    "error_constant",
    "error_vs_baseline",
    "sign_bias",
)
_GRAD = ("roundoff_ratio", "rel_l2", "error_vs_baseline")
# What a record's values are made of: the catalog's keys without "attention/".
NUMBERS = (
    *_OUT,
    *("max_logit", "logit_bound", "entropy", "repeated_max", "probability_one", "delta_bias"),
    "nonfinite",
    *(f"grad_{name}" for name in (*_GRAD, "nonfinite")),
)


def unmeasurable(call: AttentionCall) -> str | None:
    """Why a call cannot be compared with exact attention, None when it can."""
    if call.kwargs["dropout_p"] > 0 and "dropout_mask" not in call.kwargs:
        return f"dropout {call.kwargs['dropout_p']:g} in the kernel, its mask is not known"
    if call.q.dim() != 4:
        return f"expected q of shape [b, h, q, d], got {tuple(call.q.shape)}"
    formats = {str(t.dtype).removeprefix("torch.") for t in (call.q, call.k, call.v)}
    if len(formats) > 1:
        return f"q, k and v of unlike formats: {', '.join(sorted(formats))}"
    if call.q.numel() == 0 or call.k.numel() == 0:
        return f"empty tensors: q {tuple(call.q.shape)}, k {tuple(call.k.shape)}"
    return None


def measured(
    call: AttentionCall,
    sample: Sample,
    *,
    backward: bool = True,
    dtype: torch.dtype = torch.float64,
    loss_scale: float = 1.0,
) -> dict[str, Any]:
    """The numbers of one call, worst over the sampled heads, and per head under "heads".

    Output and dq are compared on the sampled rows. dk and dv sum over all rows, so they are compared
    in full, for the sampled key heads; their numbers stand with the first sampled head of each.
    `logit_bound` is that of all heads and sequences. `loss_scale` is what the loss was multiplied by
    before its backward; it is divided out of "delta_walk", [sum, sum of squares, rows] of what the
    stored output's rounding moves delta = rowsum(dO * O) by, on the fixed rows.
    """
    part = _Part(call, sample, dtype, loss_scale)
    heads = part.forward()
    if backward and call.grad_out is not None:
        part.backward(heads)
    for row in heads:
        _join_grads(row)
    bounds = logit_bounds(call)
    for row in heads:
        row["logit_bound"] = bounds[row["head"]].item()
    return {
        "backend": call.backend,
        "dtype": str(call.q.dtype).removeprefix("torch."),
        **worst(heads),
        "logit_bound": bounds.max().item(),
        "heads": heads,
    }


def worst(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Per key the worst number over `rows`: counts added, entropy lowest, sign_bias farthest from 0."""
    result: dict[str, float] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        numbers = [row[key] for row in rows if isinstance(row.get(key), float)]
        if not numbers:
            continue
        if key in SUMMED:
            result[key] = sum(numbers)
        elif any(math.isnan(number) for number in numbers):
            result[key] = math.nan
        elif key in LOW_IS_BAD:
            result[key] = min(numbers)
        else:
            result[key] = max(numbers, key=abs) if key in SIGNED else max(numbers)
    return result


class _Part:
    """The sampled part of one call, beside what exact, plain and perturbed attention make of it."""

    def __init__(self, call: AttentionCall, sample: Sample, dtype: torch.dtype, loss_scale: float):
        self.call, self.sample, self.dtype, self.loss_scale = call, sample, dtype, loss_scale
        self.group = call.q.shape[1] // call.k.shape[1]
        self.options = part_of(exact_options(call.kwargs), sequences=sample.sequences)
        device = call.q.device
        self.rows = torch.tensor(sample.rows, device=device)
        self.generator = torch.Generator(device).manual_seed(sample.seed)
        self.q, self.k, self.v = (self._sequences(t) for t in (call.q, call.k, call.v))
        keys = sorted({head // self.group for head in sample.heads})
        queries = sorted({*sample.heads, *self._members(sample.key_heads)})
        self.moved = (
            self._stored(self.q, queries),
            self._stored(self.k, keys),
            self._stored(self.v, keys),
        )

    def _sequences(self, tensor: Tensor) -> Tensor:
        return tensor[self.sample.sequences]

    def _members(self, key_heads: list[int]) -> list[int]:
        return [key * self.group + i for key in key_heads for i in range(self.group)]

    def _compare(self, fast: Tensor, exact: Tensor, low: Tensor, moved: Tensor) -> dict[str, float]:
        return deviation(fast, exact, low, moved, dtype=self.call.q.dtype)

    def forward(self) -> list[dict[str, Any]]:
        """One dict of numbers per sampled head."""
        where: dict[str, Any] = {"rows": self.rows, "heads": self.sample.heads, **self.options}
        exact = self._exact(where)
        exact_out = self.exact_out
        moved = self._stored(attention_rows(*self.moved, dtype=self.dtype, **where).out)
        low = plain_attention(self.q, self.k, self.v, **where)
        ties = row_ties(self.q, self.k, self.v, **where)
        self.fast_out = fast = self._sequences(self.call.out)[:, self.sample.heads][:, :, self.rows]
        result = []
        for i, head in enumerate(self.sample.heads):
            numbers = self._compare(fast[:, i], exact_out[:, i], low[:, i], moved[:, i])
            result.append(
                {
                    "head": head,
                    **{key: numbers[key] for key in _OUT},
                    "nonfinite": _unshared_nonfinite(numbers),
                    "max_logit": exact.max_logit[:, i].max().item(),
                    "entropy": exact.entropy[:, i].mean().item(),
                    "repeated_max": ties.repeated_max[:, i].mean().item(),
                    "probability_one": ties.probability_one[:, i].mean().item(),
                }
            )
        return result

    def _exact(self, where: dict[str, Any]) -> AttentionRows:
        """Exact attention; beside its out keeps P k, which dq's noise needs, from the same pass."""
        width, dropped = self.v.shape[-1], where.get("dropout_mask") is not None
        both = torch.cat([self.v, self.k], -1)
        exact = attention_rows(self.q, self.k, both, dtype=self.dtype, **where)
        self.exact_out, self.seen_keys = exact.out[..., :width], exact.out[..., width:]
        if dropped:  # delta reaches dq through P as it was before dropout
            undropped = {**where, "dropout_mask": None, "dropout_p": 0.0}
            self.seen_keys = attention_rows(self.q, self.k, self.k, dtype=self.dtype, **undropped).out
        return exact

    def backward(self, heads: list[dict[str, Any]]) -> None:
        """Adds the gradients' numbers to the rows of the sampled heads."""
        call, sample = self.call, self.sample
        members = self._members(sample.key_heads)
        whole = len(sample.rows) == call.q.shape[2] and members == sample.heads
        here = self._grads(sample.heads, self.rows)
        if call.dq is not None:
            for row, numbers in zip(heads, self._queries(here), strict=True):
                row.update(numbers)
            self._delta(heads)
        if call.dk is not None and call.dv is not None:
            every = here if whole else self._grads(members, None)
            for key_head, numbers in self._keys(every).items():
                first = next(row for row in heads if row["head"] // self.group == key_head)
                first.update(numbers)

    def _queries(self, grads: "_Grads") -> list[dict[str, float]]:
        """dq on the sampled rows, per sampled head."""
        heads = self.sample.heads
        assert self.call.dq is not None
        fast, low = (t[:, heads][:, :, self.rows] for t in (self._sequences(self.call.dq), grads.low[0]))
        moved = grads.moved[0] + self._moved_by_stored_out(self._grad_out(heads, self.rows))
        moved = self._stored(moved)
        return [
            self._named("dq", fast[:, i], grads.exact[0][:, i], low[:, i], moved[:, i])
            for i in range(len(heads))
        ]

    def _keys(self, grads: "_Grads") -> dict[int, dict[str, float]]:
        """dk and dv over all rows, per sampled key head."""
        result: dict[int, dict[str, float]] = {}
        for name, at in (("dk", 1), ("dv", 2)):
            fast: Tensor = self._sequences(getattr(self.call, name))
            for head in self.sample.key_heads:
                moved = self._stored(grads.moved[at][:, head])
                numbers = self._named(
                    name, fast[:, head], grads.exact[at][:, head], grads.low[at][:, head], moved
                )
                result.setdefault(head, {}).update(numbers)
        return result

    def _delta(self, heads: list[dict[str, Any]]) -> None:
        # Always the same rows: per head their sum over the steps is one random walk, or there is a bias.
        fixed = [i for i, row in enumerate(self.sample.rows) if row in set(self.sample.fixed_rows)]
        if not fixed:
            return
        grad_out = self._grad_out(self.sample.heads, self.rows).double() / self.loss_scale
        gap = (grad_out * (self.fast_out.double() - self.exact_out.double())).sum(-1)[:, :, fixed]
        for i, row in enumerate(heads):
            walk = gap[:, i][gap[:, i].isfinite()]
            row["delta_walk"] = [walk.sum().item(), walk.square().sum().item(), float(walk.numel())]

    def _grad_out(self, heads: list[int], rows: Tensor | None) -> Tensor:
        assert self.call.grad_out is not None
        grad_out = self._sequences(self.call.grad_out)[:, heads]
        return grad_out if rows is None else grad_out[:, :, rows]

    def _stored(self, tensor: Tensor, heads: list[int] | None = None) -> Tensor:
        # What is as good as the format allows is also kept in it: without this, attention to keys
        # whose values share a mean (any trained model) accuses healthy 16-bit kernels by sqrt(keys).
        if heads is None:
            return perturb(tensor, self.call.q.dtype, self.generator)
        moved = tensor.double()  # of float64, which may not be written to, a copy
        moved = moved.clone() if moved is tensor else moved
        moved[:, heads] = perturb(tensor[:, heads], self.call.q.dtype, self.generator)
        return moved

    def _moved_by_stored_out(self, grad_out: Tensor) -> Tensor:
        """What dq moves by when the stored out, from which the backward takes delta, moves by one roundoff.

        delta = rowsum(dO * O), dS = P * (dP - delta), dq = scale dS k (FlashAttention-2, arXiv
        2307.08691, Alg. 2): a change e of delta moves dq by -scale e (P k).
        """
        out = self.exact_out
        change = (grad_out.to(out.dtype) * (self._stored(out) - out)).sum(-1, keepdim=True)
        scale = self.options["scale"] or self.q.shape[-1] ** -0.5
        return -scale * change * self.seen_keys

    def _grads(self, heads: list[int], rows: Tensor | None) -> "_Grads":
        where: dict[str, Any] = {"rows": rows, "heads": heads, **self.options}
        grad_out = self._grad_out(heads, rows)
        exact = exact_attention_grad(self.q, self.k, self.v, grad_out, dtype=self.dtype, **where)
        moved = exact_attention_grad(*self.moved, self._stored(grad_out), dtype=self.dtype, **where)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (self.q, self.k, self.v)]
            low = torch.autograd.grad(plain_attention(*leaves, **where), leaves, grad_out)
        return _Grads(exact, moved, low)

    def _named(self, name: str, fast: Tensor, exact: Tensor, low: Tensor, moved: Tensor) -> dict[str, float]:
        numbers = self._compare(fast, exact, low, moved)
        named = {f"{name}_{key}": numbers[key] for key in _GRAD}
        return {**named, f"{name}_nonfinite": _unshared_nonfinite(numbers)}


class _Grads(NamedTuple):
    """dq, dk, dv: exact; exact on moved inputs; autograd's of plain attention."""

    exact: tuple[Tensor, ...]
    moved: tuple[Tensor, ...]
    low: tuple[Tensor, ...]


def _unshared_nonfinite(numbers: dict[str, float]) -> float:
    return float(max(0, numbers["nonfinite_fast"] - numbers["nonfinite_exact"]))


def _join_grads(row: dict[str, Any]) -> None:
    grads = [
        {f"grad_{key}": row[f"{name}_{key}"] for key in (*_GRAD, "nonfinite") if f"{name}_{key}" in row}
        for name in ("dq", "dk", "dv")
    ]
    row.update(worst(grads))
