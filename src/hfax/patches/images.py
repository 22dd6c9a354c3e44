"""Replacements for image and video code with data-dependent shapes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hfax.patches.control_flow import note_check
from hfax.patches.patch import ForwardPatch, FunctionPatch, InputPatch, Patch

_WITH_PADDING_IMAGES = {
    "Idefics2Model": "idefics2.modeling_idefics2",
    "Idefics3Model": "idefics3.modeling_idefics3",
    "SmolVLMModel": "smolvlm.modeling_smolvlm",
    "ModernVBertModel": "modernvbert.modeling_modernvbert",
    "UltraVBertModel": "ultravbert.modeling_ultravbert",
}
"""Class names mapped to their transformers modules."""


def _without_padding_images(module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Pixels of only the real images, [rows, images, channels, height, width]; a single row if rows differ in image count.

    Padding images are all zeros.
    """
    pixels, mask = inputs.get("pixel_values"), inputs.get("pixel_attention_mask")
    if pixels is None or pixels.ndim != 5:
        return inputs
    pixels = np.asarray(pixels)
    is_real = pixels.reshape(*pixels.shape[:2], -1).any(axis=-1)
    if is_real.all():
        return inputs
    counts = is_real.sum(axis=1)
    rows = len(pixels) if (counts == counts[0]).all() else 1

    def keep(array: Any) -> np.ndarray:
        kept = np.asarray(array)[is_real]
        return kept.reshape(rows, -1, *kept.shape[1:])

    found = {**inputs, "pixel_values": keep(pixels)}
    return found if mask is None else {**found, "pixel_attention_mask": keep(mask)}


