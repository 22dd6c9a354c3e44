"""Prompts with two images, one a row, for a small vision-language model.

Turns a model into pixels in the layout that its forward takes (whole images, tiles, or patches in a row with a grid beside them),
asks the model's own `get_image_features` how many features each image gives, and writes prompts with as many image tokens. Layouts
are chosen by the names of forward's parameters; what one model type does in a way of its own is in `_OWN`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

IMAGES = 2
_BEFORE, _AFTER = 3, 5
"""Tokens of text around a row's image."""


def vision_config(config: Any) -> Any:
    """The part of a config that describes how images are read."""
    for name in ("vision_config", "vision_tower_config", "vision_encoder_config", "vqgan_config", "vq_config"):
        if (part := getattr(config, name, None)) is not None:
            return part
    thinker = getattr(config, "thinker_config", None)
    return vision_config(thinker) if thinker is not None else config


def image_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Two images in the layout of the model's forward.

    Raises:
        NotImplementedError: no layout fits.
    """
    names = set(inspect.signature(model.forward).parameters)
    config = vision_config(model.config)
    if own := _OWN.get(model.config.model_type):
        return own(model)
    if "image_grid_thw" in names:
        return _patches_with_grid(config)
    if "target_sizes" in names:
        return _packed_columns(config)
    if "spatial_shapes" in names:
        return _padded_patches(config)
    if "pixel_attention_mask" in names:
        return _masked_tiles(config)
    found = {"pixel_values": draw(IMAGES, _channels(config), *_size(config))}
    if "image_sizes" in names and "image_grid_pinpoints" in vars(model.config):
        height, width = _size(config)
        tiles = 1 + (model.config.image_grid_pinpoints[0][0] // height) * (model.config.image_grid_pinpoints[0][1] // width)
        found["pixel_values"] = draw(IMAGES, tiles, _channels(config), height, width)
        found["image_sizes"] = torch.tensor([[height, width], [height // 2, width]])
    elif "image_sizes" in names:
        found["image_sizes"] = torch.tensor([list(_size(config))] * IMAGES)
    return found


def draw(*shape: int) -> torch.Tensor:
    """Normal numbers from a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _number(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            value = value[0]
        if isinstance(value, int):
            return value
    return default


def _channels(config: Any) -> int:
    return _number(config, "num_channels", "in_channels", "in_chans", default=3)


def _size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or getattr(config, "resolution", None) or 64
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _patches_with_grid(config: Any) -> dict[str, torch.Tensor]:
    """Patches of all images in one row, [patches, values], and how they lie, [images, 3] (time, height, width)."""
    merge = _number(config, "spatial_merge_size", "merge_size", "merge_kernel_size", default=2)
    patch, frames = _number(config, "patch_size", default=14), _number(config, "temporal_patch_size", default=1)
    grid = torch.tensor([[1, 2 * merge, 2 * merge], [1, 2 * merge, 4 * merge]])
    values = _channels(config) * frames * patch * patch
    return {"pixel_values": draw(int(grid.prod(1).sum()), values), "image_grid_thw": grid}


def _packed_columns(config: Any) -> dict[str, torch.Tensor]:
    """Patches of all images side by side, [1, channels, patch, patches · patch], and their sizes in patches, [images, 2]."""
    patch = _number(config, "patch_size", default=14)
    sizes = torch.tensor([[4, 4], [4, 8]])
    return {"pixel_values": draw(1, _channels(config), patch, int(sizes.prod(1).sum()) * patch), "target_sizes": sizes}


def _padded_patches(config: Any) -> dict[str, torch.Tensor]:
    """Patches of each image, padded to the longest, [images, patches, values], their sizes, [images, 2], and a mask."""
    patch = _number(config, "patch_size", default=14)
    shapes = torch.tensor([[4, 4], [4, 6]])
    counts = shapes.prod(1)
    mask = torch.arange(int(counts.max()))[None] < counts[:, None]
    pixels = draw(IMAGES, int(counts.max()), _channels(config) * patch * patch) * mask[..., None]
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask.long()}


def _masked_tiles(config: Any) -> dict[str, torch.Tensor]:
    """Images of each row, [rows, images, channels, height, width], and which pixels are real."""
    height, width = _size(config)
    mask = torch.ones(IMAGES, 1, height, width, dtype=torch.bool)
    return {"pixel_values": draw(IMAGES, 1, _channels(config), height, width), "pixel_attention_mask": mask}


_OWN: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {}
"""Model types whose images have a layout that no other has."""


def prompts_with_images(model: Any, ordinary: torch.Tensor) -> dict[str, Any]:
    """Arguments of forward: pixels, and two rows of ids, padded on the left, with an image in each.

    Args:
        model: of plain transformers.
        ordinary: [2, n] ids of text.
    """
    images = image_inputs(model)
    counts = feature_counts(model, images)
    token = image_token(model.config)
    rows = []
    for row, count in enumerate(counts):
        text = ordinary[row]
        rows.append(torch.cat([text[:_BEFORE], torch.full((count,), token), text[_BEFORE : _BEFORE + _AFTER - row]]))
    length = max(len(r) for r in rows)
    ids, mask = torch.zeros(IMAGES, length, dtype=torch.long), torch.zeros(IMAGES, length, dtype=torch.long)
    for row, values in enumerate(rows):
        ids[row, length - len(values) :], mask[row, length - len(values) :] = values, 1
    found = {"input_ids": ids, "attention_mask": mask, **images}
    names = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names:
            found[name] = ((ids == token) & (mask == 1)).long()
            break
    return found


def image_token(config: Any) -> int:
    """The id that stands for an image's features."""
    for name in ("image_token_id", "image_token_index", "media_placeholder_token_id"):
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise NotImplementedError("the config names no image token")


def feature_counts(model: Any, images: dict[str, torch.Tensor]) -> list[int]:
    """How many features each image gives."""
    base: Any = model if hasattr(model, "get_image_features") else model.model
    names = inspect.signature(base.get_image_features).parameters
    with torch.no_grad():
        out = base.get_image_features(**{n: v for n, v in images.items() if n in names}, return_dict=True)
    features = getattr(out, "pooler_output", None)
    features = out if features is None else features
    if isinstance(features, (list, tuple)):
        counts = [f.numel() // f.shape[-1] for f in features]
        return counts if len(counts) == IMAGES else [sum(counts) // IMAGES] * IMAGES
    return [features.numel() // features.shape[-1] // IMAGES] * IMAGES
