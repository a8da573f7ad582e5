"""The short table under the verdict: what was seen."""

import math
from collections.abc import Iterator

from stabilitykit.report.limits import worst_reading
from stabilitykit.report.panels import name_of
from stabilitykit.report.reading import counted, events, layers, show
from stabilitykit.runlog import Records


def table(records: Records) -> list[tuple[str, str]]:
    """What was seen, as (label, text) rows: steps, loss, attention, worst layer, events, cost."""
    rows = [("Steps", _steps(records)), ("Loss", _loss_row(records)), *_attention_rows(records)]
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
        yield "Attention", "no call seen" if rows else "not watched"
        return
    sampled = rows[-1].detail.get("sampled", {})
    sizes = {what: len(size) if isinstance(size, list) else size for what, size in sampled.items()}
    of_each = ", ".join(counted(size, what.removesuffix("s")) for what, size in sizes.items())
    measured = f"{counted(len(found), 'layer')} on {counted(len(rows), 'step')}"
    yield "Attention", measured + (f", each time {of_each}" if of_each else "")
    worst = worst_reading(found)
    if worst:
        yield "Worst layer", f"{worst.place}: {worst.what} {show(worst.value)} at step {worst.step}"


def _cost_row(records: Records) -> str:
    rows = records.of("overhead")
    if not rows:
        return "not recorded"
    names = {name_of(key): value for key, value in rows[-1].values.items()}
    total = names.pop("total", math.nan)
    parts = ", ".join(f"{name} {show(value)}" for name, value in names.items())
    return f"{show(total)} % of the run without monitors" + (f" ({parts})" if parts else "")
