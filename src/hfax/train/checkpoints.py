"""Checkpoints of a run, by orbax: written while training goes on, whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from hfax.errors import BackendNotAvailableError, CheckpointCorruptError, HfaxError
from hfax.train.step import TrainState

_FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints under a folder.

    Args:
        output_dir: of the run.
        limit: how many of the latest are kept; None: all.

    Raises:
        BackendNotAvailableError: orbax is not installed.
    """

    def __init__(self, output_dir: Path, limit: int | None) -> None:
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise BackendNotAvailableError(
                "Checkpoints need orbax.", str(error), "Install it: pip install 'hfax[train]'."
            ) from error
        self._ocp = ocp
        self.folder = (output_dir / _FOLDER).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=limit, create=True, enable_async_checkpointing=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()}
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """The step of the last whole one."""
        return self._manager.latest_step()

    def save(self, state: TrainState, run: dict[str, Any]) -> None:
        """Begin to write one; training may go on, since what is written was copied from the devices.

        Args:
            state: of the step that it is called by.
            run: what else is to be known, as JSON.

        Raises:
            HfaxError: this one or the one before could not be written; older ones are still there.
        """
        ocp, step = self._ocp, int(state.step)
        if step == self.latest():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(_as_dict(state)), run=ocp.args.JsonSave(run))
        with _writing(self.folder):
            self._manager.save(step, args=args)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """One, split over devices as `like` is, and what was saved beside it.

        Raises:
            CheckpointCorruptError: it is of another run, or damaged.
        """
        ocp = self._ocp
        wanted = _as_dict(like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), run=ocp.args.JsonRestore())
        try:
            _check_shapes(self._manager.item_metadata(step)["state"], wanted)
            found = self._manager.restore(step, args=args)
        except Exception as error:  # orbax has no class of its own for this
            raise CheckpointCorruptError(
                f"The checkpoint of step {step} in {self.folder} could not be restored.",
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}",
                "Resume with the model, adapter and optimizer that it was saved with; or start in another output_dir.",
            ) from error
        return TrainState(**found["state"]), found["run"]

    def wait(self) -> None:
        """Until all is written.

        Raises:
            HfaxError: see `save`.
        """
        with _writing(self.folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Let go of its threads; for the end, whatever became of the run."""
        with contextlib.suppress(Exception):
            self._manager.close()


def _check_shapes(stored: Any, wanted: dict[str, Any]) -> None:
    """Raise ValueError for arrays of other names or shapes, before orbax begins to read and leaves its reads behind."""
    found = {
        jax.tree_util.keystr(path): tuple(a.shape) for path, a in jax.tree_util.tree_leaves_with_path(dict(stored))
    }
    for path, array in jax.tree_util.tree_leaves_with_path(wanted["params"]):
        name = "['params']" + jax.tree_util.keystr(path)
        if found.get(name) != array.shape:
            raise ValueError(f"{name} is {found.get(name, 'missing')} in it, and {array.shape} now")
    if extra := [n for n in found if n.startswith("['params']") and n[11:-1].strip("'") not in wanted["params"]]:
        raise ValueError(f"it has {extra[0]} and {len(extra) - 1} others, which are not trained now")


def _as_dict(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state, "key": state.key}


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns what orbax raises when it cannot write into hfax's word for it."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        whole = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]  # others are being written
        kept = f"That of step {max(whole)} is still there." if whole else "There is no earlier one."
        raise HfaxError(
            f"The checkpoint could not be written to {folder}.",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}",
            f"{kept} Make room on the disk, or use another output_dir, and resume.",
        ) from error
