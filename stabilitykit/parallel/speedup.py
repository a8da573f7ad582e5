"""What a schedule gains in a whole training step: the paper's bound, its overhead, and a machine's links."""

from collections.abc import Sequence
from typing import NamedTuple

from scipy.optimize import least_squares

from stabilitykit.numerics.scores import require
from stabilitykit.parallel.balance import SCHEDULES, Schedule, Tile, balance, work
from stabilitykit.parallel.layout import padded_length

# Fitted: the paper gives no formula. Any value in 1.275..1.281 gives all of its 99 values to two decimals.
ATTENTION_CONSTANT = 1.28
BACKWARD = 2.5  # matrix products of attention's backward over those of its forward (5 by 2)


class Model(NamedTuple):
    """A decoder with gated feed-forward layers, as LLaMA's."""

    vocab_size: int
    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int | None = None


PAPER_MODELS = {  # arXiv 2311.09431, section 3
    "1B": Model(32000, 2048, 5504, 22, 16),
    "3B": Model(32000, 3200, 8640, 26, 32),
    "7B": Model(32000, 4096, 11008, 32, 32),
}


class Overhead(NamedTuple):
    """What the loop adds, in units of a full tile's time.

    `passed`: for every tile of a round, computed or skipped; `striped`: for every tile that the
    striped layout computes.
    """

    passed: float
    striped: float


# Fitted to the 38 A100 rows of the paper's 1B model (root mean square error 0.015 in the speed-up). On its
# 3B and 7B rows, held out, the error is 0.026, and 0.051 at most, mostly too low.
PAPER_OVERHEAD = Overhead(passed=0.0983, striped=0.1153)
A100_TILE = (2048, 4096)


class Published(NamedTuple):
    """A row of the paper's tables: striped over contiguous, in whole steps."""

    model: Model
    tokens: int
    ranks: int
    observed: float


class Machine(NamedTuple):
    """A rank and its links: floating-point operations and bytes to the next rank per second.

    `attention_cost`: time of an attention product over that of another of its size (2 if TF32 by bf16).
    """

    flops: float
    bandwidth: float
    latency_s: float = 1e-5
    attention_cost: float = 1.0
    bytes_per_number: int = 2


class Estimate(NamedTuple):
    """Seconds of a training step per sequence, gain over contiguous, seconds in which only links work."""

    schedule: Schedule
    step_s: float
    gain: float
    exposed_s: float


def max_speedup(
    model: Model, tokens: int, ranks: int, *, attention_cost: float, constant: float = ATTENTION_CONSTANT
) -> float:
    """The paper's Theoretical Max Speed-up of striped over contiguous, in [1, 2); links and tiles for free.

    `attention_cost`: 2 on its A100 (TF32 attention, bf16 elsewhere), 1 on its TPUs.

    >>> round(max_speedup(PAPER_MODELS["1B"], 262144, 8, attention_cost=1), 2)
    1.81
    """
    other, score = _costs(model, tokens, ranks, attention_cost * constant)
    full = (tokens / ranks) ** 2 * score
    return (other + (ranks - 0.5) * full) / (other + ranks / 2 * full)


def expected_speedup(
    model: Model,
    tokens: int,
    ranks: int,
    *,
    overhead: Overhead = PAPER_OVERHEAD,
    tile: Tile = A100_TILE,
    attention_cost: float = 2.0,
    schedule: Schedule = "striped",
) -> float:
    """The speed-up of a schedule over contiguous, in whole steps, with tiles and overhead; links for free."""
    other, score = _costs(model, tokens, ranks, attention_cost * ATTENTION_CONSTANT)
    block = tokens // ranks
    passed = overhead.passed * ranks * block**2

    def step(name: Schedule) -> float:
        computed = balance(name, ranks, block, tile=tile).critical_path
        return other + score * (computed * (1 + overhead.striped * (name == "striped")) + passed)

    return step("contiguous") / step(schedule)


def fit_overhead(
    rows: Sequence[Published], *, tile: Tile = A100_TILE, attention_cost: float = 2.0
) -> Overhead:
    """The overhead with which `expected_speedup` comes closest to the rows' observed, by least squares."""

    def errors(x: Sequence[float]) -> list[float]:
        return speedup_errors(rows, Overhead(*x), tile=tile, attention_cost=attention_cost)

    return Overhead(*(float(x) for x in least_squares(errors, [0.1, 0.1]).x))


