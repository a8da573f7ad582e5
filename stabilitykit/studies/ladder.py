"""The ladder of arXiv 2405.02803: runs of a tiny GPT from identical starts, one difference each."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stabilitykit.gpt.model import GPT, GPTConfig, loss
from stabilitykit.numerics.distance import Reference
from stabilitykit.observe.arm import Arm
from stabilitykit.observe.twin import Twin

Row = dict[str, Any]

VOCABULARY, CONTEXT, BATCH = 64, 128, 8
CONFIG = GPTConfig(vocab_size=VOCABULARY, context=CONTEXT, layers=2, heads=4, width=64)
LEARNING_RATE = 1e-3
PARTS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)  # of the steps: where distances are measured
JITTERS = 2  # runs per seed that give the floor
BASELINE = f"attention={__name__}:baseline"
# Each rung: the run, and the run it is compared with. All of one seed start from the same weights.
BASE, FULL = f"bfloat16+{BASELINE}", f"float32+{BASELINE}"
RUNGS: dict[str, tuple[str, str]] = {
    "same": (BASE, BASE),
    **{f"jitter {place}": (f"{BASE}+jitter", BASE) for place in range(JITTERS)},
    "flash": ("bfloat16+attention=flash", BASE),
    "flash, 16-bit state": ("bfloat16+attention=emulated(variant=fa1,state_dtype=bfloat16,tile_k=32)", BASE),
    "bfloat16": (BASE, FULL),
    "float16, scaled": (f"float16+{BASELINE}", FULL),
    "float16, unscaled": (f"float16=unscaled+{BASELINE}", FULL),
}
OTHER = "other initialisation"


def baseline(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """Causal softmax attention [b, h, n, d], scores and P rounded to the inputs' format: the baseline.

    Products of two 16-bit numbers are exact in float32, where they are added up: a CPU without 16-bit
    products is fast at these, and rounds alike.
    """
    dtype, n = q.dtype, q.shape[-2]

    def stored(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.float() for x in (q, k, v))
        scores = stored(stored(q @ k.mT) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
        return (stored(torch.softmax(scores, -1)) @ v).to(dtype)


def ladder(
    seeds: Sequence[int], steps: int, arms: Sequence[str] = (), rungs: dict[str, tuple[str, str]] = RUNGS
) -> list[Row]:
    """One row per seed, rung and measured step: `w1`, `max_abs` and `rel_l2` over all weights together.

    Raises:
        ValueError: an arm that does not parse, or that adds what the baseline already has.
    """
    own = {arm_rung(text): (beside_baseline(text), BASE) for text in arms}
    return [row for seed in seeds for row in _climb(seed, steps, {**rungs, **own})]


def arm_rung(text: str) -> str:
    """The rung of a user's arm."""
    return f"arm {text}"


def beside_baseline(text: str) -> str:
    """A user's arm as the baseline run has it: in bfloat16 and with its attention, but for what it changes.

    >>> beside_baseline("lr*0.5") == f"bfloat16+{BASELINE}+lr*0.5"
    True
    >>> beside_baseline("attention=math")
    'bfloat16+attention=math'
    """
    arm = Arm.parse(text)
    words = [] if arm.dtype or arm.autocast is not None else ["bfloat16"]
    words += [] if arm.attention else [BASELINE]
    return "+".join([*words, *([] if text == "same" else [text])])


def _climb(seed: int, steps: int, rungs: dict[str, tuple[str, str]]) -> Iterator[Row]:
    draw, batches = _markov(seed), torch.Generator().manual_seed(seed)
    module = _model(seed)
    references = {text: _twin(module, text, 0) for text in dict.fromkeys(of for _, of in rungs.values())}
    runs = {
        name: references[text] if text != of and text in references else _twin(module, text, place)
        for place, (name, (text, of)) in enumerate(rungs.items())
    }
    other_module = _model(seed + 1_000_003)
    other = _twin(other_module, BASE, 0)
    measured = {round(part * steps) for part in PARTS}
    for step in range(steps + 1):
        if step in measured or step == 0:
            starts = {text: Reference(twin.pairs()[1]) for text, twin in references.items()}
            for name, (_, of) in rungs.items():
                yield _row(seed, name, step, starts[of].distance(runs[name].pairs()[1]))
            yield _row(seed, OTHER, step, starts[BASE].distance(other.pairs()[1]))
        if step < steps:
            tokens = draw(batches)
            for twin in dict.fromkeys(
                [*runs.values(), *references.values()]
            ):  # the reference of one is a rung of another
                _train(twin, module, tokens)
            _train(other, other_module, tokens)


def _row(seed: int, rung: str, step: int, distance: dict[str, float]) -> Row:
    numbers = {key: distance[key] for key in ("w1", "max_abs", "rel_l2")}
    return {"experiment": "ladder", "seed": seed, "rung": rung, "step": step, **numbers}


def _model(seed: int) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(CONFIG)


def _twin(module: GPT, text: str, seed: int) -> Twin:
    return Twin(module, [torch.optim.AdamW(module.parameters(), LEARNING_RATE)], text, seed=seed)


def _train(twin: Twin, module: GPT, tokens: Tensor) -> None:
    twin.forward_backward(lambda: loss(module(tokens[:, :-1]), tokens[:, 1:])[0])
    twin.step()


def _markov(seed: int) -> Callable[[torch.Generator], Tensor]:
    """Draws batches [BATCH, CONTEXT + 1] of a Markov chain, which a tiny model learns in a few steps."""
    generator = torch.Generator().manual_seed(seed + 1)
    odds = (2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)).softmax(-1)

    def draw(batches: torch.Generator) -> Tensor:
        tokens = [torch.randint(VOCABULARY, (BATCH,), generator=batches)]
        for _ in range(CONTEXT):
            tokens.append(torch.multinomial(odds[tokens[-1]], 1, generator=batches)[:, 0])
        return torch.stack(tokens, 1)

    return draw


def at(rows: Sequence[Row], rung: str, key: str, step: int) -> list[float]:
    """One number per seed."""
    return [row[key] for row in rows if row["rung"] == rung and row["step"] == step]


def floor_at(rows: Sequence[Row], key: str, step: int) -> list[float]:
    """The median of the jittered runs, one number per seed."""
    runs = [at(rows, f"jitter {place}", key, step) for place in range(JITTERS)]
    return [statistics.median(seed) for seed in zip(*runs, strict=True)]


def slopes(rows: Sequence[Row], rung: str, key: str) -> list[float]:
    """Least-squares slope of a distance over steps, per seed."""
    found = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        points = [(row["step"], row[key]) for row in rows if row["rung"] == rung and row["seed"] == seed]
        found.append(statistics.linear_regression(*zip(*points, strict=True)).slope)
    return found
