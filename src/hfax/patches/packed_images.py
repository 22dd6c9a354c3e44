"""Images of all sizes in one program, with their grids as an argument.

Qwen2-VL and its descendants join the patches of all images, [patches, …], and describe each image by a grid: its frames, rows and
columns. transformers derives positions, segments of attention and windows from the grids on the host, in the functions of
`transformers.vision_utils`, so that every mix of sizes would be a program. Given `PackedGrids`, the same values are computed in the
program, by closed forms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel, vision_utils

from hfax.patches.masks import PACKED_NAME, MaskStructure, Segments
from hfax.patches.patch import ForwardPatch, FunctionPatch, Patch


class PackedSegments:
    """Attention within segments, in place of their cumulative lengths or of their lengths.

    Modelling code can only pass it on to attention.

    Args:
        segments: of the tokens.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self.is_used = False

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self._segments.ids)

    def __getitem__(self, index: slice) -> PackedSegments:
        """The beginnings or ends of the segments."""
        return self

    def __sub__(self, other: PackedSegments) -> PackedSegments:
        """The lengths of the segments."""
        return self

    def mask(self) -> torch.Tensor:
        """The tokens that each token attends to, [1, 1, tokens, tokens] bool, with its structure."""
        self.is_used, ids = True, self._segments.ids

        def block(queries: Any, keys: Any) -> Any:
            return (ids[queries][:, None] == ids[keys])[None, None]

        places = torch.arange(len(ids), device=ids.device)
        mask: Any = block(places, places)
        mask.mask_structure = MaskStructure(block=block, segments=self._segments)
        return mask


