"""Small models that read images, prompts with images of given sizes, and a comparison of what is written."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import hfax
from hfax.matrix.case import draw_weights

GREEDY: dict[str, Any] = {
    **{"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0},
    **{"return_dict_in_generate": True, "output_logits": True},
}
"""Options of a greedy `generate` that returns its logits."""


def models(folder: Path, name: str) -> tuple[Any, Any]:
    """A small model of plain transformers, and the same in hfax.

    Args:
        folder: where its checkpoint is written.
        name: of its class, before "ForConditionalGeneration".
    """
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    config = hfax.shrink_config(kind.config_class())
    if name == "InternVL":
        config.vision_config.image_size = [4 * size for size in config.vision_config.patch_size]
    plain = kind(config).eval()
    draw_weights(plain)
    plain.save_pretrained(folder)
    return plain, hfax.AutoModelForTPU.from_pretrained(folder)


def inputs_with_images(config: Any, *rows: list[tuple[int, int]], seed: int = 0) -> dict[str, torch.Tensor]:
    """A prompt for each row, with images of these sizes in merged patches, and as many tokens for each as it has."""
    vision, merge = config.vision_config, config.vision_config.spatial_merge_size
    texts = [[7, 8, *[t for h, w in row for t in (9, *[config.image_token_id] * (h * w))], 11, 12] for row in rows]
    length = max(map(len, texts))
    ids = torch.tensor([[0] * (length - len(text)) + text for text in texts])
    grid = torch.tensor([(1, h * merge, w * merge) for row in rows for h, w in row])
    channels = getattr(vision, "in_channels", getattr(vision, "num_channels", 3))
    shape = (channels, vision.patch_size, vision.patch_size)
    frames = getattr(vision, "temporal_patch_size", 1)
    shape = shape if vision.model_type.startswith("paddle") else (np.prod(shape) * frames,)
    pixels = torch.randn((int(grid.prod(1).sum()), *shape), generator=torch.Generator().manual_seed(seed))
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "mm_token_type_ids": (ids == config.image_token_id).long(),
        "pixel_values": pixels,
        "image_grid_thw": grid,
    }


def agree(plain: Any, ours: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Assert that both write the same tokens, with the same logits within 1e-4 of their scale."""
    expected, found = plain.generate(**inputs, **GREEDY), ours.generate(**inputs, **GREEDY)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for theirs, own in zip(expected.logits, found.logits, strict=True):
        assert (torch.as_tensor(np.asarray(own)) - theirs).abs().max() < 1e-4 * theirs.abs().max()
