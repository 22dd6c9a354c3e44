"""Converts host arrays between torch and numpy, in the dtypes that programs compute in. Uses no device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hfax.errors import InvalidInputError
from hfax.load.safetensors_header import ALIGNMENT

if TYPE_CHECKING:
    import torch

_NUMPY_VIEWS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Dtypes that numpy lacks and ml_dtypes (a JAX dependency) provides, and those of the same size that torch gives to numpy."""
_NARROWED = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32, np.dtype(np.float64): np.float32}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor as a numpy array that shares its memory (bfloat16 and float8 through ml_dtypes).

    64-bit types are converted to 32-bit, as JAX does without `jax_enable_x64`; this copies. Out-of-range integers are
    clamped: modelling code uses the largest ones as infinity.
    """
    tensor = tensor.detach().contiguous()
    if (name := str(tensor.dtype).removeprefix("torch.")) in _NUMPY_VIEWS:
        import ml_dtypes
        import torch

        return tensor.view(getattr(torch, _NUMPY_VIEWS[name])).numpy().view(getattr(ml_dtypes, name))
    array = tensor.numpy()
    return narrow(array if _fits(array) else np.clip(array, *_limits(array)))


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """A numpy array as a host tensor that shares its memory, see `to_numpy`."""
    import torch

    if (name := array.dtype.name) in _NUMPY_VIEWS:
        return torch.as_tensor(array.view(_NUMPY_VIEWS[name])).view(getattr(torch, name))
    return torch.as_tensor(array)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array whose memory XLA's CPU platform takes as it is."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype).reshape(shape)


def narrow(array: np.ndarray) -> np.ndarray:
    """The array in JAX's 32-bit type; unchanged if it is not 64-bit.

    Raises:
        InvalidInputError: an integer does not fit; JAX would silently truncate it.
    """
    if not _fits(array):
        low, high = array.min(), array.max()
        raise InvalidInputError(
            f"An input holds {high if high > _limits(array)[1] else low}, which does not fit in 32 bits.",
            "Programs compute in 32 bits.",
            "Pass smaller integers; token ids and positions always fit.",
        )
    return array.astype(_NARROWED[array.dtype]) if array.dtype in _NARROWED else array


def _fits(array: np.ndarray) -> bool:
    if array.dtype not in _NARROWED or array.dtype.kind == "f" or not array.size:
        return True
    low, high = _limits(array)
    return bool(array.min() >= low and array.max() <= high)


def _limits(array: np.ndarray) -> tuple[int, int]:
    limits = np.iinfo(_NARROWED[array.dtype])
    return int(limits.min), int(limits.max)