class PackedGrids:
    """The grids of packed images, as an argument of a program. Modelling code can pass them on and count all patches.

    Args:
        grids: frames, rows and columns of each image in patches, [images, 3] int; rows of zeros stand for no image.
        num_patches: the number of patches of all images, [1] int, with a value that can be read.

    Attributes:
        values: the grids as a tensor.
        segments: what attention was limited to so far.
    """

    def __init__(self, grids: torch.Tensor, num_patches: torch.Tensor) -> None:
        self.values, self._num_patches = grids, num_patches
        self.segments: list[PackedSegments] = []

    def prod(self, dim: int) -> torch.Tensor:
        """The patches of the images, which stand for one, [1] int."""
        if dim not in (-1, 1):
            raise TypeError(f"Grids of packed images have no product along axis {dim}.")
        return self._num_patches

    @property
    def num_patches(self) -> int:
        """The number of patches of all images."""
        return int(self._num_patches[0])

    def places(self, merge: int = 1) -> Places:
        """The image, frame, row and column of each patch.

        Args:
            merge: side of the blocks of patches that follow each other.
        """
        return self._places(self.num_patches, self._known, merge)

    def merged_places(self, merge: int) -> Places:
        """The image, frame, row and column of each block of merged patches, whose grids are smaller by `merge`."""
        grids = self._known // torch.tensor([1, merge, merge], device=self.values.device)
        return self._places(self.num_patches // merge**2, grids, 1)

    def within(self, ids: torch.Tensor, longest: int | None = None) -> PackedSegments:
        """Attention within segments of these numbers, [patches] int, which follow each other.

        Args:
            ids: number of each patch's segment.
            longest: patches that a segment has at most; None: all.
        """
        found = PackedSegments(Segments(ids=ids, longest=longest or len(ids)))
        self.segments.append(found)
        return found

    @property
    def _known(self) -> torch.Tensor:
        """The grids with bounds, which keep their products within 32 bits."""
        return self.values.long().clamp(0, self.num_patches)

    def _places(self, count: int, grids: torch.Tensor, merge: int) -> Places:
        place = torch.arange(count, device=grids.device)
        frames, areas = grids[:, 0], (grids[:, 1] * grids[:, 2]).clamp(max=count)
        sizes = (frames * areas).clamp(max=count)
        ends = sizes.cumsum(0).clamp(max=count)
        image = (place[:, None] >= ends[None]).sum(1)
        rows, columns, area = grids[image, 1], grids[image, 2], areas[image]
        before = (ends - sizes)[image]
        frame, inside = (place - before) // area, (place - before) % area
        block, in_block = inside // merge**2, inside % merge**2
        return Places(
            image=image,
            frame=frame,
            frame_of_all=(frames.cumsum(0) - frames)[image] + frame,
            row=block // (columns // merge) * merge + in_block // merge,
            column=block % (columns // merge) * merge + in_block % merge,
            rows=rows,
            columns=columns,
            start=before + frame * area,
        )


class PackedFeatures:
    """The order of the features of images that are cut into tiles, in place of the images' sizes. They count as one image.

    Args:
        order: numbers of features among those of all tiles, followed by that of the end of a line, [tokens] int.
        num_tiles: the number of tiles of all images.
    """

    def __init__(self, order: torch.Tensor, num_tiles: int) -> None:
        self.order, self.num_tiles = order, num_tiles

    def __iter__(self) -> Iterator[PackedFeatures]:
        """The one image."""
        return iter((self,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Where each patch lies, [patches] int64 each.

    Args:
        image: number of its image.
        frame: number of its frame in the image.
        frame_of_all: number of its frame among the frames of all images.
        row: its row in the frame.
        column: its column in the frame.
        rows: rows of the frame.
        columns: columns of the frame.
        start: number of the frame's first patch.
    """

    image: torch.Tensor
    frame: torch.Tensor
    frame_of_all: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    start: torch.Tensor


def _position_ids(
    grids: PackedGrids, spatial_merge_size: int, include_temporal: bool = False, kwargs: Any = None
) -> torch.Tensor:
    places = grids.places(spatial_merge_size)
    return torch.stack([*([places.frame] if include_temporal else []), places.row, places.column], -1)


def _cu_seqlens(grids: PackedGrids, merge_temporal: bool = False, kwargs: Any = None) -> PackedSegments:
    places = grids.places()
    return grids.within(places.image if merge_temporal else places.frame_of_all)


def _attention_seqlens(
    grids: PackedGrids, config: Any, merge_temporal: bool = False, kwargs: Any = None
) -> tuple[PackedSegments, int]:
    return _cu_seqlens(grids, merge_temporal), grids.num_patches


def _max_seqlen(segments: PackedSegments, config: Any, kwargs: Any = None, kwarg_name: str = "max_seqlen") -> int:
    return len(segments)


def _window_index(
    grids: PackedGrids, spatial_merge_size: int, window_size: int, patch_size: int, kwargs: Any = None
) -> tuple[torch.Tensor, PackedSegments]:
    side = window_size // spatial_merge_size // patch_size
    places = grids.merged_places(spatial_merge_size)
    top, left = places.row // side * side, places.column // side * side
    height, width = (places.rows - top).clamp(max=side), (places.columns - left).clamp(max=side)
    first = places.start + top * places.columns + left * height  # where the window begins, in the order of windows
    place = first + (places.row - top) * width + places.column - left
    index = torch.zeros_like(place).scatter(0, place, torch.arange(len(place), device=place.device))
    ids = first[index].repeat_interleave(spatial_merge_size**2)
    return index, grids.within(ids, (side * spatial_merge_size) ** 2)


def _interpolation(
    grids: PackedGrids,
    num_grid_per_side: int,
    mode: str = "bilinear",
    align_corners: bool = False,
    spatial_merge_size: int = 1,
    padding: str = "border",
    kwargs: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    places = grids.places(spatial_merge_size)
    (row_taps, row_weights), (column_taps, column_weights) = (
        vision_utils._interpolation_axis_taps_weights(index, size, num_grid_per_side, mode, align_corners, padding)
        for index, size in ((places.row, places.rows), (places.column, places.columns))
    )
    indices = row_taps[:, :, None] * num_grid_per_side + column_taps[:, None, :]
    weights = row_weights[:, :, None] * column_weights[:, None, :]
    return indices.flatten(1), weights.flatten(1)


def _num_tiles(image_size: PackedFeatures, grid_pinpoints: Any, patch_size: int) -> int:
    return image_size.num_tiles


_COMPUTED: dict[str, Callable[..., Any]] = {
    "get_vision_position_ids": _position_ids,
    "get_vision_attention_seqlens": _attention_seqlens,
    "get_max_seqlen": _max_seqlen,
    "get_vision_window_index": _window_index,
    "get_vision_interpolation_indices_and_weights": _interpolation,
    "image_size_to_num_patches": _num_tiles,
}
"""Names of functions of transformers mapped to those for `PackedGrids`, `PackedSegments` and `PackedFeatures`."""


_PACKED = (PackedGrids, PackedSegments, PackedFeatures)


def _for_packed(compute: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else next(iter(kwargs.values()))
            return (compute if isinstance(first, _PACKED) else original)(*args, **kwargs)

        return function

    return make


def _features_in_order(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def pack(
        image_features: Any, image_sizes: Any, vision_feature_select_strategy: Any, image_newline: Any = None
    ) -> tuple[list[Any], Any]:
        if not isinstance(image_sizes, PackedFeatures):
            return original(image_features, image_sizes, vision_feature_select_strategy, image_newline)
        (features,), vision = image_features, module.config.vision_config
        if image_newline is None or features.shape[1] != (vision.image_size // vision.patch_size) ** 2:
            raise TypeError("The features of a tile are not those of its patches, or lines have no end.")
        found = torch.cat([features.flatten(0, 1), image_newline[None].to(features)])[image_sizes.order.long()]
        return [found], torch.tensor([len(found)])

    return pack


def _embeddings_by_image(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(embeddings: Any, lengths: Any, image_shapes: Any, h_coords: Any, w_coords: Any) -> Any:
        if isinstance(image_shapes, PackedGrids):
            lengths, image_shapes = image_shapes.values.prod(1), image_shapes.values
        return original(embeddings, lengths, image_shapes, h_coords, w_coords)

    return forward


def _projector_of_all_images(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(image_features: Any, image_grid_thw: Any) -> Any:
        if not isinstance(image_grid_thw, PackedGrids):
            return original(image_features, image_grid_thw)
        merge, _ = module.merge_kernel_size
        places = image_grid_thw.merged_places(merge)
        side = torch.arange(merge, device=image_features.device)
        rows = places.row[:, None, None] * merge + side[:, None]
        columns = places.column[:, None, None] * merge + side
        patch = places.start[:, None, None] * merge**2 + rows * places.columns[:, None, None] * merge + columns
        blocks = module.pre_norm(image_features)[patch.flatten(1)].flatten(1)
        return module.linear_2(module.act(module.linear_1(blocks)))

    return forward


@contextlib.contextmanager
def attending_within_segments(module: torch.nn.Module) -> Iterator[None]:
    """Within the block, parts of the model that take grids call hfax's attention, and pass it their segments.

    Modelling code passes segments to attention functions of a name with "flash", and splits its tokens for others.
    """
    parts = [part for part in module.modules() if isinstance(part, PreTrainedModel) and _takes_grids(part)]
    before = [(part.config, part.config._attn_implementation_internal) for part in parts]
    for config, _ in before:
        config._attn_implementation_internal = PACKED_NAME
    try:
        yield
    finally:
        for config, name in reversed(before):
            config._attn_implementation_internal = name


def _takes_grids(part: PreTrainedModel) -> bool:
    return "grid_thw" in inspect.signature(part.forward).parameters


PATCHES: list[Patch] = [
    FunctionPatch(
        name=f"packed-images-{name.removeprefix('get_').removeprefix('vision_').replace('_', '-')}",
        why="computed from the values of image grids or sizes, so that every mix of image sizes was a program",
        target=f"*:{name}",
        make=_for_packed(compute),
    )
    for name, compute in _COMPUTED.items()
]
PATCHES += [
    ForwardPatch(
        name="packed-images-features",
        why="LLaVA-NeXT cuts the padding of images off by their sizes, so that each size was a program",
        classes=(
            "transformers.models.llava_next.modeling_llava_next:LlavaNextModel",
            "transformers.models.llava_next_video.modeling_llava_next_video:LlavaNextVideoModel",
        ),
        method="pack_image_features",
        make=_features_in_order,
    ),
    ForwardPatch(
        name="packed-images-embeddings",
        why="GLM-4V's position embeddings look up the grid of each patch by the images' lengths",
        classes=("Glm4vVisionEmbeddings", "Glm4vMoeVisionEmbeddings", "GlmImageVisionEmbeddings"),
        make=_embeddings_by_image,
    ),
    ForwardPatch(
        name="packed-images-projector",
        why="PaddleOCR-VL's projector merges the patches of each image on its own, in a loop over the values of grids",
        classes=("PaddleOCRProjector",),
        make=_projector_of_all_images,
    ),
]
