"""Saves and loads a model's weights with orbax: each process writes and reads only its own devices' shards.

Writes sharded arrays by name to a folder, and restores them onto other devices. It knows nothing about models.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from hfax.errors import BackendNotAvailableError, CheckpointCorruptError, HfaxError
from hfax.load.save import earlier_save
from hfax.load.weight_files import ORBAX_FOLDER

Parts = Callable[[str], int]
"""Number of shards the named array will have when it is read."""

_SMALL_BYTES = 1 << 20
"""Smaller arrays are stored as one chunk."""
_CHUNK_BYTES = 64 << 20
"""Maximum chunk size, the most that is read to restore part of an array."""


def save_orbax(folder: Path, arrays: Mapping[str, jax.Array], parts: Parts | None = None) -> None:
    """Write one model's weights, replacing an earlier save in the folder.

    Args:
        folder: created if it does not exist.
        arrays: arrays by name; every process passes its view of the same arrays.
        parts: shard count of each array when it is read, if that differs from its current sharding.

    Raises:
        BackendNotAvailableError: orbax is not installed.
        HfaxError: the folder cannot be written, or the disk is full; its previous contents are kept.
    """
    ocp = _orbax()
    wanted = (folder / ORBAX_FOLDER).absolute()
    writing, earlier = (wanted.with_name(f".{ORBAX_FOLDER}.{name}") for name in ("writing", "earlier"))

    def chunks(name: str, array: jax.Array) -> Any:
        count = 1 if parts is None else parts(name)
        is_small = array.nbytes < _SMALL_BYTES
        return ocp.SaveArgs(chunk_byte_size=None if is_small else min(array.nbytes // count, _CHUNK_BYTES))

    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
        with ocp.Checkpointer(handler) as checkpointer:
            args = ocp.args.PyTreeSave(dict(arrays), save_args={n: chunks(n, a) for n, a in arrays.items()})
            checkpointer.save(writing, args=args, force=True)
        if jax.process_index() == 0:
            shutil.rmtree(earlier, ignore_errors=True)
            if wanted.exists():
                wanted.replace(earlier)
            writing.replace(wanted)
            shutil.rmtree(earlier, ignore_errors=True)
            for path in list(earlier_save(folder)):
                path.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # tensorstore raises ValueError when the disk is full
        if jax.process_index() == 0:
            shutil.rmtree(writing, ignore_errors=True)
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        needed = sum(array.nbytes for array in arrays.values())
        raise HfaxError(
            f"{needed / 1e9:.3f} GB of weights could not be saved to {folder}.",
            f"{type(error).__name__}: {str(error).splitlines()[0]} ({free / 1e9:.3f} GB are free)",
            "Check the path, its permissions and the free space. The earlier save is unchanged.",
        ) from error


def remove_orbax(folder: Path) -> None:
    """Remove an earlier orbax save that another format has replaced."""
    shutil.rmtree(folder / ORBAX_FOLDER, ignore_errors=True)


class OrbaxStore:
    """Reads arrays that `save_orbax` wrote.

    Args:
        path: the orbax subfolder, not the model folder.

    Raises:
        BackendNotAvailableError: orbax is not installed.
        CheckpointCorruptError: not a readable orbax checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        ocp = _orbax()
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
                found: Any = checkpointer.metadata(self._path).item_metadata
            self.arrays = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in dict(found).items()}
        except Exception as error:  # orbax has no specific exception class
            raise _corrupt(path, error) from error
        """Shapes and dtypes of the stored arrays, by name."""

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Restore arrays with the given dtypes and shardings; each process reads only its devices' shards.

        Raises:
            CheckpointCorruptError: the data cannot be read.
        """
        ocp = _orbax()
        how = {
            name: ocp.ArrayRestoreArgs(sharding=a.sharding, global_shape=a.shape, dtype=a.dtype)
            for name, a in wanted.items()
        }
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
                args = ocp.args.PyTreeRestore(item=dict(wanted), restore_args=how)
                return checkpointer.restore(self._path, args=args)
        except Exception as error:
            raise _corrupt(self._path, error) from error


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise BackendNotAvailableError(
            "The orbax format requires orbax.", str(error), "Install it: pip install 'hfax[export]'."
        ) from error
    return orbax.checkpoint


def _corrupt(path: Path, error: Exception) -> CheckpointCorruptError:
    lines = str(error).splitlines() or [""]
    return CheckpointCorruptError(
        f"{path} could not be read.",
        f"{type(error).__name__}: {lines[0]}",
        "Save it again; it was not written or copied completely.",
    )
