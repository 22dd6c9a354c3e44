"""A model's weights as an orbax checkpoint: each process writes, and reads, the parts that its own devices hold.

Turns arrays by name, as they lie over devices, into a folder, and back onto other devices. It does not know what they are for.
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
"""Into how many parts the array of that name is going to be split where it is read."""

_SMALL_BYTES = 1 << 20
"""Arrays of less are one piece."""
_CHUNK_BYTES = 64 << 20
"""At most so much of an array is read for a part of it."""


def save_orbax(folder: Path, arrays: Mapping[str, jax.Array], parts: Parts | None = None) -> None:
    """Write the weights of one model, replacing those of an earlier save in the folder.

    Args:
        folder: made if it is not there.
        arrays: by name; every process of the run passes its view of the same ones.
        parts: how the arrays will be split by those that read them, where that is not how they are split now.

    Raises:
        BackendNotAvailableError: orbax is not installed.
        HfaxError: the folder cannot be written, or the disk is full; what was there before stays.
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
    except (OSError, ValueError) as error:  # tensorstore gives a ValueError for a full disk
        if jax.process_index() == 0:
            shutil.rmtree(writing, ignore_errors=True)
        free = shutil.disk_usage(folder).free if folder.is_dir() else 0
        needed = sum(array.nbytes for array in arrays.values())
        raise HfaxError(
            f"{needed / 1e9:.3f} GB of weights could not be saved to {folder}.",
            f"{type(error).__name__}: {str(error).splitlines()[0]} ({free / 1e9:.3f} GB are free)",
            "Check the path, its permissions and the free space. What was saved there before is still there.",
        ) from error


def remove_orbax(folder: Path) -> None:
    """Remove an earlier save, which another format has replaced."""
    shutil.rmtree(folder / ORBAX_FOLDER, ignore_errors=True)


class OrbaxStore:
    """The arrays of a folder that `save_orbax` wrote.

    Args:
        path: the folder of the arrays alone.

    Raises:
        BackendNotAvailableError: orbax is not installed.
        CheckpointCorruptError: it is not what its name says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        ocp = _orbax()
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
                found: Any = checkpointer.metadata(self._path).item_metadata
            self.arrays = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in dict(found).items()}
        except Exception as error:  # orbax has no class of its own for this
            raise _corrupt(path, error) from error
        """What is stored, by name."""

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Arrays as they are wanted: of these dtypes, split as these shardings say; each process reads its devices' parts.

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
            "Weights in orbax's format need orbax.", str(error), "Install it: pip install 'hfax[export]'."
        ) from error
    return orbax.checkpoint


def _corrupt(path: Path, error: Exception) -> CheckpointCorruptError:
    lines = str(error).splitlines() or [""]
    return CheckpointCorruptError(
        f"{path} could not be read.",
        f"{type(error).__name__}: {lines[0]}",
        "It was not written or copied completely; save it again.",
    )