def _in_size_classes(module: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Pixels, [rows, images, channels, height, width], with sides of full length or squares, and a mask of those that are real.

    Sides are padded to quarters of the full length.
    """
    pixels, mask = inputs.get("pixel_values"), inputs.get("pixel_attention_mask")
    if pixels is None or pixels.ndim != 5:
        return inputs
    vision, sizes = module.config.vision_config, pixels.shape[-2:]
    most = vision.image_size // vision.patch_size
    quarters = [-(-4 * size // (vision.patch_size * most)) for size in sizes]
    quarters = quarters if max(quarters) >= 4 else [max(quarters)] * 2
    padded = [vision.patch_size * -(-number * most // 4) for number in quarters]
    widths = [(0, to - size) for size, to in zip(sizes, padded, strict=True)]
    if not any(after for _, after in widths):
        return inputs
    mask = np.ones((*pixels.shape[:2], *sizes), np.int32) if mask is None else np.asarray(mask)
    return {
        **inputs,
        "pixel_values": np.pad(np.asarray(pixels), [(0, 0)] * 3 + widths),
        "pixel_attention_mask": np.pad(mask, [(0, 0)] * 2 + widths),
    }


def _all_images(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def features(pixel_values: Any, pixel_attention_mask: Any = None, **kwargs: Any) -> Any:
        pixels = pixel_values.flatten(0, 1).to(module.dtype)
        if pixel_attention_mask is None:
            mask = torch.ones((len(pixels), *pixels.shape[2:]), dtype=torch.bool, device=pixels.device)
        else:
            mask = pixel_attention_mask.flatten(0, 1)
        patch = module.config.vision_config.patch_size
        subgrid = mask.unfold(1, patch, patch).unfold(2, patch, patch).sum(dim=(-1, -2))
        is_whole = type(module).__name__ == "Idefics2Model"  # the others count partially real patches
        patches = subgrid == patch * patch if is_whole else subgrid > 0
        outputs = module.vision_model(pixel_values=pixels, patch_attention_mask=patches, return_dict=True)
        arguments = {"attention_mask": patches.flatten(1)} if is_whole else {}
        features = module.connector(outputs.last_hidden_state, **arguments)
        outputs.pooler_output = list(features.reshape(len(pixel_values), -1, features.shape[-1]))
        return outputs

    return features


def _decode_by_language_model(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(pixel_values: Any = None, **kwargs: Any) -> Any:
        if pixel_values is not None:
            return original(pixel_values, **kwargs)
        return (module.language_model if hasattr(module, "language_model") else module.text_model)(**kwargs)

    return forward


def _placeholders(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def get(input_ids: Any = None, inputs_embeds: Any = None, image_features: Any = None, **kwargs: Any) -> Any:
        if input_ids is None or image_features is None:
            return original(input_ids, inputs_embeds, image_features, **kwargs)
        mask = (input_ids == module.config.image_token_id).unsqueeze(-1).expand_as(inputs_embeds)
        note_check(mask.sum() == image_features.numel(), "image tokens and image features must be as many")
        return mask

    return get


def _patches_without_text_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def combine(
        image_embeddings: Any,
        inputs_embeds: Any,
        bbox: Any,
        visual_bbox: Any,
        attention_mask: Any = None,
        num_patches: int = 14,
        max_len: int = 0,
        image_size: int = 224,
        patch_size: int = 16,
    ) -> tuple[Any, Any, Any]:
        """UDOP's text with the patches under its words added, then the other patches, then zeros: static in length.

        Returns embeddings [batch, length, width], boxes [batch, length, 4], and a mask [batch, length] or None.
        """
        rows, count, width = image_embeddings.shape
        centers = (bbox[..., :2] + bbox[..., 2:]) / 2.0
        column, row = torch.clip(torch.floor(centers * num_patches).long(), 0, num_patches - 1).unbind(-1)
        under = column + row * num_patches
        mean = bbox.float().mean(-1)
        beneath = image_embeddings.gather(1, under[..., None].expand(-1, -1, width))
        inputs_embeds = inputs_embeds + beneath.masked_fill(((mean == 0.0) | (mean == 1.0))[..., None], 0.0)

        is_free = torch.ones_like(image_embeddings[..., 0], dtype=torch.bool).scatter(1, under, False)
        if visual_bbox is None:
            from transformers.models.udop.modeling_udop import get_visual_bbox

            visual_bbox = get_visual_bbox(image_size=image_size, patch_size=patch_size)
            visual_bbox = visual_bbox[None].expand(rows, -1, -1).to(image_embeddings.device)
        length = count if max_len == 0 else max_len - inputs_embeds.shape[1]
        order = torch.argsort((~is_free).int(), dim=1, stable=True)
        is_kept = torch.arange(count, device=order.device) < is_free.sum(1, keepdim=True)

        def free_first(values: Any) -> Any:
            found = values.gather(1, order[..., None].expand(-1, -1, values.shape[-1]))
            found = found.masked_fill(~is_kept[..., None], 0)[:, :length]
            return torch.nn.functional.pad(found, (0, 0, 0, length - found.shape[1]))

        embeddings = torch.cat([inputs_embeds, free_first(image_embeddings)], 1)
        boxes = torch.cat([bbox.float(), free_first(visual_bbox.to(image_embeddings.dtype).float())], 1)
        if attention_mask is not None:
            padded = torch.nn.functional.pad(is_kept[:, :length], (0, length - min(count, length)))
            attention_mask = torch.cat([attention_mask, padded.to(attention_mask.dtype)], 1)
        return embeddings, boxes, attention_mask

    return combine


def _without_positions(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def features(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return features


def _images_once(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        features = ("pixel_values", "image_encoder_embeddings", "perceiver_embeddings")
        kept = module.__dict__.get("image_features")
        if kept is not None and all(given.get(name) is None for name in features):
            given["image_encoder_embeddings"] = kept
        outputs = original(**given)
        read = outputs.image_outputs.last_hidden_state  # [rows * images, places, width]
        module.image_features = read.reshape(-1, given["image_attention_mask"].shape[-1], *read.shape[1:])
        return outputs

    return forward


PATCHES: list[Patch] = [
    ForwardPatch(
        name="images-once",
        why="IDEFICS attends to the images' features at every step; transformers' generate hands them on from the first one",
        classes=("transformers.models.idefics.modeling_idefics:IdeficsModel",),
        make=_images_once,
    ),
    ForwardPatch(
        name="positions-of-text-alone",
        why="InstructBLIP's model of videos passes the text's positions to its Q-Former, too",
        classes=("InstructBlipVideoForConditionalGeneration",),
        method="get_video_features",
        make=_without_positions,
    ),
    ForwardPatch(
        name="placeholders-counted-later",
        why="HunYuan VL raises if image tokens and features differ in number, by looking; the program gives the condition back",
        classes=("HunYuanVLModel",),
        method="get_placeholder_mask",
        make=_placeholders,
    ),
    ForwardPatch(
        name="decoding-without-pixels",
        why="the forward wants pixels at every step; the class's own generate runs the language model alone after the prompt",
        classes=(
            "Blip2ForConditionalGeneration",
            "InstructBlipForConditionalGeneration",
            "InstructBlipVideoForConditionalGeneration",
            "Kosmos2ForConditionalGeneration",
        ),
        make=_decode_by_language_model,
    ),
    InputPatch(
        name="padding-images-dropped",
        why="the model drops images that are all zeros by looking at their pixels; here that is done before the trace",
        classes=tuple(_WITH_PADDING_IMAGES),
        prepare=_without_padding_images,
    ),
    InputPatch(
        name="pixels-in-size-classes",
        why="the sizes of images are axes of the pixels, so that nearly every image would be a program",
        classes=("Idefics2Model",),
        prepare=_in_size_classes,
    ),
    ForwardPatch(
        name="every-image-is-real",
        why="the model looks for images that are all zeros; the host has dropped them already",
        classes=tuple(f"transformers.models.{module}:{name}" for name, module in _WITH_PADDING_IMAGES.items()),
        method="get_image_features",
        make=_all_images,
    ),
    FunctionPatch(
        name="patches-without-text-first",
        why="UDOP drops the patches of an image that lie under words, whose number depends on the boxes",
        target="transformers.models.udop.modeling_udop:combine_image_text_embeddings",
        make=_patches_without_text_first,
        model_types=("udop",),
    ),
]
