"""The ring's work on paper: schedules, published bounds and speed-ups, and what a link leaves of them."""

from collections.abc import Iterator
from typing import Any

from stabilitykit.parallel.balance import SCHEDULES, balance, work
from stabilitykit.parallel.published import printed
from stabilitykit.parallel.speedup import (
    PAPER_MODELS,
    Machine,
    advice,
    expected_speedup,
    fit_overhead,
    max_speedup,
)

Row = dict[str, Any]

BLOCK, TILE = 8192, (128, 128)
RANKS = (2, 4, 8, 16)
FLOPS = 150e12  # of an A100 in bf16 that reaches half of its peak
LINKS = {"NVLink, 300 GB/s": 300e9, "InfiniBand, 25 GB/s": 25e9, "Ethernet, 1.25 GB/s": 1.25e9}
LENGTHS = (32768, 262144)


def model_rows() -> list[Row]:
    """All rows that need no ranks."""
    return [*schedule_rows(), *published_rows(), *advice_rows()]


def schedule_rows() -> Iterator[Row]:
    """Per schedule and number of ranks: imbalance, critical path over the ideal, gain over contiguous.

    DistFlashAttn's (arXiv 2310.03294, section 3.2) helps idle ranks by taking their queries over: after
    the diagonal N // 2 rounds of whole blocks, an even last one half idle. Head-parallel attention
    (Ulysses, arXiv 2309.14509) has one round on whole sequences, and merges nothing: one rank's numerics.
    """
    for ranks in RANKS:
        path = balance("contiguous", ranks, BLOCK, tile=TILE).critical_path
        for name in SCHEDULES:
            found = balance(name, ranks, BLOCK, tile=TILE)
            ideal = sum(found.per_rank) / ranks
            yield {
                "experiment": "schedule", "schedule": name, "ranks": ranks,
                "rounds": len(work(name, ranks, BLOCK, tile=TILE)), "imbalance": found.imbalance,
                "path_over_ideal": found.critical_path / ideal, "gain": path / found.critical_path,
            }  # fmt: skip


def published_rows() -> Iterator[Row]:
    """Every printed speed-up beside the bound here and, on A100, what the overhead fitted on 1B predicts."""
    lines = printed()
    overhead = fit_overhead(
        [line.published for line in lines if line.device == "A100" and line.model == "1B"]
    )
    for line in lines:
        model = PAPER_MODELS[line.model]
        bound = max_speedup(model, line.tokens, line.ranks, attention_cost=line.attention_cost)
        row: Row = {"experiment": "published", **line._asdict(), "bound": bound}
        if line.device == "A100":
            predicted = expected_speedup(model, line.tokens, line.ranks, overhead=overhead)
            row |= {"predicted": predicted, "error": predicted - line.observed, "fitted": line.model == "1B"}
        yield row


def advice_rows() -> Iterator[Row]:
    """Per model, length and link on 8 ranks: seconds of a step and gain over contiguous, fastest first."""
    for name, model in PAPER_MODELS.items():
        for tokens in LENGTHS:
            for link, bandwidth in LINKS.items():
                for place, estimate in enumerate(advice(model, tokens, 8, Machine(FLOPS, bandwidth))):
                    yield {
                        "experiment": "advice", "model": name, "tokens": tokens, "ranks": 8, "link": link,
                        "place": place + 1, **estimate._asdict(),
                    }  # fmt: skip
