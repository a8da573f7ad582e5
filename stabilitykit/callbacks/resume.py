"""How to take a run up before a trouble, without its bad batches: a command to paste."""

import shlex
from pathlib import Path
from typing import Any

BACK = 100  # steps before the trouble: PaLM (arXiv 2204.02311, Sec. 5.1) restarted about so far back
FIT = "stabilitykit fit"


class Resume:
    """Knows which checkpoint holds which step, and how this run was started.

    `steps` maps a checkpoint's path to the optimizer steps done when it was written.
    """

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self._written: dict[str, int] = {}  # path -> time of writing, in ns
        self._saved: int | None = None
        self._config: Path | None = None
        self._option: str | None = None

    def start(self, trainer: Any, step: int) -> None:
        """How the run was started, and from which checkpoint; called on every rank alike."""
        self._config, self._option = _config(trainer), _skip_option(trainer)
        if step and trainer.ckpt_path:
            self.steps[str(trainer.ckpt_path)] = step

    def saving(self, step: int) -> None:
        """A checkpoint is about to be written after `step` steps; under which name is not known yet."""
        self._saved = step

    def look(self, trainer: Any) -> None:
        """Takes note of the files that were written since `saving`."""
        if self._saved is None:
            return
        for callback in trainer.checkpoint_callbacks:
            latest = [getattr(callback, f"{which}_model_path", "") for which in ("best", "last")]
            kept = {*getattr(callback, "best_k_models", ()), *latest} - {""}
            for path in map(Path, kept):
                written = path.stat().st_mtime_ns if path.exists() else 0
                if self._written.get(str(path)) != written:
                    self._written[str(path)] = written
                    self.steps[str(path)] = self._saved
        self._saved = None

    def checkpoint(self, start: float) -> str | None:
        """The last checkpoint that is still there and lies at least 100 steps before `start`."""
        fit = [(step, path) for path, step in self.steps.items() if step <= start - BACK]
        return next((path for _, path in sorted(fit, reverse=True) if Path(path).exists()), None)

    def advice(self, start: float, skip_list: Path | None) -> str:
        """One line to paste, or to follow; `skip_list` is the file when it names samples."""
        checkpoint = self.checkpoint(start)
        known = (
            "" if checkpoint else f"(no checkpoint {BACK} or more steps before step {start:.0f} is known) "
        )
        if self._config is not None and (self._option or skip_list is None):
            words = [*FIT.split(), "--config", str(self._config)]
            words += ["--ckpt_path", checkpoint] if checkpoint else []
            words += [self._option, str(skip_list)] if self._option and skip_list else []
            return f"{known}{shlex.join(words)}"
        resumed = f", ckpt_path={checkpoint!r}" if checkpoint else ""
        call = f"{known}trainer.fit(model, data{resumed})"
        if skip_list is None:
            return f"{call} with data that leaves out the batches of that step"
        return f"{call} with data that leaves out {str(skip_list)!r} (stabilitykit.SkippingBatchSampler)"


def _config(trainer: Any) -> Path | None:
    """The recipe that `stabilitykit fit` has saved beside the run."""
    for callback in trainer.callbacks:
        if getattr(getattr(callback, "parser", None), "prog", None) == FIT and trainer.log_dir:
            return Path(trainer.log_dir) / callback.config_filename
    return None


def _skip_option(trainer: Any) -> str | None:
    """The option that gives the skip list to the data; a data module may hold another, as `data`."""
    option, data = "--data", getattr(trainer, "datamodule", None)
    while data is not None and not hasattr(data, "skip_list"):
        option, data = f"{option}.init_args.data", getattr(data, "data", None)
    return None if data is None else f"{option}.init_args.skip_list"
