"""The commands, thin: each parses, calls one function, prints. Errors are one line and exit code 2."""

import argparse
import json
import re
import sys
import traceback
import webbrowser
from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from stabilitykit.records import one_line
from stabilitykit.report.text import table


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 0 done, 1 the command's own 'found', 2 usage or unreadable input."""
    args = sys.argv[1:] if argv is None else argv
    commands: dict[str, Callable[[list[str]], int]] = {
        "fit": fit,
        "report": report,
        "spikes": spikes,
        "compare": compare,
        "dashboard": dashboard,
        "study": study,
        "bench": bench,
    }
    if not args or args[0] in ("-h", "--help"):
        print("usage: stabilitykit COMMAND ...\n")
        for name, command in commands.items():
            print(f"  {name:<10} {command.__doc__}")
        print("\n`stabilitykit COMMAND --help` tells more")
        return 0 if args else 2
    try:
        if args[0] not in commands:
            raise ValueError(f"expected a command ({', '.join(commands)}), got {args[0]!r}")
        return commands[args[0]](args[1:])
    except (ValueError, OSError, argparse.ArgumentError) as problem:
        print(f"stabilitykit: error: {_told(_own(problem))}", file=sys.stderr)
        return 2
    except SystemExit as exit:  # --help, --print_config
        return exit.code if isinstance(exit.code, int) else 2


# In jsonargparse's list of all the types that a value is not: what is wrong with it as the class it names.
_MEANT = re.compile(
    r"Problem with given class_path '(\S+)':\s*(.+?)(?=\n\s*- |\n\s*Given value|\Z)", re.DOTALL
)


def _told(problem: BaseException) -> str:
    meant = _MEANT.findall(str(problem))
    return one_line(ValueError(": ".join(meant[-1])) if meant else problem)


def _own(problem: BaseException) -> BaseException:
    # jsonargparse wraps what a constructor of ours raised in pages of its own: ours is the clear line.
    wrappers = (__name__, "stabilitykit.fit")  # they hand on what others raised
    cause: BaseException | None = problem
    while cause is not None:
        frames = list(traceback.walk_tb(cause.__traceback__))
        home = frames[-1][0].f_globals["__name__"] if frames else ""
        if isinstance(cause, ValueError) and home.startswith("stabilitykit.") and home not in wrappers:
            return cause
        cause = cause.__cause__ or cause.__context__
    return problem


def _parser(command: str, description: str) -> ArgumentParser:
    return ArgumentParser(prog=f"stabilitykit {command}", description=description, exit_on_error=False)


def fit(argv: list[str]) -> int:
    """Trains from a recipe; ends with what was seen, what it cost and where the report lies."""
    from stabilitykit.fit import fit

    return fit(argv)


def report(argv: list[str]) -> int:
    """Writes, or prints, the report of a run."""
    parser = _parser("report", "The report of a run: one HTML file, or text.")
    parser.add_argument(
        "run", metavar="RUN_DIR", type=str, help="the run's folder, or one above: then of the newest in it"
    )
    parser.add_argument("--out", type=str, help="where to write it (default: RUN_DIR's report.html)")
    parser.add_argument("--format", choices=["html", "text"], default="html", help="a page, or its summary")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    args = parser.parse_args(argv)
    from stabilitykit.report.page import text_report, write_report

    if args.format == "text":
        _print_or_write(text_report(Path(args.run)), args.out)
        return 0
    path = write_report(Path(args.run), Path(args.out) if args.out else None)
    print(path)
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _print_or_write(text: str, out: str | None) -> None:
    if out is None:
        print(text)
    else:
        Path(out).write_text(text + "\n", encoding="utf-8")


def _spikes_parser() -> ArgumentParser:
    parser = _parser(
        "spikes",
        "The loss spikes of a log: a table, JSONL, a run of ours, TensorBoard, W&B offline, or text. "
        "Per event: the step at which it was raised (start), the first bad one (onset), the one at which the "
        "loss was back for ten rows (end; - is never), the highest loss (peak), the loss expected without it "
        "(baseline), and the peak's distance from that in robust standard deviations (score).",
    )
    parser.add_argument("log", metavar="LOG", type=str, help="a file, or a run's folder")
    parser.add_argument("--format", choices=["table", "json"], default="table", help="of what is printed")
    parser.add_argument("--loss", type=str, help="the loss column (default: loss, train_loss, ...)")
    parser.add_argument(
        "--step", type=str, help="the step column (default: step, iteration ... else the first)"
    )
    parser.add_argument(
        "--preset", choices=["nanogpt", "llmc", "megatron"], help="whose text log it is; else --pattern"
    )
    parser.add_argument("--pattern", type=str, help="a regular expression with groups step and loss")
    parser.add_argument(
        "--nan",
        choices=["value", "missing"],
        default="value",
        help="what a NaN in the log means",
    )
    parser.add_argument("--plot", type=str, help="an HTML file to write, with the curve and its events")
    parser.add_argument("--fail-on-spike", action="store_true", help="exit with 1 when there is an event")
    return parser


