"""Random weights for a skeleton, initialised as transformers does."""

from __future__ import annotations

import copy

import jax
from transformers import PretrainedConfig

from hfax.kernels.quantized import QuantizedArray
from hfax.load.placement import check_fits, place
from hfax.load.quantize import Quantization, layouts, quantize
from hfax.load.skeleton import Skeleton
from hfax.sharding.layout import Layout


def draw_weights(
    skeleton: Skeleton,
    config: PretrainedConfig,
    layout: Layout,
    quantization: Quantization | None = None,
) -> dict[str, jax.Array | QuantizedArray]:
    """Instantiate the module with real weights and take them; uses torch's global generator.

    Raises:
        OutOfMemoryError: the weights do not fit on the device.
    """
    needed = sum(t.numel() * t.element_size() for t in skeleton.shapes.values())
    needed = needed if layout.plan is None else layout.plan.bytes_per_device
    check_fits(needed, layout.device, "The model", "Use a smaller configuration or dtype, or more devices.")
    module = type(skeleton.module)._from_config(copy.deepcopy(config), dtype=skeleton.dtype)
    state = module.state_dict()
    del module
    packed = layouts(skeleton.module, skeleton.shapes, skeleton.tied, quantization)
    weights: dict[str, jax.Array | QuantizedArray] = {}
    for name in skeleton.shapes:
        tensor = state.pop(name)
        where = layout.weight(name)
        small = None
        if quantization is not None and name in packed:
            small = quantize(tensor, quantization, where, is_transposed=packed[name].is_transposed)
        weights[name] = place(tensor, where) if small is None else small
    return weights