def speedup_errors(
    rows: Sequence[Published], overhead: Overhead, *, tile: Tile = A100_TILE, attention_cost: float = 2.0
) -> list[float]:
    """Expected minus observed speed-up of each row: on rows the fit has not seen, its held-out error."""
    how = {"overhead": overhead, "tile": tile, "attention_cost": attention_cost}
    return [expected_speedup(row.model, row.tokens, row.ranks, **how) - row.observed for row in rows]


def advice(
    model: Model,
    tokens: int,
    ranks: int,
    machine: Machine,
    *,
    tile: Tile = (128, 128),
    overhead: Overhead = PAPER_OVERHEAD,
) -> list[Estimate]:
    """Schedules for a sequence of `tokens` over `ranks`, fastest first; an estimate, on paper.

    A round lasts as long as its busiest rank or its hop, whichever is longer: k and v forward, also
    dk and dv in float32 backward. Ulysses' all-to-alls hide behind nothing; where the heads do not
    divide, it is left out.

    Raises:
        ValueError: a length that the ranks do not divide evenly into zigzag's halves.
    """
    even = padded_length(tokens, ranks, "zigzag")
    require(tokens == even, f"tokens must be a multiple of 2 * {ranks}, got {tokens}; pad to {even}")
    keys = model.kv_heads or model.heads
    shared = model.heads % ranks == keys % ranks == 0
    names: list[Schedule] = [name for name in SCHEDULES if name != "ulysses" or shared]
    times: dict[Schedule, tuple[float, float]] = {
        name: _step(name, model, tokens, ranks, machine, tile, overhead) for name in names
    }
    base = times["contiguous"][0]
    found = [Estimate(name, total, base / total, exposed) for name, (total, exposed) in times.items()]
    return sorted(found, key=lambda estimate: estimate.step_s)


def _step(
    name: Schedule, model: Model, tokens: int, ranks: int, machine: Machine, tile: Tile, overhead: Overhead
) -> tuple[float, float]:
    """Seconds of a training step, and those of them in which only the links were busy."""
    other, score = (x / machine.flops for x in _costs(model, tokens, ranks, machine.attention_cost))
    block, stripes = tokens // ranks, 1 + overhead.striped * (name == "striped")
    rounds = work(name, ranks, block, tile=tile)
    passed = overhead.passed * block**2 * (ranks if name == "ulysses" else 1)
    busy = [score * (max(round_) * stripes + passed) for round_ in rounds]
    total, exposed = 3 * other, 0.0
    for seconds, hop in zip((1.0, BACKWARD), _hops(name, model, block, ranks, machine), strict=True):
        waits = [max(0.0, hop - seconds * work_s) for work_s in busy[:-1]]
        if name == "ulysses":
            waits = [hop]
        total += sum(busy) * seconds + sum(waits)
        exposed += sum(waits)
    return total, exposed


def _hops(name: Schedule, model: Model, block: int, ranks: int, machine: Machine) -> tuple[float, float]:
    """Seconds that one hop's bytes take, all layers together, forward and backward."""
    head_width, keys = model.width // model.heads, model.kv_heads or model.heads
    q, kv, number = block * model.width, 2 * block * keys * head_width, machine.bytes_per_number
    forward, backward = kv * number, kv * (number + 4)
    if name == "ulysses":  # q, k, v out and the result back; their gradients the other way
        forward = backward = (2 * q + kv) * number * (ranks - 1) / ranks
        backward *= 2  # as q, k, v are sent again
    elif name == "distflash":  # to a helper go q and back its result, where that is more than k and v
        forward, backward = max(forward, 2 * q * number), max(backward, 4 * q * number)
    forward, backward = (x / machine.bandwidth + machine.latency_s * (ranks > 1) for x in (forward, backward))
    return model.layers * forward * (ranks > 1), model.layers * backward * (ranks > 1)


def _costs(model: Model, tokens: int, ranks: int, attention_cost: float) -> tuple[float, float]:
    """Forward products of one rank but for attention's, and those of one score, all layers and heads."""
    d, block = model.width, tokens / ranks
    other = 2 * block * (model.layers * (4 * d * d + 3 * d * model.hidden) + d * model.vocab_size)
    return other, 4 * d * model.layers * attention_cost
