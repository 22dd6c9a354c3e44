"""Saves a model folder in transformers' format: config, generation config, and weights in the checkpoint's layout.

Writes a skeleton and its weights to files; the inverse of `load.weights`. `load.save` writes the weight files atomically.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from hfax.errors import InvalidInputError
from hfax.kernels.quantized import QuantizedArray
from hfax.load.convert import save_flax
from hfax.load.folder import write_configs
from hfax.load.orbax_checkpoint import Parts, remove_orbax, save_orbax
from hfax.load.save import save_safetensors
from hfax.load.save_compressed import compress
from hfax.load.saved_parts import names_of
from hfax.load.skeleton import Skeleton
from hfax.sharding.layout import to_host

OWN_NAMES = "own names"
"""The format of a bundle's weights for one device."""


def save_model(
    folder: Path,
    skeleton: Skeleton,
    params: Mapping[str, jax.Array | QuantizedArray],
    generation_config: GenerationConfig,
    format: str = "safetensors",
    max_shard_size: int | str = "50GB",
    parts: Parts | None = None,
    dequantize: bool = False,
) -> None:
    """Write a folder that plain transformers loads bit for bit; orbax and hfax's own quantized format load only in hfax.

    Args:
        folder: created if it does not exist.
        skeleton: the module that the weights belong to.
        params: weights by name, tied weights once.
        generation_config: written as generation_config.json, if the model can generate.
        format: "safetensors", "compressed-tensors", "flax" or "orbax"; or `OWN_NAMES`, safetensors with the module's own names,
            which need no conversion.
        max_shard_size: maximum size of one safetensors file, in bytes or as a string such as "5GB".
        parts: see `save_orbax`.
        dequantize: write quantized weights as numbers of the model's dtype.

    Raises:
        InvalidInputError: an unknown format, or one that cannot express the weights.
        HfaxError: the folder cannot be written, or the disk is full; its previous contents are kept.
    """
    module = skeleton.module
    if dequantize:
        params = {n: a.dequantize() if isinstance(a, QuantizedArray) else a for n, a in params.items()}
    bits = {array.bits for array in params.values() if isinstance(array, QuantizedArray)}
    config = copy.deepcopy(module.config)
    if bits:
        config.quantization_config = {"quant_method": "hfax", "bits": min(bits)}
    if format == "orbax":
        save_orbax(folder, by_stored_name(params), parts)
    elif format == "flax":
        if bits:
            raise InvalidInputError(
                "Quantized weights cannot be saved as Flax.", "Flax has no integer weights.", "Pass dequantize=True."
            )
        if jax.process_index() == 0:
            tensors = {name: as_host_tensor(array) for name, array in by_stored_name(params).items()}
            save_flax(folder, skeleton, revert_weight_conversion(module, tensors))
    elif format in ("safetensors", "compressed-tensors", OWN_NAMES):
        if format == "compressed-tensors":
            tensors, config.quantization_config = compress(skeleton, params, as_host_tensor)
        else:
            tensors = {name: as_host_tensor(array) for name, array in by_stored_name(params).items()}
            tensors = tensors if bits or format == OWN_NAMES else revert_weight_conversion(module, tensors)
        if jax.process_index() == 0:  # all processes gather the weights; one writes
            save_safetensors(folder, tensors, max_shard_size=max_shard_size)
            remove_orbax(folder)
    else:
        raise InvalidInputError(
            f"Unknown format={format!r}.",
            "Weights can be saved as safetensors, compressed-tensors, Flax or orbax.",
            'Pass format="safetensors", "compressed-tensors", "flax" or "orbax".',
        )
    if jax.process_index() == 0:
        write_configs(folder, module, config, generation_config)


def by_stored_name(params: Mapping[str, jax.Array | QuantizedArray]) -> dict[str, jax.Array]:
    """Arrays by stored name: a quantized weight's codes under its name, the rest under the name with a suffix."""
    arrays: dict[str, jax.Array] = {}
    for name, array in params.items():
        if isinstance(array, QuantizedArray):
            arrays |= {stored: getattr(array, field) for field, stored in names_of(name, array).items()}
        else:
            arrays[name] = array
    return arrays


def as_host_tensor(array: jax.Array) -> torch.Tensor:
    """The array as a torch tensor in host memory; not copied if it is on a single CPU device."""
    here = jax.local_devices(backend="cpu")[0]
    if len(array.sharding.device_set) > 1:
        return _from_dlpack(jax.device_put(to_host(array), here))
    on_host = next(iter(array.devices())).platform == "cpu"
    return _from_dlpack(array if on_host else jax.device_put(array, here))


def _from_dlpack(array: jax.Array) -> torch.Tensor:
    if array.dtype == jnp.float8_e4m3fn:  # not every dlpack has it
        return torch.from_dlpack(array.view(jnp.uint8)).view(torch.float8_e4m3fn)
    return torch.from_dlpack(array)
