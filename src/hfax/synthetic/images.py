"""Prompts for small vision-language models: two rows, with one image each.

Makes pixels in the layout that the model's forward takes (whole images, tiles, or concatenated patches with a grid), gets the
number of features per image from the model's own `get_image_features`, and builds prompts with that many image tokens. The names of
forward's parameters select the layout; `LAYOUTS` holds the model types that need another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

IMAGES = 2
AROUND = (3, 5)
"""Number of text tokens before and after the image in a row."""
ImageSizes = tuple[tuple[int, int], tuple[int, int]]
"""Height and width of each image, in merged patches: one feature each, of 2 x 2 patches if the config sets no merge size."""
SIZES: ImageSizes = ((2, 2), (2, 4))


def vision_config(config: Any) -> Any:
    """The sub-config of the vision encoder; the config itself if it has none."""
    for name in ("vision_config", "vision_tower_config", "vision_encoder_config", "vqgan_config", "vq_config"):
        if (part := getattr(config, name, None)) is not None:
            return part
    thinker = getattr(config, "thinker_config", None)
    return vision_config(thinker) if thinker is not None else config


def image_inputs(model: Any, sizes: ImageSizes = SIZES) -> dict[str, torch.Tensor]:
    """Make two images in the layout that the model's forward takes.

    Args:
        model: a model of plain transformers, or a skeleton's module.
        sizes: image sizes, for layouts with variable sizes.

    Raises:
        NotImplementedError: no layout fits.
    """
    names = set(inspect.signature(model.forward).parameters)
    config = vision_config(model.config)
    if own := LAYOUTS.get(model.config.model_type.removesuffix("_vision")):
        return own(model, sizes)
    if names & {"image_grid_thw", "grid_thw"}:
        return _patches_with_grid(config, sizes)
    if "target_sizes" in names:
        return _packed_columns(config, sizes)
    if "spatial_shapes" in names:
        return _padded_patches(config, sizes)
    if "pixel_attention_mask" in names:
        return _masked_tiles(config)
    found = {"pixel_values": draw(IMAGES, _channels(config), *image_size(config))}
    if "image_sizes" in names and "image_grid_pinpoints" in vars(model.config):
        height, width = image_size(config)
        tiles = 1 + (model.config.image_grid_pinpoints[0][0] // height) * (
            model.config.image_grid_pinpoints[0][1] // width
        )
        found["pixel_values"] = draw(IMAGES, tiles, _channels(config), height, width)
        found["image_sizes"] = torch.tensor([[height, width], [height // 2, width]])
    elif "image_sizes" in names and _reads_any_size(model):
        found["image_sizes"] = torch.tensor([list(image_size(config))] * IMAGES)
    return found


def _reads_any_size(model: Any) -> bool:
    inner = getattr(model, "model", model)
    parts = (getattr(inner, n, None) for n in ("vision_tower", "vision_encoder"))
    return any(hasattr(part, "patch_size") for part in parts)


def draw(*shape: int) -> torch.Tensor:
    """Standard normal float32 values from a fixed seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def image_number(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            value = value[0]
        if isinstance(value, int):
            return value
    return default


def _channels(config: Any) -> int:
    return image_number(config, "num_channels", "in_channels", "in_chans", default=3)


def image_size(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or getattr(config, "resolution", None) or 64
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _patches_with_grid(config: Any, sizes: ImageSizes) -> dict[str, torch.Tensor]:
    """Concatenated patches of all images, [patches, values], and their grids, [images, 3] (time, height, width, in patches)."""
    merge = image_number(config, "spatial_merge_size", "merge_size", "merge_kernel_size", default=2)
    patch = image_number(config, "patch_size", default=14)
    frames = image_number(config, "temporal_patch_size", "patch_temporal", default=1)
    grid = torch.tensor([[1, height * merge, width * merge] for height, width in sizes])
    values = _channels(config) * frames * patch * patch
    return {"pixel_values": draw(int(grid.prod(1).sum()), values), "image_grid_thw": grid}


def _square_patches_with_grid(model: Any, sizes: ImageSizes) -> dict[str, torch.Tensor]:
    """As `_patches_with_grid`, with each patch as a square image, [patches, channels, patch, patch]."""
    config = vision_config(model.config)
    found = _patches_with_grid(config, sizes)
    patch = image_number(config, "patch_size", default=14)
    pixels = found["pixel_values"]
    return found | {"pixel_values": pixels.reshape(len(pixels), _channels(config), patch, patch)}


def _packed_columns(config: Any, sizes: ImageSizes) -> dict[str, torch.Tensor]:
    """Patches of all images side by side, [1, channels, patch, patches · patch], and image sizes in patches, [images, 2]."""
    patch = image_number(config, "patch_size", default=14)
    patches = 2 * torch.tensor(sizes)
    pixels = draw(1, _channels(config), patch, int(patches.prod(1).sum()) * patch)
    return {"pixel_values": pixels, "target_sizes": patches}


def _padded_patches(config: Any, sizes: ImageSizes) -> dict[str, torch.Tensor]:
    """Padded patches, [images, patches, values], image sizes in patches, [images, 2], and a mask, [images, patches]."""
    patch = image_number(config, "patch_size", default=14)
    shapes = torch.tensor([[2 * height, width + 2] for height, width in sizes])
    counts = shapes.prod(1)
    mask = torch.arange(int(counts.max()))[None] < counts[:, None]
    pixels = draw(IMAGES, int(counts.max()), _channels(config) * patch * patch) * mask[..., None]
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask.long()}


def _masked_tiles(config: Any) -> dict[str, torch.Tensor]:
    """Images of each row, [rows, images, channels, height, width], and a mask of real pixels, [rows, images, height, width]."""
    height, width = image_size(config)
    mask = torch.ones(IMAGES, 1, height, width, dtype=torch.bool)
    return {"pixel_values": draw(IMAGES, 1, _channels(config), height, width), "pixel_attention_mask": mask}


def _merged_patches(model: Any, sizes: ImageSizes) -> dict[str, torch.Tensor]:
    """A small image per token, [tokens, merge · patch, merge · patch, channels], and grids in tokens, [images, 3]."""
    config = vision_config(model.config)
    side = image_number(config, "spatial_merge_size", default=2) * image_number(config, "patch_size", default=14)
    grid = torch.tensor([[1, height, width] for height, width in sizes])
    return {"pixel_values": draw(int(grid.prod(1).sum()), side, side, _channels(config)), "image_grid_thw": grid}


def _patches_with_heights(model: Any, sizes: ImageSizes) -> dict[str, torch.Tensor]:
    """As `_patches_with_grid`, with grids of height and width only, [images, 2]."""
    config = vision_config(model.config)
    grid = 2 * torch.tensor(sizes)
    values = _channels(config) * image_number(config, "patch_size", default=14) ** 2
    return {"pixel_values": draw(int(grid.prod(1).sum()), values), "image_grid_hw": grid}


def _patches_with_positions(model: Any, _: ImageSizes) -> dict[str, torch.Tensor]:
    """Patches of each image, [images, patches, values], and their positions, [images, patches, 2] (x, y)."""
    config = vision_config(model.config)
    side = 2 * image_number(config, "pooling_kernel_size", default=1)
    patch = image_number(config, "model_patch_size", "patch_size", default=16)
    places = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), dim=-1).reshape(-1, 2)
    pixels = draw(IMAGES, side * side, 3 * patch * patch).sigmoid()
    return {"pixel_values": pixels, "image_position_ids": places[None].repeat(IMAGES, 1, 1)}


