"""Which of a log's columns are the loss and the step."""

from collections.abc import Iterable, Sequence
from pathlib import Path

LOSS_NAMES = (
    "loss",
    "train_loss",
    "train/loss",
    "loss/value",
    "loss/train",
    "training_loss",
    "train_loss_step",
    "train/loss_step",
    "loss_step",
    "lm loss",
)
ROW = "row"  # the step column of a log that has none: its rows are counted from 0


def choose(columns: Sequence[str], loss: str | None, step: str | None, path: Path) -> tuple[str, str]:
    """The loss and the step column: those named, else the first of LOSS_NAMES, and step or the first.

    Raises:
        ValueError: one that is not there; the columns are listed.
    """
    loss_column = find_loss(columns, loss)
    if loss_column is None:
        raise no_loss(columns, loss, path)
    if step is not None and step not in columns:
        raise ValueError(f"expected a step column {step!r} in {path}, found {_listed(columns)}")
    named = next((name for name in columns if name.lower() == "step"), columns[0])
    return loss_column, step or (named if named != loss_column else ROW)


def find_loss(columns: Sequence[str], loss: str | None) -> str | None:
    """The column named `loss`, or for None the first of LOSS_NAMES in any case; None when not there."""
    if loss is not None:
        return loss if loss in columns else None
    lower = {name.lower(): name for name in reversed(columns)}
    return next((lower[name] for name in LOSS_NAMES if name in lower), None)


def no_loss(columns: Sequence[str], loss: str | None, path: Path) -> ValueError:
    """The error that lists the columns there are."""
    what = repr(loss) if loss is not None else "such as " + ", ".join(LOSS_NAMES[:3])
    return ValueError(
        f"expected a loss column {what} in {path}, found {_listed(columns)}; "
        "name it with --loss, or read text with --preset or --pattern"
    )


def _listed(columns: Iterable[str]) -> str:
    names = [repr(name[:40]) for name in columns] or ["none"]
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "")
