"""Size classes for images, so that images of many sizes share few programs.

Prompts are padded on the left. The images are padded there, too, by a black one, whose tokens lie in the padding, where no token
attends to them. A padded prompt is a valid prompt: it has as many tokens for images as the model has features.

In forward calls and training, the black image comes last and has no tokens: its features are left over.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hfax.generation.generation_request import Prompts
from hfax.programs.buckets import power_of_two
from hfax.tracing.geometry import GRIDS, ORDER

_TOKENS = {"image_grid_thw": ("image_token_id", "image_token_index"), "video_grid_thw": ("video_token_id",)}
_TILED = frozenset({"aya_vision", "cohere2_vision", "got_ocr2", "internvl"})
"""Model types that cut images into tiles of one size, [tiles, channels, height, width], with as many tokens for each."""
_IN_PARTS = ("LlavaNextModel", "LlavaNextVideoModel")
"""Classes that cut images into tiles, and read only the features of tiles that are not padding, and an end of each line."""
_SMALLEST_TOKENS = 96
_SMALLEST_IMAGES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagePadding:
    """Images that fill their size class.

    Args:
        arrays: by name and padded to a class, packed patches, [patches, …], and their grids, [images, 3] int32; or tiles, [tiles,
            channels, height, width], and the order of their features, if not all of them are read, [tokens] int32.
        tokens: ids of the tokens that stand for the black images, [tokens] int32.
    """

    arrays: dict[str, np.ndarray]
    tokens: np.ndarray

    def applied(self, prompts: Prompts) -> Prompts:
        """The prompts with the black images before them.

        Args:
            prompts: padded on the left by at least as many tokens as the images are padded by.
        """
        ids = prompts.inputs["input_ids"].copy()
        ids[0, : len(self.tokens)] = self.tokens
        inputs = {**prompts.inputs, "input_ids": ids, **self.arrays}
        return dataclasses.replace(
            prompts, inputs=inputs, static={n: v for n, v in prompts.static.items() if n not in self.arrays}
        )


def image_padding(module: Any, ids: np.ndarray, arrays: Mapping[str, np.ndarray]) -> ImagePadding | None:
    """Pad the images of a batch of prompts to their size classes.

    The classes of packed images are 96, 192, 384, … tokens of images in all: three quarters of a prompt's padded length, with room
    for text. Those of tiles are 1, 2, 3, 4, 6, 8, 12, … tiles.

    Args:
        module: the model.
        ids: the prompts, [batch, length].
        arrays: further inputs by name.

    Returns:
        None if the prompts have neither packed images nor tiles, or other images than tokens for them.
    """
    config = module.config
    if config.model_type in _TILED:
        return _tile_padding(config, ids, arrays)
    if ORDER in arrays:
        return _feature_padding(module, ids, arrays)
    return _packed_padding(config, ids, arrays, lambda number, _: _token_class(number), is_first=True)


class PackedImages:
    """Size classes of packed images in forward calls and training.

    They are 96, 192, 384, … tokens of images in all, and one for the first number of tokens that is seen: where all images have one
    size, nothing is padded.
    """

    def __init__(self) -> None:
        self._first: dict[str, int] = {}

    def padded(self, config: Any, ids: np.ndarray, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Packed images and their grids, padded at the end.

        Args:
            config: of the model.
            ids: [batch, length].
            arrays: further inputs by name.

        Returns:
            By name; empty if there are no packed images, or other images than tokens for them.
        """

        def class_of(number: int, grids: str) -> int:
            return number if number == self._first.setdefault(grids, number) else _token_class(number)

        padding = _packed_padding(config, ids, arrays, class_of, is_first=False)
        return {} if padding is None else padding.arrays


