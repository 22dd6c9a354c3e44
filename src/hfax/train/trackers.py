"""Experiment trackers that are Python packages: wandb and trackio, each through its own `init`, `log` and `finish`."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from hfax.errors import BackendNotAvailableError

TRACKERS = ("wandb", "trackio")
_EVAL = "eval_"


def installed_trackers() -> tuple[str, ...]:
    """Those that are installed."""
    return tuple(name for name in TRACKERS if importlib.util.find_spec(name) is not None)


class Tracker:
    """A run of a tracker.

    Args:
        name: "wandb" or "trackio".
        project: its project; for wandb, the variable WANDB_PROJECT comes first, as in transformers.
        run_name: its name; None: the tracker makes one up.
        config: options of the run, as JSON.

    Raises:
        BackendNotAvailableError: it is not installed.
    """

    def __init__(self, name: str, *, project: str, run_name: str | None, config: Mapping[str, Any]) -> None:
        try:
            self._package = importlib.import_module(name)
        except ImportError as error:
            raise BackendNotAvailableError(
                f"report_to includes {name}, which is not installed.",
                str(error),
                f"Install it: pip install {name}, or remove it from report_to.",
            ) from error
        project = os.environ.get("WANDB_PROJECT", project) if name == "wandb" else project
        self._package.init(project=project, name=run_name, config=dict(config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics by transformers' names: "train/loss", "eval/loss"."""
        renamed = {
            f"eval/{name.removeprefix(_EVAL)}" if name.startswith(_EVAL) else f"train/{name}": value
            for name, value in metrics.items()
        }
        self._package.log({**renamed, "train/global_step": step}, step=step)

    def close(self) -> None:
        """End the run."""
        self._package.finish()
