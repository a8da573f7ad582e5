"""Which of a log's columns are the loss and the step."""

import re
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
    "lm_loss",
)
STEP_NAMES = (
    "step", "trainer/global_step", "train/global_step", "global_step", "_step", "iteration", "iter"
)  # fmt: skip
ROW = "row"  # the step column of a log that has none: its rows are counted from 0
_UNIT = re.compile(r"\s*[(\[][^)\]]*[)\]]$")


def choose(columns: Sequence[str], loss: str | None, step: str | None, path: Path) -> tuple[str, str]:
    """The loss and the step column: those named, else the first of LOSS_NAMES, and of STEP_NAMES or all.

    Raises:
        ValueError: one that is not there; the columns are listed.
    """
    loss_column = find_loss(columns, loss)
    if loss_column is None:
        raise no_loss(columns, loss, path)
    if step is not None and step not in columns:
        raise ValueError(f"expected a step column {step!r} in {path}, found {_listed(columns)}")
    lower = {name.lower(): name for name in reversed(columns)}
    named = next((lower[name] for name in STEP_NAMES if name in lower), columns[0])
    return loss_column, step or (named if named != loss_column else ROW)


def find_loss(columns: Sequence[str], loss: str | None) -> str | None:
    """The column named `loss`, or for None the first of LOSS_NAMES; None when it is not there or not one.

    >>> find_loss(["Step", "brisk-sun-7 - train/loss", "brisk-sun-7 - train/loss__MIN"], None)
    'brisk-sun-7 - train/loss'
    >>> find_loss(["Step", "a - loss", "b - loss"], None) is None
    True
    """
    if loss is not None:
        return loss if loss in columns else None
    for spelling in (str.lower, _plain):
        spelt = {name: spelling(name) for name in columns}
        for wanted in LOSS_NAMES:
            found = [name for name in spelt if spelt[name] == wanted]
            if len(found) == 1 or (found and spelling is str.lower):
                return found[0]
            if found:
                return None  # of two runs or two units neither is meant
    return None


def _plain(name: str) -> str:
    """A name without the run that W&B's export puts before it, and without its unit."""
    bare = _UNIT.sub("", name.lower().rpartition(" - ")[2])
    return bare.replace(" ", "_").replace(".", "/")  # a dot joins the keys of nested objects


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
