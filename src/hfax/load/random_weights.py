"""Random weights for a skeleton, drawn as transformers draws them."""

from __future__ import annotations

import copy

import jax
import torch
from transformers import PretrainedConfig

from hfax.kernels.quantized import QuantizedArray
from hfax.load.placement import check_fits, place
from hfax.load.quantize import Quantization, quantize, weights_to_quantize
from hfax.load.skeleton import Skeleton


def draw_weights(
    skeleton: Skeleton,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: jax.Device,
    quantization: Quantization | None = None,
) -> dict[str, jax.Array | QuantizedArray]:
    """Build the module for real once and take its weights over; uses torch's global generator.

    Raises:
        OutOfMemoryError: the weights do not fit the device.
    """
    needed = sum(t.numel() * t.element_size() for t in skeleton.shapes.values())
    check_fits(needed, device, "The model", "Use a smaller configuration or dtype.")
    module = type(skeleton.module)._from_config(copy.deepcopy(config), dtype=dtype)
    state = module.state_dict()
    del module
    packed = weights_to_quantize(skeleton.module, skeleton.shapes, skeleton.tied) if quantization else set()
    weights: dict[str, jax.Array | QuantizedArray] = {}
    for name in skeleton.shapes:
        tensor = state.pop(name)
        small = quantize(tensor, quantization, device) if quantization and name in packed else None
        weights[name] = place(tensor, device) if small is None else small
    return weights
