"""Prompts with an image, as programs take them: for plans, without pixels or weights."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.generation.image_classes import image_padding
from hfax.synthetic.images import (
    SIZES,
    feature_counts,
    image_inputs,
    image_number,
    image_size,
    image_token,
    vision_config,
)
from hfax.tracing import geometry
from hfax.tracing.traced_model import TracedModel

_GRID = "image_grid_thw"
_TEXT = 2
"""Fewest tokens of a prompt around an image."""


def image_prompt(
    traced: TracedModel, params: Mapping[str, Any], *, batch: int, length: int, size: tuple[int, int]
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Any]]:
    """Inputs of the prefill program for prompts with one image each, as `generate` passes them.

    Args:
        traced: the traced model.
        params: shapes of its weights, by name.
        batch: number of prompts.
        length: their padded length, in tokens.
        size: height and width of the images in pixels. As the processor does, they are rounded to whole tokens.

    Returns:
        The arrays' shapes and dtypes by name, and the inputs that are constants of the program.

    Raises:
        UnsupportedOptionError: the model takes no images, or in a layout that is not planned: only packed patches with their grids
            (Qwen-VL's family), and whole images of one size.
        InvalidInputError: the model reads images of another size, or the image's tokens do not fit the prompt.
    """
    module = traced.module
    images, count, token = _images(traced, params, size)
    arrays = {name: np.repeat(array[None], batch, 0).reshape(-1, *array.shape[1:]) for name, array in images.items()}
    ids = np.zeros((batch, length), np.int32)
    ids[:, length - 1 - count : length - 1] = token
    padding = image_padding(module, ids, arrays)
    if padding is not None and _GRID in arrays:
        is_shared = traced.takes_packed_images(params, {"input_ids": ids, **padding.arrays})
        padding = padding if is_shared else None
    before = 0 if padding is None else len(padding.tokens)
    if count + before + _TEXT > length:
        raise InvalidInputError(
            f"An image of {size[0]} x {size[1]} pixels does not fit a prompt of {length} tokens.",
            f"It has {count} tokens" + (f", and {before} more fill the size class of its program." if before else "."),
            f"Plan for a prompt of at least {count + before + _TEXT} tokens.",
        )
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids), **arrays}
    names = inspect.signature(module.forward).parameters
    is_image = (ids == token).astype(np.int32)
    inputs |= {name: is_image for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    inputs = geometry.keep_on_host(inputs, traced.traits.traced_geometry)
    if traced.traits.takes_position_ids and (found := geometry.prompt_positions(module, inputs)) is not None:
        inputs["position_ids"] = found
    inputs |= {} if padding is None else padding.arrays
    static = {name: value for name, value in inputs.items() if isinstance(value, geometry.HostArray)}
    shapes = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in inputs.items() if n not in static}
    return shapes, static


def _images(
    traced: TracedModel, params: Mapping[str, jax.ShapeDtypeStruct], size: tuple[int, int]
) -> tuple[dict[str, np.ndarray], int, int]:
    """One image's arrays by name, the number of its tokens, and their id."""
    module: Any = traced.module
    names, config = inspect.signature(module.forward).parameters, vision_config(module.config)
    if "pixel_values" not in names:
        raise UnsupportedOptionError(
            f"{type(module).__name__} takes no images.",
            "Its forward has no pixel_values.",
            "Plan without the size of an image.",
        )
    side = image_number(config, "patch_size", default=14)
    side *= image_number(config, "spatial_merge_size", "merge_size", "merge_kernel_size", default=2)
    height, width = (max(1, round(pixels / side)) for pixels in size)
    try:
        token = image_token(module.config)
        found = image_inputs(module, ((height, width), (height, width)) if _GRID in names else SIZES)
    except NotImplementedError:
        token, found = None, {"another layout": torch.zeros(0)}
    is_known = not found.keys() - {"pixel_values", _GRID} and (_GRID in found or found["pixel_values"].ndim == 4)
    if token is None or not is_known:
        raise UnsupportedOptionError(
            f"Prompts of {type(module).__name__} are not planned with images.",
            f"It takes {', '.join(found)}. Plans know packed patches with their grids and whole images of one size, where features "
            "replace tokens of the prompt.",
            "Plan without the size of an image.",
        )
    if _GRID not in found and size != (own := image_size(config)):
        raise InvalidInputError(
            f"An image of {size[0]} x {size[1]} pixels cannot be planned.",
            f"{type(module).__name__} reads all images as {own[0]} x {own[1]} pixels.",
            f"Plan for {own[0]}x{own[1]}.",
        )
    images = {name: np.asarray(array[: len(array) // 2]) for name, array in found.items()}
    if _GRID in images:
        return images | {_GRID: images[_GRID].astype(np.int32)}, height * width, token
    counts: list[int] = []

    def read(params: Any, arrays: Any) -> None:
        traced.inspect(params, lambda module, arrays: counts.extend(feature_counts(module, arrays)), arrays, {})

    both = found["pixel_values"]
    jax.eval_shape(read, dict(params), {"pixel_values": jax.ShapeDtypeStruct(tuple(both.shape), np.float32)})
    return images, counts[0], token
