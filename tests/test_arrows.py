"""DESIGN's table of who may import whom, held against the code by its syntax tree."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "stabilitykit"
MATHS = {"records", "catalog", "skiplist", "numerics"}
EVERYTHING_ABOVE = {
    *MATHS, "runlog", "readers", "parallel", "observe", "gpt", "report", "callbacks", "faults",
}  # fmt: skip
ARROWS: dict[str, set[str]] = {
    "records": set(),
    "catalog": set(),
    "skiplist": set(),
    "numerics": set(),
    "runlog": {"records"},
    "readers": {"records", "runlog"},
    "parallel": {"numerics", "records"},
    "observe": {"numerics", "records"},
    "gpt": {"parallel", "skiplist"},
    "report": {"catalog", "records", "runlog"},
    "callbacks": {
        "numerics",
        "parallel",
        "observe",
        "catalog",
        "records",
        "runlog",
        "skiplist",
        "report.sinks",
    },
    "faults": {"numerics", "observe"},
    "studies": EVERYTHING_ABOVE,
    "bench": EVERYTHING_ABOVE,
    "fit": EVERYTHING_ABOVE,
    "cli": {*EVERYTHING_ABOVE, "studies", "bench", "fit"},
    "__init__": {*EVERYTHING_ABOVE, "studies", "bench", "fit", "cli"},
}
TRAINER = ("pytorch_lightning", "lightning")
TRAINER_HOMES = ("callbacks/", "gpt/module.py", "faults.py", "studies/", "bench/", "fit.py")
TORCHLESS = (
    "records.py",
    "runlog.py",
    "catalog.py",
    "skiplist.py",
    "report/",
    "readers/columns.py",
    "readers/lines.py",
    "readers/losses.py",
    "readers/objects.py",
    "readers/offline.py",
    "readers/presets.py",
    "readers/protobuf.py",
    "readers/refusals.py",
    "readers/tables.py",
    "readers/tensorboard.py",
    "numerics/bands.py",
    "numerics/baseline.py",
    "numerics/event.py",
    "numerics/gradients.py",
    "numerics/history.py",
    "numerics/robust.py",
    "numerics/spike_score.py",
    "numerics/spikes.py",
    "numerics/trouble.py",
)


def imports(source: str) -> list[str]:
    """Every module a source imports, at its top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def violations(path: str, source: str) -> list[str]:
    """What `path` (relative to the package) imports and may not."""
    room = path.split("/")[0].removesuffix(".py")
    wrong = []
    for name in imports(source):
        top, *rest = name.split(".")
        if top == "stabilitykit" and rest:
            inside = rest[0] == room or (room == "__init__" and rest[0].startswith("__"))
            named = {rest[0], ".".join(rest[:2])}
            if not inside and not named & ARROWS[room] and rest[0] not in {"__version__"}:
                if not any(allowed.startswith(".".join(rest)) for allowed in ARROWS[room]):
                    wrong.append(f"{path} imports {name}")
        elif top in TRAINER and not path.startswith(TRAINER_HOMES):
            wrong.append(f"{path} imports {name}")
        elif top == "wandb" and not path.startswith(("report/", "readers/")):
            wrong.append(f"{path} imports {name}")
        elif top == "torch" and path.startswith(TORCHLESS):
            wrong.append(f"{path} imports {name}")
    return wrong


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_along_the_arrows(path):
    assert violations(path.relative_to(PACKAGE).as_posix(), path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("numerics/exact.py", "from stabilitykit.observe.tap import Tap"),
        ("numerics/exact.py", "import stabilitykit.records"),
        ("observe/tap.py", "def f():\n    import pytorch_lightning"),
        ("callbacks/loss.py", "from stabilitykit.report.page import write_report"),
        ("callbacks/loss.py", "import wandb"),
        ("report/page.py", "import torch"),
        ("gpt/model.py", "from stabilitykit import numerics"),
    ],
)
def test_a_planted_violation_is_found(path, source):
    assert violations(path, source)


def test_an_allowed_import_is_not_a_violation():
    assert violations("callbacks/loss.py", "from stabilitykit.report.sinks import Sinks") == []
