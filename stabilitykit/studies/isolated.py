"""Isolated attention: what arXiv 2405.02803 and 2510.04212 found in it, measured on an emulated kernel.

Every experiment returns rows of numbers; `claims` judges rows alone, so a false kernel can be fed in.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stabilitykit.numerics.deviation import deviation
from stabilitykit.numerics.emulated import emulated_flash_attention, tile_sizes
from stabilitykit.numerics.exact import exact_attention
from stabilitykit.numerics.formats import Precision, rounded
from stabilitykit.studies.claims import Claim, claim

Row = dict[str, Any]
Emulator = Callable[..., tuple[Tensor, Tensor]]

HEAD_DIM, TILE, LENGTH = 64, 64, 1024
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
TILES = (16, 32, 64, 128, 256, 512)
MANTISSAS = (4, 7, 10, 13, 16, 19, 22)
SRAM = 65536  # elements: tiles of 64 queries x 256 keys at head_dim 64
STATES = (torch.bfloat16, torch.float32)
VALIDATION_SEEDS = 20
PAPER = "arXiv 2405.02803"
BIAS = "arXiv 2510.04212"


def experiments(seeds: Sequence[int], kernel: Emulator = emulated_flash_attention) -> list[Row]:
    """The rows of every experiment, for `claims`."""
    rows: list[Row] = []
    for seed in seeds:
        rows += lengths(seed, kernel)
        rows += tiles(seed, kernel)
        rows += shapes(seed, kernel)
        rows += mantissas(seed, kernel)
        rows += repeated_maxima(seed, kernel)
        rows += outliers(seed, kernel)
    return [*rows, *rounding_example(kernel), *validation(kernel)]


def uniform(seed: int, n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, 1, n, 64], uniform in [0, 1), the inputs with which the published factor appears."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.rand(3, 1, 1, n, HEAD_DIM, generator=generator).to(dtype).unbind(0)
    return q, k, v


def plain(q: Tensor, k: Tensor, v: Tensor, precision: Precision) -> Tensor:
    """Softmax attention with the result of every step rounded to `precision`; the published baseline."""
    if precision not in (torch.float32, torch.float64):
        q, k, v = (rounded(x.double(), precision).float() for x in (q, k, v))
    carrier = precision if precision == torch.float64 else torch.float32
    q, k, v = (x.to(carrier) for x in (q, k, v))

    def stored(x: Tensor) -> Tensor:
        return x if precision == carrier else rounded(x, precision)

    scores = stored(stored(q @ k.mT) / math.sqrt(q.shape[-1]))
    return stored(stored(torch.softmax(scores, -1)) @ v)


def low_state(state: Precision) -> dict[str, Any]:
    """The paper's reading of the algorithm: FA-1 order, every running number in one format."""
    return {"variant": "fa1", "state_dtype": state}


def lengths(seed: int, kernel: Emulator) -> Iterator[Row]:
    """Error against length at fixed tiles, with the running state in 16 and in 32 bits (Fig. 5)."""
    for n in LENGTHS:
        q, k, v = uniform(seed, n)
        exact, baseline = exact_attention(q, k, v)[0], plain(q, k, v, torch.bfloat16)
        for state in STATES:
            options = low_state(state) if state == torch.bfloat16 else {"state_dtype": state}
            out = kernel(q, k, v, tile_q=TILE, tile_k=TILE, **options)[0]
            yield _row("length", seed, out, exact, baseline, n=n, state=_name(state))


def tiles(seed: int, kernel: Emulator) -> Iterator[Row]:
    """Error against the size of square tiles (Fig. 6c)."""
    q, k, v = uniform(seed, LENGTH)
    exact, baseline = exact_attention(q, k, v)[0], plain(q, k, v, torch.bfloat16)
    for tile in TILES:
        out = kernel(q, k, v, tile_q=tile, tile_k=tile, **low_state(torch.bfloat16))[0]
        yield _row("tile", seed, out, exact, baseline, tile=tile)


def shapes(seed: int, kernel: Emulator) -> Iterator[Row]:
    """Tiles of the SRAM formula, the same swapped, and square ones of the swapped key size (Fig. 6a, 6b)."""
    q, k, v = uniform(seed, LENGTH)
    exact, baseline = exact_attention(q, k, v)[0], plain(q, k, v, torch.bfloat16)
    tile_q, tile_k = tile_sizes(SRAM, HEAD_DIM)
    formats = {"formula": (tile_q, tile_k), "swapped": (tile_k, tile_q), "square": (tile_q, tile_q)}
    outs = {}
    for shape, (rows, keys) in formats.items():
        outs[shape] = kernel(q, k, v, tile_q=rows, tile_k=keys, **low_state(torch.bfloat16))[0]
        row = _row("shape", seed, outs[shape], exact, baseline, shape=shape, tile_q=rows, tile_k=keys)
        if shape == "square":
            row["apart_from_swapped"] = _largest(outs["square"], outs["swapped"].double())
        yield row


