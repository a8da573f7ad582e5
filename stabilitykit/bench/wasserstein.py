"""How long exact Wasserstein distances take, beside scipy and the fastest sort of this machine."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor

from stabilitykit.bench.steps import row
from stabilitykit.numerics.parts import wasserstein_sharded
from stabilitykit.numerics.wasserstein import wasserstein
from stabilitykit.parallel.launch import on_ranks

SIZE = 10**7
RANKS = 2
SPEED_UP_FLOAT32, SPEED_UP_16_BIT = 10.0, 100.0
AGREEMENT = 1e-12  # relative: float64 sums of 1e7 values in another order

Split = tuple[Sequence[Tensor], Sequence[Tensor]]  # of one pair: a's and b's part on every rank


def wasserstein_bench(rounds: int = 3) -> list[dict[str, Any]]:
    """Per figure its value beside a limit, timings interleaved; `interval` is the span over rounds.

    Speed-ups are scipy's time over ours, at least `limit` (a ratio above 1 is good); `float32` is our
    seconds beside those of the fastest sort of both arrays; agreements are relative differences, at
    most `limit`.
    """
    draw = torch.Generator().manual_seed(0)
    full = (torch.randn(SIZE, generator=draw), 1.01 * torch.randn(SIZE, generator=draw))
    half = (full[0].bfloat16(), full[1].bfloat16())
    work: dict[str, Callable[[], Any]] = {
        "float32": partial(wasserstein, *full),
        "bf16": partial(wasserstein, *half),
        "scipy float32": partial(_scipy, *full),
        "scipy bf16": partial(_scipy, *half),
        "numpy.sort": lambda: [np.sort(tensor.numpy()) for tensor in full],
        "torch.sort": lambda: [torch.sort(tensor) for tensor in full],
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for name, call in work.items():
            started = time.perf_counter()
            found[name] = call()
            times[name].append(time.perf_counter() - started)
    split = sharded(RANKS, [(full[0].chunk(RANKS), full[1].chunk(RANKS))])[0]
    return [
        _speed_up("float32", times, SPEED_UP_FLOAT32),
        _speed_up("bf16", times, SPEED_UP_16_BIT),
        _beside_sort(times),
        _agreement("float32_agreement", found["float32"], found["scipy float32"]),
        _agreement("bf16_agreement", found["bf16"], found["scipy bf16"]),
        _agreement(f"sharded_{RANKS}_ranks_agreement", split, found["float32"]),
    ]


def sharded(world: int, pairs: Sequence[Split], p: float = 1) -> list[float]:
    """`wasserstein_sharded` of each pair on `world` gloo processes of this machine.

    Raises:
        ValueError: ranks that found different distances.
        torch.multiprocessing.ProcessRaisedException: what a rank raised.
    """
    everywhere = on_ranks(world, _of_rank, list(pairs), p)
    if any(found != everywhere[0] for found in everywhere):
        raise ValueError(f"expected one distance on all ranks, got {everywhere}")
    return everywhere[0]


def _of_rank(rank: int, world: int, pairs: Sequence[Split], p: float) -> list[float]:
    return [wasserstein_sharded(a[rank], b[rank], p=p) for a, b in pairs]


def _scipy(a: Tensor, b: Tensor) -> float:
    return float(wasserstein_distance(a.double().numpy(), b.double().numpy()))


def _speed_up(name: str, times: dict[str, list[float]], limit: float) -> dict[str, Any]:
    ratios = [theirs / ours for theirs, ours in zip(times[f"scipy {name}"], times[name], strict=True)]
    return row(f"{name}_speed_up", ratios, "x scipy, at least", limit)


def _beside_sort(times: dict[str, list[float]]) -> dict[str, Any]:
    fastest = min(("numpy.sort", "torch.sort"), key=lambda name: statistics.median(times[name]))
    limit = statistics.median(times[fastest])
    return row("float32", times["float32"], f"s; limit: both sorted by {fastest}", limit)


def _agreement(name: str, ours: float, theirs: float) -> dict[str, Any]:
    return row(name, [abs(ours - theirs) / theirs], "relative difference, at most", AGREEMENT)
