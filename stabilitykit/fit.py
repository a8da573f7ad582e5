"""`stabilitykit fit`: LightningCLI without subcommands, one-line errors, and a report at the end."""

import logging
import os
import sys
import time
import traceback
import warnings
from typing import Any

from stabilitykit.records import one_line

_SPOKEN_S = 60.0  # by then the first rank, however busy the machine, has said what it found


def fit(argv: list[str]) -> int:
    """Trains from a recipe; ends with what was seen, what it cost and where the report lies."""
    if not argv or not argv[0].startswith("-"):
        raise ValueError(f"expected --config RECIPE, then options, got {' '.join(argv) or 'nothing'}")
    launcher = os.getppid()  # the first rank, where this process is a further one
    # Two of Lightning's own deprecations; nothing the user can mend.
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.cli import LightningCLI

    class FitCLI(LightningCLI):
        """LightningCLI without subcommands: `fit` is the only one here."""

        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_argument("--ckpt_path", type=str | None, default=None, help="resume from here")

        def parse_arguments(self, parser: Any, args: Any) -> None:
            self.config = parser.parse_args(args)  # Lightning's own warns of arguments that are not sys.argv

    logging.disable(logging.INFO)  # Lightning's greetings: an error of the recipe stands alone
    try:
        cli = FitCLI(
            args=argv,
            run=False,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},  # a resume into the same folder is no mistake
            parser_kwargs={"prog": "stabilitykit fit", "exit_on_error": False},
        )
    except (MisconfigurationException, RuntimeError) as problem:  # e.g. two callbacks of one class
        raise ValueError(one_line(problem)) from problem
    finally:
        logging.disable(logging.NOTSET)
    _drop_wandb_without_login(cli.trainer)
    started = cli.trainer.global_step
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.config.ckpt_path)
    except MisconfigurationException as problem:
        _defer(cli.trainer, launcher)
        raise ValueError(one_line(problem)) from problem
    except ValueError:
        if cli.trainer.global_step == started:
            _defer(cli.trainer, launcher)
            raise
        # Training was under way: the place it failed at is what the user needs.
        traceback.print_exc()
        return 1
    finally:
        _close(cli.trainer)
    return 0


def _defer(trainer: Any, launcher: int) -> None:
    """On a further rank, ends the process when the one that started it has: one recipe, one error line."""
    if trainer.local_rank == 0:
        return
    deadline = time.monotonic() + _SPOKEN_S
    while time.monotonic() < deadline:
        if os.getppid() != launcher:
            raise SystemExit(2)
        time.sleep(0.1)


def _drop_wandb_without_login(trainer: Any) -> None:
    for logger in list(trainer.loggers):
        if type(logger).__name__ == "WandbLogger":
            try:
                logger.experiment  # noqa: B018  starts the run
            except Exception as problem:  # whatever a view raises, the run it shows must not die of it
                trainer.loggers = [other for other in trainer.loggers if other is not logger]
                print(
                    f"stabilitykit: training goes on without W&B: {one_line(problem)} (without an account: "
                    "--trainer.logger.init_args.offline=true)",
                    file=sys.stderr,
                )


def _close(trainer: Any) -> None:
    from stabilitykit.callbacks.monitor import Monitor
    from stabilitykit.report.page import text_report, write_report

    monitors = [callback for callback in trainer.callbacks if isinstance(callback, Monitor)]
    if not trainer.is_global_zero:
        return
    if not monitors:
        print("stabilitykit: this run has no monitor, nothing was watched (see monitors() in README.md)")
        return
    folder = monitors[0].run.folder if hasattr(monitors[0], "run") else None
    if folder is None or not (folder / "records.jsonl").is_file():
        return
    try:
        path = write_report(folder)
        print(f"\n{text_report(folder)}\n\nreport: {path.resolve()}")
    except (OSError, ValueError) as problem:
        print(f"stabilitykit: no report: {one_line(problem)}", file=sys.stderr)
