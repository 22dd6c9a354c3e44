"""Training checkpoints with orbax: written asynchronously and atomically."""

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
    """The checkpoints of a run.

    Args:
        output_dir: the run's folder.
        limit: number of latest checkpoints to keep; None: all.

    Raises:
        BackendNotAvailableError: orbax is not installed.
    """

    def __init__(self, output_dir: Path, limit: int | None) -> None:
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise BackendNotAvailableError(
                "Checkpoints require orbax.", str(error), "Install it: pip install 'hfax[train]'."
            ) from error
        self._ocp = ocp
        self.folder = (output_dir / _FOLDER).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=limit, create=True, enable_async_checkpointing=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()}
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """Step of the latest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, state: TrainState, run: dict[str, Any]) -> None:
        """Start writing a checkpoint. Training can continue, because the state was copied from the devices.

        Args:
            state: training state to save; `state.step` names the checkpoint.
            run: additional run state, JSON-serialisable.

        Raises:
            HfaxError: this or the previous checkpoint could not be written; older ones are kept.
        """
        ocp, step = self._ocp, int(state.step)
        if step == self.latest():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(_as_dict(state)), run=ocp.args.JsonSave(run))
        with _writing(self.folder):
            self._manager.save(step, args=args)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Restore a checkpoint, sharded like `like`, and its run state.

        Raises:
            CheckpointCorruptError: it is from a different run, or damaged.
        """
        ocp = self._ocp
        wanted = _as_dict(like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), run=ocp.args.JsonRestore())
        try:
            _check_shapes(self._manager.item_metadata(step)["state"], wanted)
            found = self._manager.restore(step, args=args)
        except Exception as error:  # orbax has no specific exception class
            raise CheckpointCorruptError(
                f"The checkpoint of step {step} in {self.folder} could not be restored.",
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}",
                "Resume with the same model, adapter and optimizer; or start in another output_dir.",
            ) from error
        return TrainState(**found["state"]), found["run"]

    def wait(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            HfaxError: see `save`.
        """
        with _writing(self.folder):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Stop the background threads; call at the end, even if the run failed."""
        with contextlib.suppress(Exception):
            self._manager.close()


def _check_shapes(stored: Any, wanted: dict[str, Any]) -> None:
    """Raise ValueError if names or shapes differ, before orbax starts reads that it would leave behind."""
    found = {
        jax.tree_util.keystr(path): tuple(a.shape) for path, a in jax.tree_util.tree_leaves_with_path(dict(stored))
    }
    for path, array in jax.tree_util.tree_leaves_with_path(wanted["params"]):
        name = "['params']" + jax.tree_util.keystr(path)
        if found.get(name) != array.shape:
            raise ValueError(f"{name} is {found.get(name, 'missing')} in the checkpoint, but {array.shape} now")
    if extra := [n for n in found if n.startswith("['params']") and n[11:-1].strip("'") not in wanted["params"]]:
        raise ValueError(f"the checkpoint has {extra[0]} and {len(extra) - 1} other weights that are not trained now")


def _as_dict(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state, "key": state.key}


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Convert orbax's write errors to HfaxError."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        whole = [
            int(path.name) for path in folder.glob("*") if path.name.isdigit()
        ]  # other folders are still being written
        kept = f"The checkpoint of step {max(whole)} is still there." if whole else "There is no earlier checkpoint."
        raise HfaxError(
            f"The checkpoint could not be written to {folder}.",
            f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}",
            f"{kept} Free some disk space, or use another output_dir, and resume.",
        ) from error
