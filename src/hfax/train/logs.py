"""Metrics logging: JSON Lines, TensorBoard, trackers, and a terminal progress bar. Does not interpret the metrics."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import jax

from hfax import progress
from hfax.errors import BackendNotAvailableError
from hfax.train.resumption import described
from hfax.train.trackers import TRACKERS, Tracker

METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """Writes metrics.

    Args:
        folder: the run's folder.
        args: `TrainingArguments`: where metrics go, and whether there is a progress bar (if stderr is a terminal).
        after: step to resume after; later lines are dropped, since those steps are repeated.
        total: total steps of the run, for the progress bar.

    Raises:
        BackendNotAvailableError: TensorBoard or a tracker was requested but is not installed.
    """

    def __init__(self, folder: Path, args: Any, *, after: int, total: int | None) -> None:
        self._file = self._board = self._bar = None
        self._trackers: list[Tracker] = []
        wanted = set(args.report_to)
        config = {name: value for name, value in described(args).items() if not name.endswith("_token")}
        for name in sorted(wanted & set(TRACKERS)) if jax.process_index() == 0 else ():
            self._trackers.append(Tracker(name, project=args.project, run_name=args.run_name, config=config))
        folder.mkdir(parents=True, exist_ok=True)
        if "jsonl" in wanted:
            path = folder / METRICS_NAME
            keep_until(path, after)
            self._file = path.open("a", encoding="utf-8")
        if "tensorboard" in wanted:
            try:
                from torch.utils.tensorboard.writer import SummaryWriter
            except ImportError as error:
                raise BackendNotAvailableError(
                    "report_to includes TensorBoard, which is not installed.",
                    str(error),
                    "Install it: pip install 'hfax[train]', or remove it from report_to.",
                ) from error
            self._board = SummaryWriter(str(folder / "runs"), purge_step=after + 1)
        if args.progress and sys.stderr.isatty():
            self._bar = _Bar(total, after)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step's metrics, by name."""
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
        for tracker in self._trackers:
            tracker.write(step, metrics)
        if self._bar is not None:
            self._bar.describe(metrics)

    def advance(self, step: int) -> None:
        """Advance the progress bar to a step."""
        if self._bar is not None:
            self._bar.advance(step)

    def close(self) -> None:
        """Close the files and remove the progress bar."""
        for part in (self._file, self._board, *self._trackers, self._bar):
            if part is not None:
                part.close()


class _Bar:
    def __init__(self, total: int | None, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("compiling the first step", total=total, completed=done)
        self._hidden = contextlib.ExitStack()
        self._hidden.enter_context(progress.hidden())
        self._progress.start()

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def describe(self, metrics: dict[str, float]) -> None:
        shown = {
            "loss": ("loss", "{:.4f}"),
            "eval_loss": ("eval loss", "{:.4f}"),
            "step_s": ("", "{:.2f} s a step"),
            "tokens_per_s": ("", "{:,.0f} tokens/s"),
            "peak_share": ("", "{:.0%} of peak"),
        }
        parts = [f"{label} {form.format(metrics[n])}".strip() for n, (label, form) in shown.items() if n in metrics]
        if parts:
            self._progress.update(self._task, description=", ".join(parts))

    def close(self) -> None:
        self._progress.stop()
        self._hidden.close()


def keep_until(path: Path, step: int) -> None:
    """Drop lines of steps after `step`, and an incomplete last line."""
    kept = []
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            with contextlib.suppress(ValueError, KeyError):
                if line.endswith("\n") and json.loads(line)["step"] <= step:
                    kept.append(line)
        path.write_text("".join(kept), encoding="utf-8")
