"""Training checkpoints with orbax: written asynchronously and atomically."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from hfax.errors import BackendNotAvailableError, CheckpointCorruptError, HfaxError
from hfax.launch.together import agree
from hfax.train.manifest import find_damage, sync_folder, write_manifest
from hfax.train.orbax_noise import OrbaxNoise
from hfax.train.step import TrainState

logger = logging.getLogger(__name__)

_FOLDER = "checkpoints"
_DAMAGED = "damaged_checkpoints"


class Checkpoints:
    """The checkpoints of a run. Each has a manifest of its files, see `hfax.train.manifest`.

    Args:
        output_dir: the run's folder.
        limit: number of latest checkpoints to keep; None: all. `best` is kept beside them.

    Attributes:
        best: step of the checkpoint to keep whatever the limit; None: no such step.

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
        self.best: int | None = None
        self._limit = limit
        self._damaged: dict[int, str] = {}
        self._noise = OrbaxNoise()
        self._noise.start()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self,
            create=True,
            enable_async_checkpointing=True,
            temporary_path_class=_with_manifest(ocp.path.atomicity.AtomicRenameTemporaryPath),
        )
        handlers = {"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()}
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """Step of the latest checkpoint."""
        return self._manager.latest_step()

    def latest_whole(self) -> int | None:
        """Step of the latest checkpoint whose files are as they were written; None: there is no checkpoint at all.

        Later ones that are damaged are logged, and moved to "damaged_checkpoints" by `restore`.

        Raises:
            CheckpointCorruptError: every checkpoint is damaged.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            if (damage := self.damage(step)) is None:
                for late, why in self._damaged.items():
                    logger.warning(
                        "the checkpoint of step %d is damaged (%s); resuming from that of step %d", late, why, step
                    )
                return step
            self._damaged[step] = damage
        if not steps:
            return None
        raise CheckpointCorruptError(
            f"No checkpoint in {self.folder} is whole.",
            "; ".join(f"step {step}: {why}" for step, why in self._damaged.items()) + ".",
            "Start again in another output_dir, or restore the folder from a backup.",
        )

    def damage(self, step: int) -> str | None:
        """What is wrong with a checkpoint's files; None: nothing. Process 0 reads them, and the others learn what it found."""
        return agree(find_damage(self.folder / str(step)) if jax.process_index() == 0 else None)

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
        with self._writing():
            self._manager.save(step, args=args)

    def run_of(self, step: int) -> dict[str, Any]:
        """The run state of a checkpoint, see `save`.

        Raises:
            CheckpointCorruptError: it cannot be read.
        """
        ocp = self._ocp
        with self._reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]

    def check_shapes(self, step: int, like: TrainState) -> None:
        """Compare the weights' names and shapes with those of a state.

        Raises:
            CheckpointCorruptError: they differ.
        """
        with self._reading(step):
            _check_shapes(self._manager.item_metadata(step)["state"], _as_dict(like))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Restore a checkpoint, sharded like `like`. Damaged later ones are moved out of the way of those to come.

        Raises:
            CheckpointCorruptError: it is from a different run.
        """
        ocp = self._ocp
        args = ocp.args.Composite(state=ocp.args.StandardRestore(_as_dict(like)))
        with self._reading(step):
            found = self._manager.restore(step, args=args)
        self._set_aside()
        return TrainState(**found["state"])

    def wait(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            HfaxError: see `save`.
        """
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Stop the background threads; call at the end, even if the run failed."""
        with contextlib.suppress(Exception):
            self._manager.close()
        self._noise.stop()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax's preservation policy: whether to keep each checkpoint, oldest first."""
        first = 0 if self._limit is None else len(checkpoints) - self._limit
        return [number >= first or info.step == self.best for number, info in enumerate(checkpoints)]

    def _set_aside(self) -> None:
        """Move damaged checkpoints to "damaged_checkpoints", and delete what a killed run left half written."""
        if jax.process_index() == 0:
            _remove_unfinished(self.folder)
            aside = self.folder.parent / _DAMAGED
            for step in self._damaged:
                aside.mkdir(exist_ok=True)
                free = next(n for n in itertools.count() if not (aside / f"{step}-{n}").exists())
                (self.folder / str(step)).rename(aside / f"{step}-{free}")
        agree(None)  # before the others list the folder
        if self._damaged:
            self._manager.reload()
        self._damaged.clear()

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Convert orbax's read errors to CheckpointCorruptError."""
        try:
            yield
        except Exception as error:  # orbax has no specific exception class
            raise CheckpointCorruptError(
                f"The checkpoint of step {step} in {self.folder} could not be restored.",
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}",
                "Resume with the same model, adapter and optimizer; or start in another output_dir.",
            ) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert orbax's write errors to HfaxError, and delete what is half written."""
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        except (OSError, ValueError, RuntimeError) as error:
            self._noise.note_failure()
            if jax.process_index() == 0:
                _remove_unfinished(self.folder)
            whole = [int(path.name) for path in self.folder.glob("*") if path.name.isdigit()]
            kept = (
                f"The checkpoint of step {max(whole)} is still there." if whole else "There is no earlier checkpoint."
            )
            raise HfaxError(
                f"The checkpoint could not be written to {self.folder}.",
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}",
                f"{kept} Free some disk space, or use another output_dir, and resume.",
            ) from error


def _with_manifest(temporary_path: Any) -> Any:
    """Orbax's class of folders that are renamed when they are complete, with a manifest as the last file before that."""

    class WithManifest(temporary_path):
        async def finalize(self) -> None:
            whole = self.get_final()
            if whole.parent.name == _FOLDER:  # not one of a checkpoint's parts
                await asyncio.to_thread(write_manifest, Path(self.get()))
            await super().finalize()
            await asyncio.to_thread(sync_folder, Path(whole.parent))

    return WithManifest


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)


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
