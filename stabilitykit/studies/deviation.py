"""Study deviation: how far attention kernels are from exact attention, in isolation, and why."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from stabilitykit.report.study import bars, lines
from stabilitykit.studies.claims import Study
from stabilitykit.studies.isolated import claims, experiments
from stabilitykit.studies.kernels import (
    control_claims,
    controls,
    device_kernels,
    kernel_table,
    load_kernel,
    user_table,
)

Row = dict[str, Any]

WORDS = """\
The factor of ten that arXiv 2405.02803 reports appears when the running maximum, sum and accumulator are
kept in 16 bits; it then grows with every rescaling, so with the number of key tiles. Real kernels keep that
state in float32: their error is below the textbook's and does not grow with the length. What is left is one
rounding of P before P V and one of the output, and where a row's maxima repeat, the rounding of P V is not
random but away from zero (arXiv 2510.04212). None of this says that a kernel makes training unstable; it says
how far it is from exact on this input, and what a reading of AttentionMonitor is held against."""


def deviation_study(*, seeds: Sequence[int] = (0, 1, 2), kernel: str | None = None) -> Study:
    """Claims on isolated attention, every kernel of this device in one table, and a user's own.

    Raises:
        ValueError: a `kernel` that cannot be imported, raises, or returns another shape.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = load_kernel(kernel) if kernel else None
    users: list[Row] = list(user_table(kernel, own, seeds, device)) if kernel and own else []
    paper = experiments(seeds)
    kernels = device_kernels(device)
    rows = [*users, *kernel_table(seeds, device, kernels), *controls(seeds, device, kernels)]
    for row in rows:
        row["device"] = device
    held = [*claims(paper), *control_claims(rows)]
    return Study("deviation", held, [*paper, *rows], _figures(paper, rows), WORDS)


def _figures(paper: list[Row], rows: list[Row]) -> dict[str, dict[str, Any]]:
    states = {"bfloat16": "16-bit running state", "float32": "float32 running state, as in real kernels"}
    by_length = {
        label: _medians((r for r in paper if r["experiment"] == "length" and r["state"] == state), "n")
        for state, label in states.items()
    }
    by_tile = {"16-bit running state": _medians((r for r in paper if r["experiment"] == "tile"), "tile")}
    widths = [row for row in paper if row["experiment"] == "mantissa"]
    by_bits = {
        "|flash - baseline|": _medians(widths, "mantissa_bits", "apart"),
        "|flash - exact|": _medians(widths, "mantissa_bits", "max_abs"),
        "|baseline - exact|": _medians(widths, "mantissa_bits", "baseline_max_abs"),
    }
    real = {
        f"{row['kernel']}, {row['dtype']}, N {row['n']}": row["error_constant"]
        for row in rows
        if row["experiment"] == "kernel" and "error_constant" in row
    }
    healthy = [row for row in rows if row["experiment"] == "control"]
    sharpness = {
        f"{kernel}, {dtype}": _medians(
            (row for row in healthy if (row["kernel"], row["dtype"]) == (kernel, dtype)),
            "scale",
            "dq_roundoff_ratio",
        )
        for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in healthy)
    }
    ratio = "max error over the baseline's"
    return {
        "Error against length, tile 64, uniform inputs, bfloat16": lines(by_length, "N", ratio),
        "Error against tile size, N 1024, bfloat16": lines(by_tile, "tile (queries = keys)", ratio),
        "Error against mantissa bits, N 512": lines(by_bits, "mantissa bits", "max error", log_x=False),
        "Real kernels of this device": bars(real, "error in roundoffs of the largest output"),
        "dq of healthy kernels against sharpness": lines(
            sharpness, "standard deviation of q and k", "roundoff_ratio"
        ),
    }


def _medians(rows: Iterable[Row], x: str, y: str = "ratio") -> list[tuple[float, float]]:
    groups: dict[float, list[float]] = {}
    for row in rows:
        groups.setdefault(row[x], []).append(row[y])
    return [(key, statistics.median(values)) for key, values in sorted(groups.items())]