def mantissas(seed: int, kernel: Emulator) -> Iterator[Row]:
    """|flash - baseline|, both with all numbers at one mantissa width (Fig. 3)."""
    q, k, v = uniform(seed, 512, torch.float32)
    exact = exact_attention(q, k, v)[0]
    for bits in MANTISSAS:
        knobs = dict.fromkeys(("input_dtype", "state_dtype", "probs_dtype", "output_dtype"), bits)
        out = kernel(q, k, v, tile_q=TILE, tile_k=TILE, variant="fa1", **knobs)[0]
        baseline = plain(q, k, v, bits)
        apart = (out.double() - baseline.double()).abs().max().item()
        yield _row("mantissa", seed, out, exact, baseline, mantissa_bits=bits, apart=apart)


def repeated_maxima(seed: int, kernel: Emulator) -> Iterator[Row]:
    """Sign bias where every row's two largest scores are equal: P V of both, stored in 16 bits (Sec. 3)."""
    n, repeats = 512, 2
    generator = torch.Generator().manual_seed(seed)
    # 63 groups of two keys, one axis each; the other keys share the last axis, which no query has.
    axis = torch.cat([torch.arange(63).repeat_interleave(repeats), torch.full((n - 63 * repeats,), 63)])
    k = F.one_hot(axis, HEAD_DIM).float()
    # One height for all rows would round every P of the fix alike: a bias of our own making.
    peak = 12 + 6 * torch.rand(n, 1, generator=generator)
    q = F.one_hot(torch.arange(n) % 63, HEAD_DIM) * peak
    v = (torch.randn(n, HEAD_DIM, generator=generator) * 0.4 - 1.5).to(torch.bfloat16).float()
    q, k, v = (x[None, None] for x in (q, k, v))
    exact = exact_attention(q, k, v, scale=1.0)[0]
    for variant in ("fa2", "stabilised"):
        beta = {"beta": 2.0} if variant == "stabilised" else {}
        knobs: dict[str, Any] = dict.fromkeys(("probs_dtype", "accumulator_dtype"), torch.bfloat16)
        out = kernel(q, k, v, tile_q=n, tile_k=n, scale=1.0, variant=variant, **knobs, **beta)[0]
        bias = deviation(out, exact, dtype=torch.bfloat16)["sign_bias"]
        yield {"experiment": "repeated maxima", "seed": seed, "variant": variant, "sign_bias_ulp": bias}


def rounding_example(kernel: Emulator) -> Iterator[Row]:
    """The worked example of 2510.04212: two equal maxima and a residual, summed, stored in bfloat16."""
    total = -4.703990459442139  # of -2.40625, the next value and .00087 of all else, as printed there
    # The fourth value makes the softmax denominator a power of two: the division rounds nothing.
    values = torch.tensor([-2.40625, -2.296875, total + 4.703125, 0], dtype=torch.float32)
    q, k, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4, 4), values.view(1, 1, 4, 1)
    knobs: dict[str, Any] = {"probs_dtype": torch.bfloat16, "output_dtype": torch.float64}
    out, lse = kernel(q, k, v, accumulator_dtype=torch.bfloat16, **knobs)
    error = (out.double() * lse.double().exp()[..., None]).item() - total
    yield {"experiment": "rounding example", "seed": 0, "error": error}


def outliers(seed: int, kernel: Emulator) -> Iterator[Row]:
    """FlashAttention-3's Table 3: inputs with outliers, float16, RMSE from the un-rounded inputs' golden."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, 1, 1, 2048, 128)
    spread = 10 * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.001)
    q, k, v = (torch.randn(shape, generator=generator) + spread).unbind(0)
    exact = exact_attention(q, k, v)[0]
    q, k, v = (x.to(torch.float16) for x in (q, k, v))
    errors = {
        "rmse": deviation(kernel(q, k, v, tile_q=128, tile_k=128)[0], exact)["rmse"],
        "baseline_rmse": deviation(plain(q, k, v, torch.float16), exact)["rmse"],
    }
    yield {"experiment": "outliers", "seed": seed, "golden": "original", **errors}


def validation(kernel: Emulator) -> Iterator[Row]:
    """Max error of the emulator (float32 state, 16-bit P) and of this device's fused kernel, by seed."""
    for seed in range(VALIDATION_SEEDS):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = torch.randn(3, 1, 4, 256, HEAD_DIM, generator=generator).to(torch.bfloat16).unbind(0)
        exact = exact_attention(q, k, v)[0]
        real = F.scaled_dot_product_attention(q, k, v)
        errors = [_largest(out, exact) for out in (kernel(q, k, v)[0], real)]
        yield {"experiment": "validation", "seed": seed, "max_abs": errors[0], "real_max_abs": errors[1]}


