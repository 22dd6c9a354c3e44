"""Results of the JAX backend as torch tensors or jax arrays."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import jax
import numpy as np

from hfax.sharding.layout import to_host
from hfax.tracing.geometry import GRIDS, HostArray

_OF_IMAGES = {"pixel_values": "image_outputs", "pixel_values_videos": "video_outputs"}
"""Names of packed patches, mapped to those of the outputs of the model's part that reads them."""


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


def without_black_images(outputs: Any, given: Mapping[str, Any], padded: Mapping[str, Any]) -> Any:
    """A model's output with what it says of its images in their own sizes, and not in their size class.

    Args:
        outputs: changed in place.
        given: inputs by name, with the images of the call.
        padded: inputs by name, with a black image at the end (`hfax.generation.image_classes.PackedImages`).
    """
    for patches, name in _OF_IMAGES.items():
        if padded.get(patches) is given.get(patches) or not isinstance(outputs, MutableMapping) or name not in outputs:
            continue
        grids = given[GRIDS[patches]]
        sizes = (grids.array if isinstance(grids, HostArray) else grids).prod(1).tolist()
        outputs[name] = _of_images(outputs[name], sizes, len(padded[patches]))
    return outputs


def _of_images(value: Any, sizes: list[int], whole: int) -> Any:
    """An output's arrays, of `whole` patches or of merged ones, with those of the images; those in a list for each image."""
    if isinstance(value, MutableMapping):
        for name, item in value.items():
            value[name] = _of_images(item, sizes, whole)
        return value
    if isinstance(value, (list, tuple)):
        if len(value) == 1 and (merged := _patches_each(value[0], whole)) > 1:
            ends = np.cumsum([size // merged for size in sizes]).tolist()
            return type(value)(cut(value[0], operator.itemgetter(slice(*e))) for e in itertools.pairwise([0, *ends]))
        return type(value)(_of_images(item, sizes, whole) for item in value)
    merged = _patches_each(value, whole)
    return cut(value, operator.itemgetter(slice(sum(sizes) // merged))) if merged else value


def _patches_each(array: Any, whole: int) -> int:
    """How many patches, a square number, each row of an array stands for; 0 if its rows stand for something else."""
    rows = len(array) if getattr(array, "ndim", 0) else 0
    each = whole // rows if rows else 0
    return each if each * rows == whole and math.isqrt(each) ** 2 == each else 0


def cut(array: Any, part: Callable[[Any], Any]) -> Any:
    """`part(array)`, by numpy for an array in this process's memory: JAX would compile a program for each size."""
    if isinstance(array, jax.Array) and (host := on_host(array)) is not None:
        return jax.device_put(np.ascontiguousarray(part(host)), array.sharding)
    return part(array)


def give(array: np.ndarray, to_torch: bool) -> Any:
    """A host array as a torch tensor, int32 as torch's usual int64, or as a jax array."""
    if to_torch:
        import torch

        return torch.from_numpy(array.astype(np.int64) if array.dtype == np.int32 else array)
    return jax.device_put(array)
