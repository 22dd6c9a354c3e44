"""Reads arrays by name from safetensors files onto devices, as `OrbaxStore` does from its own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hfax.load.safetensors_file import SafetensorsFile
from hfax.object_storage import RemoteFile
from hfax.sharding.layout import from_slices


class SafetensorsArrays:
    """The arrays of files that are not converted.

    Args:
        paths: of the files.

    Raises:
        CheckpointCorruptError: a file is damaged.
    """

    def __init__(self, paths: Sequence[Path | RemoteFile]) -> None:
        files = [SafetensorsFile(path) for path in paths]
        self._files = {name: file for file in files for name in file.tensors}
        self.arrays = {
            name: jax.ShapeDtypeStruct(file.tensors[name].shape, file.tensors[name].numpy_dtype)
            for name, file in self._files.items()
        }
        """Shapes and dtypes of the stored arrays, by name."""

    def read(self, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The arrays with the given dtypes and shardings; each process reads only its devices' slices.

        Raises:
            CheckpointCorruptError: the data cannot be read.
        """
        return {name: self._placed(name, array) for name, array in wanted.items()}

    def _placed(self, name: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        file, where = self._files[name], wanted.sharding
        assert where is not None

        def part(index: tuple[slice, ...]) -> np.ndarray:
            return file.read_slice(name, index).astype(wanted.dtype, copy=False)

        if len(where.device_set) == 1 and where.is_fully_addressable:
            whole: Any = file.read(name).astype(wanted.dtype, copy=False)
            return jax.device_put(whole, where)
        return from_slices(wanted.shape, where, part)