def _crops_with_pooling(model: Any, _: ImageSizes) -> dict[str, torch.Tensor]:
    """Patches of one crop per image, [crops, patches, values], and the indices of the four patches per token, [tokens, 4]."""
    config = vision_config(model.config)
    patch, side = (
        image_number(config, "patch_size", default=14),
        image_size(config)[0] // image_number(config, "patch_size", default=14),
    )
    places = torch.arange(side * side).reshape(side // 2, 2, side // 2, 2).transpose(1, 2).reshape(-1, 4)
    pooling = torch.cat([places + image * side * side for image in range(IMAGES)])
    return {
        "pixel_values": draw(IMAGES, side * side, _channels(config) * patch * patch),
        "image_token_pooling": pooling,
        "image_grids": torch.tensor([[side // 2, side // 2, 0, 0]] * IMAGES),
        "image_num_crops": torch.ones(IMAGES, dtype=torch.long),
    }


def _tiles_with_ratios(model: Any, _: ImageSizes) -> dict[str, torch.Tensor]:
    """Tiles of one image per row, [rows, images, tiles, channels, height, width], aspect ratio ids and a mask of real tiles."""
    config = vision_config(model.config)
    tiles = config.max_num_tiles
    mask = torch.zeros(IMAGES, 1, tiles, dtype=torch.long)
    mask[:, :, :1] = 1
    return {
        "pixel_values": draw(IMAGES, 1, tiles, _channels(config), *image_size(config)),
        "aspect_ratio_ids": torch.ones(IMAGES, 1, dtype=torch.long),
        "aspect_ratio_mask": mask,
    }


def _masked_by_tile(model: Any, _: ImageSizes) -> dict[str, torch.Tensor]:
    """Tiles of one image per row, [rows, tiles, channels, height, width], and a mask of real tiles, [rows, tiles]."""
    config = vision_config(model.config)
    if config is model.config:  # the encoder alone
        return {"pixel_values": draw(IMAGES, _channels(config), *image_size(config))}
    mask = torch.ones(IMAGES, 2, dtype=torch.bool)
    return {"pixel_values": draw(IMAGES, 2, _channels(config), *image_size(config)), "pixel_attention_mask": mask}


def _flat_patches(model: Any, _: ImageSizes) -> dict[str, torch.Tensor]:
    """Flattened patches, [images, patches, 2 + values]: row and column, counted from 1, then the values."""
    config = vision_config(model.config)
    patch = image_number(config, "patch_size", default=16)
    places = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4)).float()[None].repeat(IMAGES, 1, 1)
    return {"flattened_patches": torch.cat([places, draw(IMAGES, 9, _channels(config) * patch * patch)], dim=-1)}


def _padded_with_sizes(model: Any, _: ImageSizes) -> dict[str, torch.Tensor]:
    """Images, [images, channels, height, width], and their sizes without padding, [images, 2]."""
    return {"pixel_values": draw(IMAGES, 3, 64, 64), "image_sizes": torch.tensor([[64, 64]] * IMAGES)}


LAYOUTS: dict[str, Callable[[Any, ImageSizes], dict[str, torch.Tensor]]] = {
    "kimi_k25": _square_patches_with_grid,
    "paddleocr_vl": _square_patches_with_grid,
    "inkling2": _merged_patches,
    "inkling2_loop": _merged_patches,
    "inkling_mm_model": lambda model, _: {
        "pixel_values": draw(
            IMAGES, vision_config(model.config).temporal_patch_size, *[vision_config(model.config).patch_size] * 2, 3
        )
    },
    "nemotron_h_omni": _patches_with_heights,
    "gemma4": _patches_with_positions,
    "gemma4_unified": _patches_with_positions,
    "molmo2": _crops_with_pooling,
    "mllama": _tiles_with_ratios,
    "idefics": lambda model, _: {"pixel_values": draw(IMAGES, 1, 3, *image_size(vision_config(model.config)))},
    "granite_docling": _masked_by_tile,
    "pix2struct": _flat_patches,
    "deepseek_vl_hybrid": lambda model, _: {
        "pixel_values": draw(IMAGES, 3, *image_size(vision_config(model.config))),
        "high_res_pixel_values": draw(IMAGES, 3, *image_size(model.config.high_res_vision_config)),
    },
    "emu3": _padded_with_sizes,
    "apertus1p5": _padded_with_sizes,
    "instructblipvideo": lambda model, _: {
        "pixel_values": draw(IMAGES, 4, 3, *image_size(vision_config(model.config)))
    },
    "neomme": lambda model, _: {"pixel_values": draw(4 * IMAGES, model.config.patch_dim)},
    "fuyu": lambda model, _: {"pixel_values": draw(IMAGES, 4, 3 * model.config.patch_size**2)},
    "video_llama_3": lambda model, sizes: (
        _patches_with_grid(vision_config(model.config), sizes) | {"image_merge_sizes": torch.tensor([1, 2])}
    ),
}
"""Model type to a function that makes its images, for uncommon layouts."""


CountFeatures = Callable[[Any, dict[str, Any]], list[int]]
"""Takes a model and its images; returns the number of features of each image."""


def prompts_with_images(
    model: Any,
    ordinary: torch.Tensor,
    count_features: CountFeatures,
    sizes: ImageSizes = SIZES,
    around: tuple[int, int] = AROUND,
) -> dict[str, Any]:
    """Make arguments of forward: pixels, and two left-padded rows of token ids with an image in each.

    Args:
        model: a model of plain transformers, or a skeleton's module.
        ordinary: text token ids, [2, n] int64.
        count_features: `feature_counts`, or an equivalent for a model without weights.
        sizes: image sizes.
        around: number of text tokens before and after the image; the second row has one fewer after it.
    """
    before, last = around
    images = image_inputs(model, sizes)
    names = inspect.signature(model.forward).parameters
    if "qformer_input_ids" in names:
        images["qformer_input_ids"] = ordinary[:, -last:] % model.config.qformer_config.vocab_size
        images["qformer_attention_mask"] = torch.ones_like(images["qformer_input_ids"])
    token = image_token(model.config)
    counts = count_features(model, images) if token is not None else [0] * IMAGES
    length = before + last + max(count - row for row, count in enumerate(counts))
    ids, mask, is_image = (torch.zeros(IMAGES, length, dtype=torch.long) for _ in range(3))
    for row, count in enumerate(counts):
        text, after = ordinary[row], last - row
        values = torch.cat([text[:before], torch.full((count,), token or 0), text[before : before + after]])
        ids[row, length - len(values) :], mask[row, length - len(values) :] = values, 1
        is_image[row, length - after - count : length - after] = 1
    found = {"input_ids": ids, "attention_mask": mask, **images}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in names:
            found[name] = is_image
            break
    if "image_embeds_position_mask" in names:
        found["image_embeds_position_mask"] = is_image
    if "moe_mm_token_type_ids" in names:
        found["moe_mm_token_type_ids"] = found["mm_token_type_ids"]
    if "image_attention_mask" in names:
        found["image_attention_mask"] = torch.zeros(IMAGES, length, 1, dtype=torch.long)
        found["image_attention_mask"][:, before:] = 1
    if "cross_attention_mask" in names:  # every token after the image attends to its first tile
        tiles = images["pixel_values"].shape[2]
        found["cross_attention_mask"] = torch.zeros(IMAGES, length, 1, tiles, dtype=torch.long)
        found["cross_attention_mask"][:, before:, :, 0] = 1
    return found


def image_token(config: Any) -> int | None:
    """The placeholder token id of image features; None if image features are not inserted into the text."""
    if config.model_type in ("git", "blip", "mllama", "idefics"):
        return None
    if config.model_type == "kosmos-2":  # a mask marks the image positions, whatever their ids
        return 0
    names = ("image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id", "video_token_index")
    for name in names:
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise NotImplementedError("the config names no image token")


def feature_counts(model: Any, images: dict[str, torch.Tensor]) -> list[int]:
    """The number of features of each image."""
    if number := getattr(model.config, "latent_query_num", None):
        return [number] * IMAGES
    holders = [
        h for h in (getattr(model, "model", None), model) if h is not None
    ]  # the outer model may only forward the call to the inner one
    methods = ("get_image_features", "get_video_features")
    holder, method = next((h, m) for m in methods for h in holders if hasattr(h, m))
    read: Any = getattr(holder, method)
    names = inspect.signature(getattr(type(holder), method)).parameters  # not the object's: it may be patched
    with torch.no_grad():
        out = read(**{n: v for n, v in images.items() if n in names}, return_dict=True)
    features = getattr(out, "pooler_output", None)
    features = getattr(out, "last_hidden_state", out) if features is None else features
    if (stacked := getattr(out, "deepstack_features", None)) and features is None:
        features = stacked[0][1] if isinstance(stacked[0], tuple) else stacked[0]
    if isinstance(features, (list, tuple)):
        counts = [f.numel() // f.shape[-1] for f in features]
        return counts if len(counts) == IMAGES else [sum(counts) // IMAGES] * IMAGES
    return [features.numel() // features.shape[-1] // IMAGES] * IMAGES
