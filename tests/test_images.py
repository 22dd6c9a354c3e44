"""Images in prompts, through the public calls: pixels from transformers' own processors, and what does not fit together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import hfax
from hfax.errors import InvalidInputError, UnsupportedModelError
from hfax.generation import image_classes
from hfax.matrix.case import draw_weights
from hfax.patches.images import _without_padding_images

pytestmark = pytest.mark.filterwarnings("ignore")
_GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _pictures(*sizes: tuple[int, int]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (h, w, 3), dtype=np.uint8)) for h, w in sizes]


def _prompts(config: Any, counts: list[int]) -> dict[str, torch.Tensor]:
    """A row for each image, with as many of its tokens as it has features, padded on the left."""
    token = config.image_token_id
    rows = [[7, 8, 9, *[token] * count, 11, 12] for count in counts]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (length - len(r)) + [1] * len(r) for r in rows])
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == token).long()}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A small Qwen2-VL of plain transformers, and the same in hfax."""
    config = hfax.shrink_config(transformers.Qwen2VLConfig())
    plain = transformers.Qwen2VLForConditionalGeneration(config).eval()
    draw_weights(plain)
    folder: Path = tmp_path_factory.mktemp("qwen")
    plain.save_pretrained(folder)
    return plain, hfax.AutoModelForTPU.from_pretrained(folder)


def _qwen_inputs(model: Any, *sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    vision = model.config.vision_config
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        size={"shortest_edge": 56 * 56, "longest_edge": 140 * 140},
    )
    pixels = processor(_pictures(*sizes), return_tensors="pt")
    counts = (pixels["image_grid_thw"].prod(1) // vision.spatial_merge_size**2).tolist()
    return {**_prompts(model.config, counts), **pixels}


@pytest.mark.parametrize("sizes", [((56, 56), (56, 56)), ((56, 112), (84, 56))], ids=str)
def test_images_of_any_size_are_read_and_written_about(qwen: tuple[Any, Any], sizes: Any) -> None:
    plain, ours = qwen
    inputs = _qwen_inputs(plain, *sizes)
    with torch.no_grad():
        expected = plain(**inputs).logits
    found, real = ours(**inputs).logits, inputs["attention_mask"].bool()
    assert (found - expected)[real].abs().max() < 1e-4 * expected.abs().max()
    assert ours.generate(**inputs, **_GREEDY).tolist() == plain.generate(**inputs, **_GREEDY).tolist()


def test_a_prompt_alone_writes_what_it_writes_in_a_batch(qwen: tuple[Any, Any]) -> None:
    _, ours = qwen
    both = ours.generate(**_qwen_inputs(ours, (56, 112), (56, 56)), **_GREEDY)
    alone = ours.generate(**_qwen_inputs(ours, (56, 112)), **_GREEDY)
    assert both[0, -8:].tolist() == alone[0, -8:].tolist()


@pytest.mark.parametrize("says_what_it_merges", [True, False])
def test_too_few_image_tokens_are_an_error_that_names_the_check(
    qwen: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, says_what_it_merges: bool
) -> None:
    _, ours = qwen
    if not says_what_it_merges:
        monkeypatch.setattr(image_classes, "_merged", lambda config: 0)
    inputs = _qwen_inputs(ours, (56, 56))
    token = ours.config.image_token_id
    inputs["input_ids"] = torch.where(inputs["input_ids"] == token, 20, inputs["input_ids"])
    inputs["input_ids"][0, 4] = token
    with pytest.raises(InvalidInputError, match="are inconsistent"):
        ours(**inputs)
    with pytest.raises(InvalidInputError, match="are inconsistent"):
        ours.generate(**inputs, **_GREEDY)
    assert ours.generate(**_qwen_inputs(ours, (56, 56)), **_GREEDY).shape[1] > 8  # the model is none the worse


def test_padding_images_are_dropped_before_the_trace() -> None:
    pixels = np.ones((2, 2, 3, 4, 4), np.float32)
    pixels[0, 1] = 0
    mask = np.ones((2, 2, 4, 4), bool)
    inputs = {"pixel_values": pixels, "pixel_attention_mask": mask, "input_ids": np.zeros((2, 3))}
    found = _without_padding_images(None, inputs)
    assert found["pixel_values"].shape == (1, 3, 3, 4, 4)
    assert found["pixel_attention_mask"].shape == (1, 3, 4, 4)
    assert _without_padding_images(None, found) is found
    assert _without_padding_images(None, {"input_ids": np.zeros(1)}).keys() == {"input_ids"}


def test_what_every_step_would_read_again_is_refused_by_a_model_that_keeps_no_cache() -> None:
    model = hfax.AutoModelForTPU.from_config(hfax.shrink_config(transformers.OpenAIGPTConfig()))
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(UnsupportedModelError, match="does not take token_type_ids"):
        model.generate(ids, token_type_ids=ids, max_new_tokens=2)


def test_without_mask_and_token_types_a_prefix_is_as_bidirectional_as_in_transformers(tmp_path: Path) -> None:
    """transformers' mask depends on what is given; nothing of it may be decided by values that a trace does not see."""
    config = hfax.shrink_config(transformers.PaliGemmaConfig())
    plain = transformers.PaliGemmaForConditionalGeneration(config).eval()
    draw_weights(plain)
    plain.save_pretrained(tmp_path)
    ours = hfax.AutoModelForTPU.from_pretrained(tmp_path)
    size = config.vision_config.image_size
    pixels = torch.randn((1, 3, size, size), generator=torch.Generator().manual_seed(0))
    count = (size // config.vision_config.patch_size) ** 2
    ids = torch.tensor([[config.image_token_id] * count + [7, 8, 9, 10]])
    for extra in ({}, {"attention_mask": torch.ones_like(ids)}, {"token_type_ids": torch.zeros_like(ids)}):
        with torch.no_grad():
            expected = plain(input_ids=ids, pixel_values=pixels, **extra).logits
        found = ours(input_ids=ids, pixel_values=pixels, **extra).logits
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max(), extra.keys()


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen3VL"])
def test_a_video_in_a_prompt(tmp_path: Path, name: str) -> None:
    config: Any = hfax.shrink_config(getattr(transformers, f"{name}Config")())
    plain = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    draw_weights(plain)
    plain.save_pretrained(tmp_path)
    ours = hfax.AutoModelForTPU.from_pretrained(tmp_path)
    vision, token = config.vision_config, config.video_token_id
    merge, frames = vision.spatial_merge_size, 2
    grid = torch.tensor([[frames, 2 * merge, 2 * merge]])
    patches, values = int(grid.prod()), 3 * vision.temporal_patch_size * vision.patch_size**2
    frame = [token] * (patches // merge**2 // frames)
    if name == "Qwen3VL":  # each frame stands between marks, behind its time
        text = [9, config.vision_start_token_id, *frame, config.vision_end_token_id] * frames
    else:
        text = frame * frames
    ids = torch.tensor([[7, 8, *text, 10, 11]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == token).long() * 2,
        "pixel_values_videos": torch.randn((patches, values), generator=torch.Generator().manual_seed(0)),
        "video_grid_thw": grid,
    }
    with torch.no_grad():
        expected = plain(**inputs).logits
    assert (ours(**inputs).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert ours.generate(**inputs, **_GREEDY).tolist() == plain.generate(**inputs, **_GREEDY).tolist()
