"""Places weights from host memory onto one or more devices, one at a time.

Turns a torch tensor in host memory into a `jax.Array`. On CPU the array reuses the tensor's memory if alignment permits, so
loading makes no second copy. It knows nothing about names, files or models.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Sharding

from hfax.errors import OutOfMemoryError
from hfax.load.host_arrays import to_numpy
from hfax.sharding.layout import from_slices

if TYPE_CHECKING:
    import torch


def place(tensor: torch.Tensor | np.ndarray, where: Sharding) -> jax.Array:
    """Place a tensor with a sharding. The caller must not modify the tensor's memory afterwards."""
    array = tensor if isinstance(tensor, np.ndarray) else to_numpy(tensor)
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    return from_slices(array.shape, where, lambda index: array[index])


def place_slices(
    shape: tuple[int, ...], where: Sharding, read: Callable[[tuple[slice, ...]], torch.Tensor]
) -> jax.Array:
    """Build an array from `read`, which is called once for each slice that this process's devices hold."""
    parts: dict[str, np.ndarray] = {}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        key = repr(index)  # slices are not hashable
        if key not in parts:
            parts[key] = to_numpy(read(index))
        return parts[key]

    return from_slices(shape, where, part)


def check_fits(needed_bytes: int, device: jax.Device, what: str, fix: str) -> None:
    """Raise if `needed_bytes` exceeds the device's free memory; does nothing if the free memory is unknown.

    Raises:
        OutOfMemoryError: states needed and free memory.
    """
    free = free_bytes(device)
    if free is not None and needed_bytes > free:
        raise OutOfMemoryError(
            f"{what} needs {needed_bytes / 1e9:.2f} GB, and {device} has {free / 1e9:.2f} GB free.",
            "The device's memory is too small, or this process or another one is using it.",
            f"{fix} About {free / needed_bytes:.0%} of it would fit.",
        )


def free_bytes(device: jax.Device) -> int | None:
    """Free memory of a device, in bytes; the host's available memory for CPU devices. None if unknown."""
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
