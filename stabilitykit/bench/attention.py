"""What exact attention costs: its time beside that of its matrix products, its memory beside its length."""

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stabilitykit.bench.steps import row
from stabilitykit.numerics.exact import exact_attention, exact_attention_grad

Shape = tuple[int, int, int, int]
SHAPES: dict[str, tuple[Shape, float]] = {  # [b, h, length, d], and the limit
    "d64_1024": ((1, 2, 1024, 64), 1.3),
    "d64_2048": ((1, 1, 2048, 64), 1.3),
    "gpt_nano": ((8, 4, 256, 32), 1.5),  # of recipes/gpt-nano.yaml
}
LENGTHS = (1024, 2048, 4096, 8192, 16384)
REPEATS = 3  # per round, the fastest counts: whatever else runs on the machine only adds
ROWS = 128  # of a block of the products: its scores stay in the cache


def attention(rounds: int = 5) -> list[dict[str, Any]]:
    """The rows of `stabilitykit bench attention`."""
    return [*exact_cost(rounds=rounds), *exact_memory()]


def exact_cost(*, rounds: int = 5, shapes: dict[str, tuple[Shape, float]] = SHAPES) -> list[dict[str, Any]]:
    """Per shape: exact float64 forward and backward of bf16 inputs, over its float64 matrix products.

    Those are seven: q k^T and p v forward; q k^T again, dO v^T, p^T dO, dS k and dS^T q backward. A causal
    call must do only the visible (length + 1) / (2 length) of them, so it is held against that much time;
    what it does of the hidden half, in the blocks on the diagonal, counts against it. `exact/SHAPE` is over
    the products of whole matrices as they lie, by one torch.bmm each; `..._fastest` over the fastest way to
    do them found here: in blocks that stay in the cache, k and v transposed beforehand.
    """
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, (shape, _) in shapes.items():
            for kind, ratio in _ratios(shape).items():
                found.setdefault(f"exact/{name}{kind}", []).append(ratio)
    limits = [limit for _, limit in shapes.values() for _ in range(len(found) // len(shapes))]
    return [
        row(name, values, "x its matrix products", limit)
        for (name, values), limit in zip(found.items(), limits, strict=True)
    ]


def exact_memory(*, lengths: Sequence[int] = LENGTHS, d: int = 64) -> list[dict[str, Any]]:
    """Per length: the most MiB that one head's forward and backward hold beside their inputs.

    Not causal, which takes more. The limit is a float64 matrix of all scores: it grows with the square of
    the length. That of `exact_memory/growth`, the last length's over the first's, is linear.
    """
    peaks = []
    for length in lengths:
        q = torch.ones(1, 1, length, d)
        with Held() as held:
            _exact(q, q, q, q, causal=False)
        peaks.append(held.most)
    rows = [
        row(f"exact_memory/{length}", [peak / 2**20], "MiB", length**2 * 8 / 2**20)
        for length, peak in zip(lengths, peaks, strict=True)
    ]
    growth, longer = peaks[-1] / peaks[0], lengths[-1] / lengths[0]
    return [*rows, row("exact_memory/growth", [growth], f"x at {longer:g} x the length", longer)]


class Held(TorchDispatchMode):
    """Counts the bytes of the tensors made inside that live at once; what an operator hides, it misses.

    The resident memory of the process would show that too, but the system takes pages away as it likes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._count(storage, 0)  # made outside, unless it is known
        made = func(*args, **(kwargs or {}))
        for storage in _storages(made):
            self._count(storage, storage.nbytes())
        return made

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._now += size
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _ratios(shape: Shape) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).bfloat16() for _ in range(4)]
    q, k, v, grad_out = inputs
    times = _fastest(
        {
            "plain": whole_products(*inputs),
            "whole": products(*inputs, rows=shape[2], heads=shape[1]),
            "blocks": products(*inputs, rows=ROWS, heads=1),
            "full": lambda: _exact(q, k, v, grad_out, causal=False),
            "causal": lambda: _exact(q, k, v, grad_out, causal=True),
        }
    )
    visible, fastest = (shape[2] + 1) / (2 * shape[2]), min(times["plain"], times["whole"], times["blocks"])
    return {
        "": times["full"] / times["plain"],
        "_causal": times["causal"] / (visible * times["plain"]),
        "_fastest": times["full"] / fastest,
        "_causal_fastest": times["causal"] / (visible * fastest),
    }


def _fastest(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of each, the least of REPEATS, taken in turns."""
    times = dict.fromkeys(runs, math.inf)
    for _ in range(REPEATS):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - started)
    return times


def _exact(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, causal: bool) -> None:
    exact_attention(q, k, v, causal=causal)
    exact_attention_grad(q, k, v, grad_out, causal=causal)


def whole_products(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> Callable[[], None]:
    """The seven products alone, all heads at once; memory for what they make is there before."""
    q, k, v, grad = (x.double().flatten(0, 1) for x in (q, k, v, grad_out))
    scores, of_rows, of_keys = (
        q.new_empty(len(q), q.shape[1], k.shape[1]),
        torch.empty_like(q),
        torch.empty_like(k),
    )

    def run() -> None:
        torch.bmm(q, k.mT, out=scores)
        torch.bmm(scores, v, out=of_rows)
        torch.bmm(q, k.mT, out=scores)
        torch.bmm(grad, v.mT, out=scores)
        torch.bmm(scores.mT, grad, out=of_keys)
        torch.bmm(scores, k, out=of_rows)
        torch.bmm(scores.mT, q, out=of_keys)

    return run


def products(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, rows: int, heads: int
) -> Callable[[], None]:
    """The seven products alone, `rows` of `heads` heads at a time, in the operands' fastest layout.

    What they need is in place before and what they make has its place, so that nothing but them is timed.
    """
    q, k, v, grad = (x.double().flatten(0, 1) for x in (q, k, v, grad_out))
    k, v = k.mT.contiguous(), v.mT.contiguous()
    scores = q.new_empty(heads, rows, k.shape[2])
    out, dk = torch.empty_like(q[:heads, :rows]), torch.zeros_like(k[:heads])

    def run() -> None:
        for head in range(0, len(q), heads):
            k_, v_ = k[head : head + heads], v[head : head + heads]
            for start in range(0, q.shape[1], rows):
                q_, grad_ = (x[head : head + heads, start : start + rows] for x in (q, grad))
                torch.bmm(q_, k_, out=scores)
                torch.bmm(scores, v_.mT, out=out)
                torch.bmm(q_, k_, out=scores)
                torch.bmm(grad_, v_, out=scores)
                dk.baddbmm_(grad_.mT, scores)
                torch.bmm(scores, k_.mT, out=out)
                dk.baddbmm_(q_.mT, scores)

    return run