def spikes(argv: list[str]) -> int:
    """Finds the events of a loss log."""
    args = _spikes_parser().parse_args(argv)
    from stabilitykit.numerics.history import find_events
    from stabilitykit.readers.losses import read_losses
    from stabilitykit.report.losses import headline, write_losses
    from stabilitykit.report.thinning import Sketch

    losses = read_losses(
        Path(args.log),
        loss=args.loss,
        step=args.step,
        nan=args.nan,
        pattern=args.pattern,
        preset=args.preset,
    )
    sketch, ahead = Sketch(), count()  # a number is drawn with each row: the next is how many there were
    rows = (row for row, _ in zip(losses.rows, ahead, strict=False))
    events = [event.to_dict() for event in find_events(sketch.through(rows) if args.plot else rows)]
    for problem in losses.problems:
        print(f"stabilitykit: {problem}", file=sys.stderr)
    if args.format == "json":
        print(json.dumps(events))
    else:
        none = f"{headline([], next(ahead))[1]} of {losses.loss_column}"
        print(table(events) if events else none)
    if args.plot:
        write_losses(
            sketch.points(),
            events,
            names=(losses.step_column, losses.loss_column),
            rows=sketch.rows,
            log=Path(args.log),
            problems=losses.problems,
            out=Path(args.plot),
        )
    return 1 if events and args.fail_on_spike else 0


def compare(argv: list[str]) -> int:
    """Says how far apart the weights of two checkpoints are."""
    parser = _parser(
        "compare",
        "Per tensor how far B is from A: Lightning and torch files, safetensors, Hugging Face folders, "
        "torch distributed checkpoints. Exit code 1 when they differ.",
    )
    parser.add_argument("a", metavar="A", type=str, help="a checkpoint, weights only")
    parser.add_argument("b", metavar="B", type=str, help="another, of the same model")
    parser.add_argument("--format", choices=["table", "json"], default="table", help="of what is printed")
    parser.add_argument("--allow-missing", action="store_true", help="compare what both have")
    parser.add_argument("--plot", type=str, help="an HTML file to write, with a heat map by layer")
    args = parser.parse_args(argv)
    from stabilitykit.numerics.distance import asides, compared
    from stabilitykit.readers.checkpoints import read_checkpoint
    from stabilitykit.readers.pairing import loaders, paired
    from stabilitykit.records import spell

    pairs, notes = paired(read_checkpoint(args.a), read_checkpoint(args.b), allow_missing=args.allow_missing)
    results = compared(loaders(pairs))
    notes += asides(results)
    for note in notes:
        print(f"stabilitykit: {note}", file=sys.stderr)
    if args.format == "json":
        print(json.dumps(spell({"results": results})))
    else:
        columns = ("tensor", "numel", "w1", "max_abs", "rel_l2", "cosine")
        print(table([{column: row[column] for column in columns} for row in results]))
    if args.plot:
        from stabilitykit.report.comparison import write_comparison

        write_comparison(results, Path(args.a), Path(args.b), notes, Path(args.plot))
    return 1 if any(row["max_abs"] != 0 for row in results) else 0


def dashboard(argv: list[str]) -> int:
    """Builds the W&B workspace of a project."""
    parser = _parser("dashboard", "A W&B workspace with a panel for every number; needs a W&B login.")
    parser.add_argument("project", metavar="ENTITY/PROJECT", type=str)
    parser.add_argument("--dry-run", action="store_true", help="print its JSON; no network, no key")
    args = parser.parse_args(argv)
    entity, _, project = args.project.partition("/")
    if not entity or not project or "/" in project:
        raise ValueError(f"expected ENTITY/PROJECT, got {args.project!r}")
    from stabilitykit.report.workspace import save, workspace_json

    print(workspace_json(entity, project) if args.dry_run else save(entity, project))
    return 0


