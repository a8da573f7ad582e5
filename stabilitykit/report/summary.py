"""The short table under the verdict: what was seen."""

import math
from collections.abc import Iterator

from stabilitykit.records import Record
from stabilitykit.report.limits import worst_reading
from stabilitykit.report.panels import name_of
from stabilitykit.report.reading import counted, events, layers, show
from stabilitykit.report.weights import Comparison, comparisons, floor, windowed
from stabilitykit.runlog import Records


def table(records: Records) -> list[tuple[str, str]]:
    """What was seen, as (label, text) rows: steps, loss, attention, weights, events, cost."""
    rows = [("Steps", _steps(records)), ("Loss", _loss_row(records)), *_attention_rows(records)]
    rows += _ring_rows(records.of("ring"))
    rows += _weights_rows(records.of("weights"))
    flagged = events(records)
    kinds = dict.fromkeys(str(event.get("kind", "event")) for event in flagged)
    numbers = [f"{sum(e.get('kind') == kind for e in flagged)} {kind}" for kind in kinds]
    rows.append(("Events", ", ".join(numbers) or "none"))
    rows.append(("Cost", _cost_row(records)))
    if records.problems:
        rows.append(("Not readable", f"{counted(len(records.problems), 'line')} of the log"))
    return rows


def _steps(records: Records) -> str:
    seen = sorted({row.step for row in records.rows})
    attempts = sorted({row.attempt for row in records.rows})
    text = f"{len(seen):,} with records, {seen[0]} to {seen[-1]}"
    return text + (f", the last in attempt {attempts[-1]}" if attempts[-1] > 1 else "")


def _loss_row(records: Records) -> str:
    points = [(r.values["loss/value"], r.step) for r in records.of("loss") if "loss/value" in r.values]
    if not points:
        return "not watched"
    last, at = points[-1]
    finite = [point for point in points if math.isfinite(point[0])]
    text = f"{show(last)} at step {at}"
    return text + (f", lowest {show(min(finite)[0])} at step {min(finite)[1]}" if finite else "")


def _attention_rows(records: Records) -> Iterator[tuple[str, str]]:
    rows = records.of("attention")
    found = layers(rows)
    if not found:
        across = rows and layers(records.of("ring"))
        yield "Attention", "across ranks only" if across else "no call seen" if rows else "not measured"
        return
    sampled = rows[-1].detail.get("sampled", {})
    sizes = {what: len(size) if isinstance(size, list) else size for what, size in sampled.items()}
    of_each = ", ".join(counted(size, what.removesuffix("s")) for what, size in sizes.items())
    measured = f"{counted(len(found), 'layer')} on {counted(len(rows), 'step')}"
    yield "Attention", measured + (f", each time {of_each}" if of_each else "")
    worst = worst_reading(found)
    if worst:
        yield "Worst layer", f"{worst.place}: {worst.what} {show(worst.value)} at step {worst.step}"


def _ring_rows(rows: list[Record]) -> Iterator[tuple[str, str]]:
    if not rows:
        return
    found, rings = layers(rows), rows[-1].detail.get("balance", [])
    if not found:
        yield "Across ranks", "no call seen"
        return
    sizes = ", ".join(counted(len(ring["ranks"]), "rank") for ring in rings[:1])
    more = f" in each of {len(rings)} rings" if len(rings) > 1 else ""
    measured = f"{counted(len(found), 'layer')} on {counted(len(rows), 'step')}"
    yield "Across ranks", f"{measured}, {sizes}{more}, {counted(rows[-1].detail['rows'], 'row')} of each"


def _weights_rows(rows: list[Record]) -> Iterator[tuple[str, str]]:
    if not rows:
        yield "Weights", "not measured"
        return
    found, last = comparisons(rows), rows[-1]
    if windowed(rows):
        times = f"in {counted(len(rows), 'window')} of {counted(last.detail['window'], 'step')}"
    else:
        times = f"measured on {counted(len(rows), 'step')}"
    seeds = len(floor(last, "rel_l2"))
    beside = counted(seeds, "jitter seed") if seeds else "no noise floor"
    yield "Weights", f"{counted(len(found), 'arm')} ({', '.join(found)}) {times}, {beside}"
    latest = [looks[-1] for looks in found.values() if looks and looks[-1].row is last]
    if latest:
        yield "Last distance", f"{'; '.join(map(_distances, latest))}; at step {last.step}"


def _distances(look: Comparison) -> str:
    floors = [look.value(f"{name}_over_floor") for name in ("rel_l2", "w1")]
    if all(map(math.isfinite, floors)):
        return f"{look.arm} {show(floors[0])} floors in relative L2, {show(floors[1])} in W1"
    return f"{look.arm} {show(look.value('rel_l2'))} in relative L2, {show(look.value('w1'))} in W1"


def _cost_row(records: Records) -> str:
    rows = records.of("overhead")
    if not rows:
        return "not recorded"
    names = {name_of(key): value for key, value in rows[-1].values.items()}
    total = names.pop("total", math.nan)
    parts = ", ".join(f"{name} {show(value)}" for name, value in names.items())
    return f"{show(total)} % of the run without monitors" + (f" ({parts})" if parts else "")
