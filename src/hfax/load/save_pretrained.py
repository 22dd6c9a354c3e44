"""A model's folder, as plain transformers writes and reads it: config, generation config, and weights in the checkpoint's layout.

Turns a skeleton and its weights back into files; the inverse of `load.weights`. How the weight files are written whole or not at
all is in `load.save`.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax
import torch
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from hfax.kernels.quantized import QuantizedArray
from hfax.load.quantize import SCALE_SUFFIX
from hfax.load.save import save_safetensors
from hfax.load.skeleton import Skeleton
from hfax.sharding.layout import to_host


def save_model(
    folder: Path,
    skeleton: Skeleton,
    params: Mapping[str, jax.Array | QuantizedArray],
    generation_config: GenerationConfig,
    max_shard_size: int | str,
) -> None:
    """Write a folder that plain transformers loads back bit for bit; or, if weights are quantized, hfax alone.

    Args:
        folder: made if it is not there.
        skeleton: the module that the weights belong to.
        params: weights by name, tied ones once.
        generation_config: written as generation_config.json, if the model can generate.
        max_shard_size: of one weight file, bytes or as "5GB".

    Raises:
        HfaxError: the folder cannot be written, or the disk is full; what was there before stays.
    """
    module = skeleton.module
    bits = {array.bits for array in params.values() if isinstance(array, QuantizedArray)}
    config = copy.deepcopy(module.config)
    if bits:
        tensors = _packed_tensors(params)
        config.quantization_config = {"quant_method": "hfax", "bits": min(bits)}
    else:
        tensors = {name: _as_host_tensor(array) for name, array in params.items()}  # pyright: ignore[reportArgumentType]
        tensors = revert_weight_conversion(module, tensors)
    if jax.process_index() != 0:
        return  # every process helps to bring the weights together; one writes
    save_safetensors(folder, tensors, max_shard_size=max_shard_size)
    config.architectures = [type(module).__name__]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as scratch:
        config.save_pretrained(scratch)
        if module.can_generate():
            generation_config.save_pretrained(scratch)
        for file in Path(scratch).iterdir():
            file.replace(folder / file.name)


def _packed_tensors(params: Mapping[str, jax.Array | QuantizedArray]) -> dict[str, torch.Tensor]:
    """Under the module's own names: integers under a weight's name, its scales under the name with a suffix."""
    tensors = {}
    for name, array in params.items():
        if isinstance(array, QuantizedArray):
            tensors[name] = _as_host_tensor(array.values)
            tensors[name + SCALE_SUFFIX] = _as_host_tensor(array.scale)
        else:
            tensors[name] = _as_host_tensor(array)
    return tensors


def _as_host_tensor(array: jax.Array) -> torch.Tensor:
    """The array as a torch tensor in host memory; without a copy where the array is on one CPU device."""
    here = jax.local_devices(backend="cpu")[0]
    if len(array.sharding.device_set) > 1:
        return torch.from_dlpack(jax.device_put(to_host(array), here))
    on_host = next(iter(array.devices())).platform == "cpu"
    return torch.from_dlpack(array if on_host else jax.device_put(array, here))