def study(argv: list[str]) -> int:
    """Runs an experiment: claims with bands fixed before, numbers, figures."""
    parser = _parser("study", "An experiment: its claims, and with --out a page of its figures.")
    own = {"deviation": ("kernel",), "divergence": ("arms", "steps"), "ring": ()}
    parser.add_argument("what", choices=list(own), help="which experiment; NAME below")
    parser.add_argument("--seeds", type=str, default="0,1,2", help="of inputs and initialisations, as 3,4,5")
    parser.add_argument(
        "--kernel", type=str, help="deviation: package.module:function of (q, k, v), beside ours"
    )
    parser.add_argument(
        "--arms", type=str, help="divergence: more of the ladder, as attention=package:function"
    )
    parser.add_argument("--steps", type=int, help="divergence: of each training run")
    parser.add_argument("--out", type=str, help="a folder for NAME.html and NAME.json")
    parser.add_argument("--format", choices=["table", "json"], default="table", help="of what is printed")
    args = parser.parse_args(argv)
    from stabilitykit.report.study import CLAIM_COLUMNS, claim_lines, write_study

    given = _given("study", args, own)
    if args.out is not None:  # before the minutes that a study takes
        Path(args.out).mkdir(parents=True, exist_ok=True)
    if "arms" in given:
        given["arms"] = re.split(r",(?![^()]*\))", given["arms"])  # not at those of emulated(a=1,b=2)
    run = getattr(import_module(f"stabilitykit.studies.{args.what}"), f"{args.what}_study")
    found = run(seeds=_seeds(args.seeds), **given)
    document = found.to_json()
    if args.out is not None:
        print(write_study(Path(args.out), document, found.figures), file=sys.stderr)
    if args.format == "json":
        from stabilitykit.records import spell

        print(json.dumps(spell(document)))
    else:
        lines = claim_lines(document["claims"])
        print(table([dict(zip(CLAIM_COLUMNS, line, strict=True)) for line in lines]) + f"\n\n{found.words}")
    return 1 if any(claim["holds"] is False for claim in document["claims"]) else 0


def _given(command: str, args: Any, own: dict[str, tuple[str, ...]]) -> dict[str, Any]:
    """Those of the options of its own that were given; another's is an error."""
    names = sorted(name for some in own.values() for name in some)
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    for name in given:
        if name not in own[args.what]:
            mine = ", ".join(f"--{option}" for option in own[args.what]) or "no option of its own"
            raise ValueError(f"expected of {command} {args.what} {mine}, got --{name}")
    return given


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as problem:
        raise ValueError(f"expected --seeds as 3,4,5, got {text!r}") from problem


def bench(argv: list[str]) -> int:
    """Measures what it costs, beside limits."""
    benches: dict[str, tuple[str, ...]] = {
        "overhead": ("overhead:overhead", "watching:precursor_cost"),
        "attention": ("attention:attention", "watching:watching_cost"),
        "wasserstein": ("wasserstein:wasserstein_bench",),
        "ring": ("ring:ring_bench",),
        "detector": ("detector:detector",),
    }
    own: dict[str, tuple[str, ...]] = {**dict.fromkeys(benches, ()), "detector": ("data",)}
    own["ring"] = ("ranks", "tokens")
    parser = _parser("bench", "What it costs: one row per figure, ratio = value / limit.")
    parser.add_argument("what", choices=list(benches), help="which figures")
    parser.add_argument("--rounds", type=int, help="interleaved repetitions (default: 5; ring: 9)")
    parser.add_argument("--data", type=Path, help="detector: a folder of labelled curves, as tests/data")
    parser.add_argument("--ranks", type=int, help="ring: gloo processes to start (default: 2)")
    parser.add_argument("--tokens", type=int, help="ring: of all ranks (default: 16384)")
    parser.add_argument("--format", choices=["table", "json"], default="table", help="of what is printed")
    args = parser.parse_args(argv)
    rounds = args.rounds if args.rounds is not None else 9 if args.what == "ring" else 5
    if rounds < 1:
        raise ValueError(f"expected --rounds >= 1, got {rounds}")
    given = _given("bench", args, own)
    results: list[dict[str, Any]] = []
    for place in benches[args.what]:
        module, _, function = place.partition(":")
        results += getattr(import_module(f"stabilitykit.bench.{module}"), function)(rounds=rounds, **given)
    print(json.dumps({"results": results}) if args.format == "json" else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
