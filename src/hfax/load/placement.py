"""Weights from host memory onto a device or over several, one at a time.

Turns a torch tensor in host memory into a `jax.Array`. On the CPU platform the array adopts the tensor's memory where alignment
allows, so loading makes no second copy. It does not know names, files or models.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import jax
import ml_dtypes
import numpy as np
import torch
from jax.sharding import Sharding

from hfax.errors import InvalidInputError, OutOfMemoryError
from hfax.sharding.layout import from_slices

_NUMPY_VIEWS = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
}
_NARROWED = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32, np.dtype(np.float64): np.float32}


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A host tensor as a numpy array that shares its memory (bfloat16 and float8 through ml_dtypes).

    64-bit types become 32-bit ones, as everywhere in JAX without `jax_enable_x64`; that copies. Whole numbers that do not fit
    become the nearest that do: modelling code uses the largest ones as infinities.
    """
    tensor = tensor.detach().contiguous()
    if tensor.dtype in _NUMPY_VIEWS:
        bits, dtype = _NUMPY_VIEWS[tensor.dtype]
        return tensor.view(bits).numpy().view(dtype)
    array = tensor.numpy()
    return narrow(array if _fits(array) else np.clip(array, *_limits(array)))


def narrow(array: np.ndarray) -> np.ndarray:
    """The array in the 32-bit type that JAX would give it; itself if it is none of 64 bits.

    Raises:
        InvalidInputError: a whole number does not fit; JAX would take its lower bits in silence.
    """
    if not _fits(array):
        low, high = array.min(), array.max()
        raise InvalidInputError(
            f"An input holds {high if high > _limits(array)[1] else low}, which does not fit into 32 bits.",
            "Programs compute in 32 bits.",
            "Pass smaller numbers; token ids and positions always fit.",
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


def place(tensor: torch.Tensor, where: Sharding) -> jax.Array:
    """The tensor there. The caller must not change the tensor's memory afterwards."""
    array = to_numpy(tensor)
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    return from_slices(array.shape, where, lambda index: array[index])


def place_slices(
    shape: tuple[int, ...], where: Sharding, read: Callable[[tuple[slice, ...]], torch.Tensor]
) -> jax.Array:
    """An array of which `read` gives the slices that this process's devices hold, each once."""
    parts: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = repr(index)  # slices are not hashable
        if key not in parts:
            parts[key] = to_numpy(read(index))
        return parts[key]

    return from_slices(shape, where, part)


def check_fits(needed_bytes: int, device: jax.Device, what: str, fix: str) -> None:
    """Raise if `needed_bytes` more do not fit the device's free memory; silent where the free memory is not known.

    Raises:
        OutOfMemoryError: naming both figures.
    """
    free = free_bytes(device)
    if free is not None and needed_bytes > free:
        raise OutOfMemoryError(
            f"{what} needs {needed_bytes / 1e9:.2f} GB, and {device} has {free / 1e9:.2f} GB free.",
            "The device's memory is too small, or something else in this process or on this machine holds it.",
            f"{fix} About {free / needed_bytes:.0%} of it would fit.",
        )


def free_bytes(device: jax.Device) -> int | None:
    """Free memory of a device, bytes; for CPU devices the host's available memory. None where neither is known."""
    if device.platform == "cpu":
        return _host_available_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _host_available_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123 (a kernel file)
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
