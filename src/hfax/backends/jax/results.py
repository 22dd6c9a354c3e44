"""Results of the JAX backend as torch tensors or jax arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from hfax.sharding.layout import to_host


def as_torch_tree(arrays: list[jax.Array]) -> list[Any]:
    """jax arrays as torch tensors on the CPU: zero-copy from a CPU device, int32 as torch's usual int64."""
    import torch

    def convert(array: jax.Array) -> Any:
        here = jax.local_devices(backend="cpu")[0]
        if len(array.sharding.device_set) > 1:
            array = jax.device_put(to_host(array), here)
        host = jax.device_put(array, here) if next(iter(array.devices())).platform != "cpu" else array
        tensor = torch.from_dlpack(host)
        return tensor.to(torch.int64) if tensor.dtype == torch.int32 else tensor

    return [convert(a) for a in arrays]


def on_host(array: jax.Array) -> np.ndarray | None:
    """The array as it is in this process's memory, without a copy; None if it is elsewhere."""
    if len(array.sharding.device_set) > 1 or next(iter(array.devices())).platform != "cpu":
        return None
    return np.asarray(array)


def give(array: np.ndarray, to_torch: bool) -> Any:
    """A host array as a torch tensor, int32 as torch's usual int64, or as a jax array."""
    if to_torch:
        import torch

        return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)
    return jax.device_put(array)
