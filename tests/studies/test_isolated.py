"""Each claim holds on one seed, and a kernel made false in that one respect breaks it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from stabilitykit.numerics.exact import plain_attention
from stabilitykit.studies import isolated
from stabilitykit.studies.isolated import emulated_flash_attention as kernel

Emulator = Callable[..., tuple[Tensor, Tensor]]
EXPERIMENTS: dict[str, Callable[[Emulator], Any]] = {
    "length": lambda k: isolated.lengths(0, k),
    "tile": lambda k: isolated.tiles(0, k),
    "shape": lambda k: isolated.shapes(0, k),
    "mantissa": lambda k: isolated.mantissas(0, k),
    "repeated maxima": lambda k: isolated.repeated_maxima(0, k),
    "outliers": lambda k: isolated.outliers(0, k),
    "rounding example": isolated.rounding_example,
    "validation": isolated.validation,
}


def without(*names: str) -> Emulator:
    """A kernel deaf to some of its knobs."""
    return lambda q, k, v, **knobs: kernel(q, k, v, **{n: x for n, x in knobs.items() if n not in names})


def with_(**forced: Any) -> Emulator:
    return lambda q, k, v, **knobs: kernel(q, k, v, **{**knobs, **forced})


def low_state(q: Tensor, k: Tensor, v: Tensor, **knobs: Any) -> tuple[Tensor, Tensor]:
    return kernel(q, k, v, **{**knobs, **isolated.low_state(torch.bfloat16)})


high_state = without("state_dtype", "variant")


def more_bits_are_fewer(q: Tensor, k: Tensor, v: Tensor, **knobs: Any) -> tuple[Tensor, Tensor]:
    turned = {n: 26 - x if isinstance(x, int) and n.endswith("dtype") else x for n, x in knobs.items()}
    return kernel(q, k, v, **turned)


def larger_tiles_are_smaller(q: Tensor, k: Tensor, v: Tensor, **knobs: Any) -> tuple[Tensor, Tensor]:
    return kernel(q, k, v, **{**knobs, "tile_k": 8192 // knobs["tile_k"]})


def tiles_turned(q: Tensor, k: Tensor, v: Tensor, **knobs: Any) -> tuple[Tensor, Tensor]:
    return kernel(q, k, v, **{**knobs, "tile_k": knobs["tile_q"]})


def as_plain(q: Tensor, k: Tensor, v: Tensor, **knobs: Any) -> tuple[Tensor, Tensor]:
    return isolated.plain(q, k, v, torch.float16), torch.zeros(())


FALSE: list[tuple[str, str, Emulator]] = [
    ("falls with every 3 mantissa bits", "mantissa", more_bits_are_fewer),
    ("16-bit running state", "length", high_state),
    ("grows from N 128 to 4096", "length", high_state),
    ("swapped tiles", "shape", with_(tile_k=64)),
    ("square tiles", "shape", tiles_turned),
    ("larger tiles", "tile", larger_tiles_are_smaller),
    ("float32 running state", "length", low_state),
    ("flat in N", "length", low_state),
    ("worked example", "rounding example", without("accumulator_dtype")),
    ("rounded away from zero", "repeated maxima", without("accumulator_dtype")),
    ("takes that bias away", "repeated maxima", with_(variant="fa2")),
    ("outliers in float16", "outliers", as_plain),
    ("the emulator's mean max error", "validation", low_state),
]


@cache
def measured(experiment: str, false: Emulator) -> list[dict[str, Any]]:
    return list(EXPERIMENTS[experiment](false))


@pytest.fixture(scope="module")
def healthy() -> dict[str, list[dict[str, Any]]]:
    return {name: list(run(kernel)) for name, run in EXPERIMENTS.items()}


def judged(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    found = isolated.claims([row for part in rows.values() for row in part])
    return {claim.claim: claim.holds for claim in found}


def test_every_claim_holds_and_has_a_false_kernel(healthy: dict[str, list[dict[str, Any]]]) -> None:
    found = judged(healthy)
    assert all(holds is True for holds in found.values()), found
    assert len(found) == len(FALSE)
    for words, _, _ in FALSE:
        assert sum(words in text for text in found) == 1, words


@pytest.mark.parametrize(("words", "experiment", "false"), FALSE, ids=[words for words, _, _ in FALSE])
def test_a_false_kernel_breaks_its_claim(
    words: str, experiment: str, false: Emulator, healthy: dict[str, list[dict[str, Any]]]
) -> None:
    found = judged({**healthy, experiment: measured(experiment, false)})
    broken = next(text for text in found if words in text)
    assert found[broken] is False


def test_plain_in_bfloat16_is_torchs_own_but_for_single_roundings() -> None:
    q, k, v = isolated.uniform(3, 96)
    ours, torchs = isolated.plain(q, k, v, torch.bfloat16), plain_attention(q, k, v).float()
    assert (ours == torchs).float().mean() > 0.98
    assert (ours - torchs).abs().max() <= 2**-8  # one bfloat16 step of a mean of [0, 1) numbers


def test_plain_in_float64_is_the_textbooks() -> None:
    q, k, v = isolated.uniform(0, 32, torch.float64)
    expected = torch.softmax(q @ k.mT / 8, -1) @ v
    torch.testing.assert_close(isolated.plain(q, k, v, torch.float64), expected, rtol=1e-14, atol=0)