def _packed_padding(
    config: Any,
    ids: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    class_of: Callable[[int, str], int],
    *,
    is_first: bool,
) -> ImagePadding | None:
    padded: dict[str, np.ndarray] = {}
    tokens: list[int] = []
    for patches, grids in GRIDS.items():
        if (pixels := arrays.get(patches)) is None and arrays.get(grids) is None:
            continue
        token = _token(config, grids)
        grid = arrays.get(grids)
        if pixels is None or grid is None or grid.ndim != 2 or grid.shape[1] != 3 or token is None:
            return None
        number = int((ids == token).sum())
        # in prompts, whose tokens the model counts itself, the side may be told from the numbers
        merge = _merged(config) or (round((len(pixels) / number) ** 0.5) if number and is_first else 0)
        if not merge or number * merge**2 != len(pixels) or grid.prod(1).sum() != len(pixels) or (grid <= 0).any():
            return None
        missing = class_of(number, grids) - number
        rows = max(power_of_two(len(grid) + 1), _SMALLEST_IMAGES)
        black = [(1, merge, merge * missing)] if missing else []
        padded[grids] = np.zeros((rows, 3), np.int32)
        padded[grids][: len(grid) + len(black)] = [*black, *grid] if is_first else [*grid, *black]
        ends = (missing * merge**2, 0)
        padded[patches] = np.pad(pixels, [ends if is_first else ends[::-1], *[(0, 0)] * (pixels.ndim - 1)])
        tokens += [token] * missing
    return ImagePadding(arrays=padded, tokens=np.asarray(tokens, np.int32)) if padded else None


def _tile_padding(config: Any, ids: np.ndarray, arrays: Mapping[str, np.ndarray]) -> ImagePadding | None:
    pixels, token = arrays.get("pixel_values"), _token(config, "image_grid_thw")
    if pixels is None or pixels.ndim != 4 or token is None:
        return None
    each, rest = divmod(int((ids == token).sum()), len(pixels))
    if rest or not each:
        return None
    top = power_of_two(len(pixels))
    missing = (top // 4 * 3 if top >= 4 and len(pixels) <= top // 4 * 3 else top) - len(pixels)
    padded = np.pad(pixels, [(missing, 0), (0, 0), (0, 0), (0, 0)])
    return ImagePadding(arrays={"pixel_values": padded}, tokens=np.full(missing * each, token, np.int32))


def _feature_padding(module: Any, ids: np.ndarray, arrays: Mapping[str, np.ndarray]) -> ImagePadding | None:
    """Padding of LLaVA-NeXT's images. The order of features is that in which the model's own function packs their numbers."""
    import torch

    holder = next((part for part in module.modules() if type(part).__name__ in _IN_PARTS), None)
    pixels, token = arrays.get("pixel_values"), _token(module.config, "image_grid_thw")
    if holder is None or pixels is None or token is None or arrays[ORDER].shape != (len(pixels), 2) or pixels.ndim != 5:
        return None
    config, vision = holder.config, holder.config.vision_config
    sizes = torch.from_numpy(arrays[ORDER].astype(np.int64))
    count = sys.modules[type(holder).__module__].image_size_to_num_patches
    counts = [count(size, config.image_grid_pinpoints, vision.image_size) for size in sizes]
    if max(counts) > pixels.shape[1]:
        return None
    each = (vision.image_size // vision.patch_size) ** 2
    numbers = torch.arange(sum(counts) * each + 1, dtype=torch.float64)
    features = list(numbers[:-1].reshape(-1, each, 1).split(counts))
    packed, _ = holder.pack_image_features(features, sizes, config.vision_feature_select_strategy, numbers[-1:])
    order = torch.cat(packed)[:, 0].numpy().astype(np.int32)
    if len(order) != (ids == token).sum():
        return None
    missing = _token_class(len(order)) - len(order)
    padded = {
        "pixel_values": np.concatenate([tiles[:number] for tiles, number in zip(pixels, counts, strict=True)]),
        ORDER: np.pad(order, (missing, 0)),
    }
    return ImagePadding(arrays=padded, tokens=np.full(missing, token, np.int32))


def _merged(config: Any) -> int:
    """The side of the blocks of patches that the model merges into a token; 0: its config does not say."""
    return getattr(getattr(config, "vision_config", None), "spatial_merge_size", 0)


def _token_class(number: int) -> int:
    return max(power_of_two(-(-number // 3)) * 3, _SMALLEST_TOKENS)


def _token(config: Any, name: str) -> int | None:
    return next((found for n in _TOKENS[name] if isinstance(found := getattr(config, n, None), int)), None)
