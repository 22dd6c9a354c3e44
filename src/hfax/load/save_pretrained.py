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

from hfax.load.save import save_safetensors
from hfax.load.skeleton import Skeleton


def save_model(
    folder: Path,
    skeleton: Skeleton,
    params: Mapping[str, jax.Array],
    generation_config: GenerationConfig,
    max_shard_size: int | str,
) -> None:
    """Write a folder that plain transformers loads back bit for bit.

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
    tensors: dict[str, torch.Tensor] = {name: _as_host_tensor(array) for name, array in params.items()}
    save_safetensors(folder, revert_weight_conversion(module, tensors), max_shard_size=max_shard_size)
    config = copy.deepcopy(module.config)
    config.architectures = [type(module).__name__]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as scratch:
        config.save_pretrained(scratch)
        if module.can_generate():
            generation_config.save_pretrained(scratch)
        for file in Path(scratch).iterdir():
            file.replace(folder / file.name)


def _as_host_tensor(array: jax.Array) -> torch.Tensor:
    """The array as a torch tensor in host memory; without a copy where the array is on the CPU."""
    on_host = next(iter(array.devices())).platform == "cpu"
    return torch.from_dlpack(array if on_host else jax.device_put(array, jax.devices("cpu")[0]))