def claims(rows: list[Row]) -> list[Claim]:
    """Every claim of the study, its band fixed here, held against the rows of `experiments`."""
    seeds = sorted({row["seed"] for row in rows if row["experiment"] == "length"})

    def find(seed: int, name: str, value: str = "ratio", **where: Any) -> list[float]:
        found = (r for r in rows if r["experiment"] == name and r["seed"] == seed)
        return [r[value] for r in found if all(r[key] == wanted for key, wanted in where.items())]

    def each(measure: Callable[[int], float]) -> list[float]:
        return [measure(seed) for seed in seeds]

    def growth(seed: int, state: str) -> list[float]:
        return find(seed, "length", state=state)

    bias = {v: each(lambda s, v=v: find(s, "repeated maxima", "sign_bias_ulp", variant=v)[0])
            for v in ("fa2", "stabilised")}  # fmt: skip
    emulated, real = find_all(rows, "validation", "max_abs"), find_all(rows, "validation", "real_max_abs")
    return [
        claim("|flash - baseline| falls with every 3 mantissa bits (largest step's ratio)",
              f"{PAPER}, Fig. 3", each(lambda s: _worst_step(find(s, "mantissa", "apart"))), high=1),
        claim("max error over the baseline's, bfloat16, N 1024, tile 64, 16-bit running state",
              f"{PAPER}, Fig. 4", each(lambda s: find(s, "length", n=LENGTH, state="bfloat16")[0]),
              low=5, high=15),
        claim("the same grows from N 128 to 4096 at fixed tiles",
              f"{PAPER}, Fig. 5", each(lambda s: growth(s, "bfloat16")[-1] / growth(s, "bfloat16")[0]),
              low=3),
        claim("swapped tiles deviate more than the SRAM formula's",
              f"{PAPER}, Fig. 6a", each(lambda s: find(s, "shape", shape="swapped")[0]
                                        / find(s, "shape", shape="formula")[0]), low=1.05),
        claim("square tiles of the same key size change nothing: only the key tile counts",
              f"{PAPER}, Fig. 6b", each(lambda s: find(s, "shape", "apart_from_swapped", shape="square")[0]),
              low=0, high=0),
        claim("larger tiles deviate less (largest step's ratio, tile 16 to 512)",
              f"{PAPER}, Fig. 6c", each(lambda s: _worst_step(find(s, "tile"))), high=1),
        claim("with float32 running state, as in real kernels, the error is below the baseline's",
              "facts of FlashAttention-2 and 3 (float32 softmax state)",
              each(lambda s: max(growth(s, "float32"))), high=1),
        claim("with float32 state it is flat in N (largest over smallest, N 128 to 4096)",
              "error of a convex mix of V: no growth with N",
              each(lambda s: max(growth(s, "float32")) / min(growth(s, "float32"))), high=1.15),
        claim("two equal maxima and a residual round to bfloat16 with error -0.01476 (worked example)",
              f"{BIAS}, Sec. 3", find_all(rows, "rounding example", "error"),
              low=-0.0147605, high=-0.0147585),
        claim("where maxima repeat, stored P V is rounded away from zero (mean, in ulp)",
              f"{BIAS}, Sec. 3", bias["fa2"], low=0.1),
        claim("the stabilised softmax takes that bias away (mean, in ulp)",
              f"{BIAS}, Alg. 1", bias["stabilised"], low=-0.05, high=0.05),
        claim("with outliers in float16, the baseline's RMSE over the kernel's (golden: un-rounded inputs)",
              "arXiv 2407.08608, Table 3: 1.7", each(lambda s: find(s, "outliers", "baseline_rmse")[0]
                                                     / find(s, "outliers", "rmse")[0]), low=1.2, high=2.5),
        claim("the emulator's mean max error over this device's fused kernel's",
              f"{PAPER}, Sec. III: validated against the kernel", [sum(emulated) / sum(real)],
              low=0.85, high=1.15),
    ]  # fmt: skip


def find_all(rows: list[Row], experiment: str, value: str) -> list[float]:
    """One column of an experiment."""
    return [row[value] for row in rows if row["experiment"] == experiment]


def _row(experiment: str, seed: int, out: Tensor, exact: Tensor, baseline: Tensor, **more: Any) -> Row:
    error, low = _largest(out, exact), _largest(baseline, exact)
    numbers = {"max_abs": error, "baseline_max_abs": low, "ratio": error / low if low else math.inf}
    return {"experiment": experiment, "seed": seed, **more, "golden": "rounded", **numbers}


def _largest(out: Tensor, exact: Tensor) -> float:
    return (out.double() - exact).abs().max().item()


def _worst_step(values: list[float]) -> float:
    """The largest ratio of a value to the one before it; below 1 the series falls throughout."""
    return max(after / before for before, after in pairwise(values))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
