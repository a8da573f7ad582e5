"""How far one attention call is from exact attention, on a sample of its rows, heads and sequences."""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stabilitykit.numerics.deviation import deviation, perturb
from stabilitykit.numerics.exact import attention_rows, exact_attention_grad, plain_attention
from stabilitykit.observe.exactly import exact_options, part_of
from stabilitykit.observe.tap import AttentionCall

LOW_IS_BAD = ("entropy",)
SUMMED = ("nonfinite", "grad_nonfinite")
SIGNED = ("sign_bias",)
_OUT = (
    "roundoff_ratio",
    "rel_l2",
    "max_abs",
    "error_constant",
    "error_vs_baseline",
    "sign_bias",
)
_GRAD = ("roundoff_ratio", "rel_l2", "error_vs_baseline")


@dataclass(frozen=True, slots=True)
class Sample:
    """Which part of a call is measured: indices of heads, query rows and sequences, and a seed."""

    heads: list[int]
    rows: list[int]
    sequences: list[int]
    seed: int

    @classmethod
    def draw(
        cls,
        call: AttentionCall,
        seed: str,
        *,
        heads: int | list[int],
        rows: int,
        sequences: int,
    ) -> "Sample":
        """A sample that depends on `seed` and the call's shape alone.

        Raises:
            ValueError: a head index that the call does not have.
        """
        draw = random.Random(seed)
        have_sequences, have_heads, have_rows = call.q.shape[:3]
        if isinstance(heads, list):
            missing = [head for head in heads if not 0 <= head < have_heads]
            if missing:
                raise ValueError(f"{call.name}: expected heads in 0..{have_heads - 1}, got {missing}")
            chosen = sorted(heads)
        else:
            chosen = _some(draw, have_heads, heads)
        return cls(
            chosen,
            _some(draw, have_rows, rows),
            _some(draw, have_sequences, sequences),
            draw.getrandbits(31),
        )


def _some(draw: random.Random, have: int, want: int) -> list[int]:
    return sorted(draw.sample(range(have), min(want, have)))


def unmeasurable(call: AttentionCall) -> str | None:
    """Why a call cannot be compared with exact attention, None when it can."""
    if call.kwargs["dropout_p"] > 0 and "dropout_mask" not in call.kwargs:
        return f"dropout {call.kwargs['dropout_p']:g} in the kernel, its mask is not known"
    if call.q.dim() != 4:
        return f"expected q of shape [b, h, q, d], got {tuple(call.q.shape)}"
    if call.q.numel() == 0 or call.k.numel() == 0:
        return f"empty tensors: q {tuple(call.q.shape)}, k {tuple(call.k.shape)}"
    return None


