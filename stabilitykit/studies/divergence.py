"""Study divergence: how far a kernel moves the weights of a training run, and what that compares with."""

import statistics
from collections.abc import Sequence
from typing import Any

from stabilitykit.report.reading import show
from stabilitykit.report.study import bars, lines
from stabilitykit.studies.claims import Claim, Study, claim, comparison
from stabilitykit.studies.ladder import JITTERS, OTHER, arm_rung, at, floor_at, ladder, slopes

Row = dict[str, Any]

STEPS = 150
PAPER = "arXiv 2405.02803"
BEFORE = "measured on this model at 300 steps, before the study was written"
UNSCALED, SCALED = "float16, unscaled", "float16, scaled"
PUBLISHED = (
    f"{PAPER}, Fig. 8: 1/5 to 1/2, on a text-to-image model; neither its float16 recipe nor the "
    "normalisation of W1 is told, so this is a proxy"
)


def divergence_study(
    *, seeds: Sequence[int] = (0, 1, 2), steps: int = STEPS, arms: Sequence[str] = ()
) -> Study:
    """The paper's ladder from identical starts, with `arms` of the user's beside the baseline run.

    Raises:
        ValueError: fewer than 20 steps, no seed or one twice; an arm that does not parse.
    """
    if steps < 20:
        raise ValueError(f"expected --steps >= 20, got {steps}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"expected seeds that differ, got {list(seeds)}")
    rows = ladder(seeds, steps, arms)
    summary = rungs(rows)
    return Study("divergence", claims(rows), [*rows, *summary], _figures(rows, summary), words(summary, arms))


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Every claim of the study, its band fixed here, held against the rows of `ladder`; W1 is the last."""
    steps = sorted({row["step"] for row in rows})
    last, measured = steps[-1], steps[1:]

    def over(key: str, rung: str, other: str, step: int = last) -> list[float]:
        return _over(at(rows, rung, key, step), at(rows, other, key, step))

    return [
        claim("two runs of one arm have equal weights throughout (largest difference)",
              "a twin runs the very same operations",
              [max(at(rows, "same", "max_abs", step)) for step in steps], low=0, high=0),
        comparison("one ulp at the start spreads: rel L2 of the jittered run, last over first measured step",
                   f"{PAPER}, Fig. 7, which has no floor",
                   _over(floor_at(rows, "rel_l2", last), floor_at(rows, "rel_l2", measured[0])), above=True),
        *(comparison(f"flash moves the weights further than one ulp of jitter: rel L2 at step {step}",
                     f"{PAPER}, Fig. 7, which has no floor",
                     _over(at(rows, "flash", "rel_l2", step), floor_at(rows, "rel_l2", step)), above=True)
          for step in measured),
        comparison("flash drifts no faster than another initialisation: slopes of W1",
                   f"{PAPER}, Fig. 8", _over(slopes(rows, "flash", "w1"), slopes(rows, OTHER, "w1"))),
        comparison("flash is nearer to its baseline than float16 without loss scaling to float32: W1",
                   PUBLISHED, over("w1", "flash", UNSCALED)),
        comparison("flash is nearer to its baseline than bfloat16 to float32: W1",
                   PUBLISHED, over("w1", "flash", "bfloat16")),
        comparison("flash is further from its baseline than float16 with loss scaling from float32: W1",
                   f"{BEFORE}: 3.8", over("w1", "flash", SCALED), above=True),
        comparison("flash with a 16-bit running state is further from the baseline: largest difference",
                   f"{BEFORE}: 3.4", over("max_abs", "flash, 16-bit state", "flash"), above=True),
        *(comparison(f"{rung} is nearer to its reference than another initialisation: rel L2",
                     f"{PAPER}, Sec. V", over("rel_l2", rung, OTHER))
          for rung in ("flash", UNSCALED)),
    ]  # fmt: skip


def rungs(rows: Sequence[Row]) -> list[Row]:
    """One row per rung and measured step: medians over seeds, ratio to the floor with its range, slope."""
    steps = sorted({row["step"] for row in rows})[1:]
    found: list[Row] = []
    for rung in dict.fromkeys(row["rung"] for row in rows):
        slope = statistics.median(slopes(rows, rung, "w1"))
        for step in steps:
            ratios = _over(at(rows, rung, "rel_l2", step), floor_at(rows, "rel_l2", step))
            numbers = {
                key: statistics.median(at(rows, rung, key, step)) for key in ("w1", "max_abs", "rel_l2")
            }
            row = {"experiment": "rung", "rung": rung, "step": step, **numbers}
            row |= {"rel_l2_over_floor": statistics.median(ratios), "range": [min(ratios), max(ratios)]}
            found.append({**row, "w1_slope": slope})
    return found


def words(summary: Sequence[Row], arms: Sequence[str]) -> str:
    """What can and what cannot be concluded, and where the user's arms stand."""
    last = max(row["step"] for row in summary)
    end = {row["rung"]: row for row in summary if row["step"] == last}
    flash, other, scaled, unscaled = (end[rung] for rung in ("flash", OTHER, SCALED, UNSCALED))
    parts = [_place(end, arm_rung(text)) for text in arms]
    parts += [
        f"After {last} steps from identical starts the run with flash attention is at relative L2 "
        f"{show(flash['rel_l2'])} from its baseline, {_floors(flash)}; another initialisation is at "
        f"{show(other['rel_l2'])}. Float16 is at W1 {show(unscaled['w1'])} from float32 without loss scaling "
        f"and at {show(scaled['w1'])} with it, flash at {show(flash['w1'])}: whether a kernel counts as "
        "nearer than low precision depends on the recipe, which the published factor of 2 to 5 leaves out.",
        "What can be concluded: rounding of any kind spreads through training, one ulp at the start no less "
        "than a kernel, so a distance means something only beside the floor of as many steps. A claim whose "
        "interval holds 1 is not decided by these seeds; it has not been refuted, and more seeds narrow it.",
        "What cannot: that a kernel above the floor makes training worse, or that one within it is harmless. "
        "The distances say how far rounding has come, not whether it has a direction, and a fault that is "
        "rare or needs longer sequences, sharp attention or a large model does not show in a tiny one on "
        f"synthetic text. W1 compares the weights as heaps of numbers: another initialisation is at only "
        f"{show(other['w1'])} there. {PAPER} itself draws no conclusion on instability from it.",
    ]
    return "\n\n".join(parts)


def _place(end: dict[str, Row], text: str) -> str:
    own, key = end[text], "rel_l2"
    others = {rung: row[key] for rung, row in end.items() if rung != text and not rung.startswith("jitter ")}
    others["jitter"] = statistics.median(end[f"jitter {place}"][key] for place in range(JITTERS))
    below = [rung for rung, value in others.items() if value <= own[key]]
    above = [rung for rung, value in others.items() if value > own[key]]
    place = " and ".join(
        [f"above {max(below, key=others.__getitem__)!r}"] * bool(below)
        + [f"below {min(above, key=others.__getitem__)!r}"] * bool(above)
    )
    effect = " This arm had no effect." if own["max_abs"] == 0 else ""
    return (
        f"{text} beside the baseline in bfloat16: relative L2 {show(own[key])} after {own['step']} steps, "
        f"{_floors(own)}; on the ladder {place or 'not a number'}.{effect}"
    )


def _floors(row: Row) -> str:
    low, high = row["range"]
    return f"{show(row['rel_l2_over_floor'])} times the floor ({show(low)} to {show(high)} over seeds)"


def _over(parts: Sequence[float], wholes: Sequence[float]) -> list[float]:
    return [part / whole if whole else float("nan") for part, whole in zip(parts, wholes, strict=True)]


def _figures(rows: Sequence[Row], summary: Sequence[Row]) -> dict[str, dict[str, Any]]:
    last = max(row["step"] for row in summary)

    def series(key: str) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for row in summary:
            found.setdefault(row["rung"], []).append((row["step"], row[key]))
        return {rung: points for rung, points in found.items() if rung != "same"}

    def ends(key: str) -> dict[str, float]:
        return {row["rung"]: row[key] for row in summary if row["step"] == last and row["rung"] != OTHER}

    return {
        "Relative L2 over steps": lines(series("rel_l2"), "step", "relative L2"),
        "W1 over steps": lines(series("w1"), "step", "W1"),
        "Relative L2 in floors over steps": lines(series("rel_l2_over_floor"), "step", "floors"),
        f"Relative L2 after {last} steps, in floors": bars(ends("rel_l2_over_floor"), "floors"),
        f"W1 after {last} steps": bars(ends("w1"), "W1"),
        "Slope of W1": bars(ends("w1_slope"), "W1 per step"),
    }