def measured(
    call: AttentionCall,
    sample: Sample,
    *,
    backward: bool = True,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """The numbers of one call, worst over the sampled heads, and per head under "heads".

    Output and dq are compared on the sampled rows. dk and dv sum over all rows, so they are compared
    in full for the key head of one sampled head.
    """
    part = _Part(call, sample, dtype)
    heads = part.forward()
    if backward and call.grad_out is not None and call.dq is not None:
        for row, extra in zip(heads, part.queries_grad(), strict=True):
            row.update(extra)
    if backward and call.grad_out is not None and call.dk is not None and call.dv is not None:
        heads[0].update(part.keys_grad())
    for row in heads:
        _join_grads(row)
    return {
        "backend": call.backend,
        "dtype": str(call.q.dtype).removeprefix("torch."),
        **worst(heads),
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

    def __init__(self, call: AttentionCall, sample: Sample, dtype: torch.dtype):
        self.call, self.sample, self.dtype = call, sample, dtype
        self.group = call.q.shape[1] // call.k.shape[1]
        self.options = part_of(exact_options(call.kwargs), sequences=sample.sequences)
        device = call.q.device
        self.rows = torch.tensor(sample.rows, device=device)
        self.generator = torch.Generator(device).manual_seed(sample.seed)
        self.q, self.k, self.v = (self._sequences(t) for t in (call.q, call.k, call.v))
        self.moved = (self._stored(self.q), self._stored(self.k), self._stored(self.v))

    def _sequences(self, tensor: Tensor) -> Tensor:
        return tensor[self.sample.sequences]

    def _compare(self, fast: Tensor, exact: Tensor, low: Tensor, moved: Tensor) -> dict[str, float]:
        return deviation(fast, exact, low, moved, dtype=self.call.q.dtype)

    def forward(self) -> list[dict[str, Any]]:
        """One dict of numbers per sampled head."""
        where: dict[str, Any] = {"rows": self.rows, "heads": self.sample.heads, **self.options}
        exact = attention_rows(self.q, self.k, self.v, dtype=self.dtype, **where)
        self.exact_out = exact.out  # what dq's noise needs again
        moved = self._stored(attention_rows(*self.moved, dtype=self.dtype, **where).out)
        low = plain_attention(self.q, self.k, self.v, **where)
        fast = self._sequences(self.call.out)[:, self.sample.heads][:, :, self.rows]
        result = []
        for i, head in enumerate(self.sample.heads):
            numbers = self._compare(fast[:, i], exact.out[:, i], low[:, i], moved[:, i])
            result.append(
                {
                    "head": head,
                    **{key: numbers[key] for key in _OUT},
                    "nonfinite": _unshared_nonfinite(numbers),
                    "max_logit": exact.max_logit[:, i].max().item(),
                    "entropy": exact.entropy[:, i].mean().item(),
                }
            )
        return result

    def queries_grad(self) -> list[dict[str, float]]:
        """dq on the sampled rows, per sampled head."""
        call, heads = self.call, self.sample.heads
        assert call.grad_out is not None and call.dq is not None
        where: dict[str, Any] = {"rows": self.rows, "heads": heads, **self.options}
        grad_out = self._sequences(call.grad_out)[:, heads][:, :, self.rows]
        exact, low, moved = self._grads(where, self.q, self.k, self.v, self.moved, grad_out)
        low_rows = low[0][:, heads][:, :, self.rows]
        moved_dq = self._stored(moved[0] + self._moved_by_stored_out(where, grad_out))
        fast = self._sequences(call.dq)[:, heads][:, :, self.rows]
        return [
            self._named("dq", fast[:, i], exact[0][:, i], low_rows[:, i], moved_dq[:, i])
            for i in range(len(heads))
        ]

    def keys_grad(self) -> dict[str, float]:
        """dk and dv of the first sampled head's key head, over all rows."""
        call = self.call
        assert call.grad_out is not None and call.dk is not None and call.dv is not None
        key_head = self.sample.heads[0] // self.group
        queries = slice(key_head * self.group, (key_head + 1) * self.group)
        keys = slice(key_head, key_head + 1)
        q, k, v = self.q[:, queries], self.k[:, keys], self.v[:, keys]
        moved_in = (self.moved[0][:, queries], self.moved[1][:, keys], self.moved[2][:, keys])
        where = part_of(self.options, heads=queries)
        grad_out = self._sequences(call.grad_out)[:, queries]
        exact, low, moved = self._grads(where, q, k, v, moved_in, grad_out)
        dk, dv = self._sequences(call.dk)[:, keys], self._sequences(call.dv)[:, keys]
        return {
            **self._named("dk", dk, exact[1], low[1], self._stored(moved[1])),
            **self._named("dv", dv, exact[2], low[2], self._stored(moved[2])),
        }

    def _stored(self, tensor: Tensor) -> Tensor:
        # What is as good as the format allows is also kept in it: without this, attention to keys
        # whose values share a mean (any trained model) accuses healthy 16-bit kernels by sqrt(keys).
        return perturb(tensor, self.call.q.dtype, self.generator)

    def _moved_by_stored_out(self, where: dict[str, Any], grad_out: Tensor) -> Tensor:
        """What dq moves by when the stored out, from which the backward takes delta, moves by one roundoff.

        delta = rowsum(dO * O), dS = P * (dP - delta), dq = scale dS k (FlashAttention-2, arXiv
        2307.08691, Alg. 2): a change e of delta moves dq by -scale e (P k).
        """
        out = self.exact_out
        undropped = {**where, "dropout_mask": None, "dropout_p": 0.0}
        keys = attention_rows(self.q, self.k, self.k, dtype=self.dtype, **undropped).out
        change = (grad_out.to(out.dtype) * (self._stored(out) - out)).sum(-1, keepdim=True)
        scale = self.options["scale"] or self.q.shape[-1] ** -0.5
        return -scale * change * keys

    def _grads(
        self,
        where: dict[str, Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        moved_in: tuple[Tensor, Tensor, Tensor],
        grad_out: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        exact = exact_attention_grad(q, k, v, grad_out, dtype=self.dtype, **where)
        moved = exact_attention_grad(*moved_in, self._stored(grad_out), dtype=self.dtype, **where)
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            low = torch.autograd.grad(plain_attention(*leaves, **where), leaves, grad_out)
        return exact, low, moved

    def _named(self, name: str, fast: Tensor, exact: Tensor, low: Tensor, moved: Tensor) -> dict[str, float]:
        numbers = self._compare(fast, exact, low, moved)
        named = {f"{name}_{key}": numbers[key] for key in _GRAD}
        return {**named, f"{name}_nonfinite": _unshared_nonfinite(numbers)}


def _unshared_nonfinite(numbers: dict[str, float]) -> float:
    return float(max(0, numbers["nonfinite_fast"] - numbers["nonfinite_exact"]))


def _join_grads(row: dict[str, Any]) -> None:
    grads = [
        {f"grad_{key}": row[f"{name}_{key}"] for key in (*_GRAD, "nonfinite") if f"{name}_{key}" in row}
        for name in ("dq", "dk", "dv")
    ]
    row.update(worst(grads))
