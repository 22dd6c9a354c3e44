"""Images of many sizes in prompts: few programs, and what transformers writes."""

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from prompts_with_images import GREEDY, agree, inputs_with_images, models
from transformers import vision_utils

import hfax
from hfax.generation.image_classes import image_padding
from hfax.matrix.case import draw_weights
from hfax.patches.images import _in_size_classes
from hfax.patches.masks import structure_of
from hfax.patches.packed_images import (
    PackedGrids,
    PackedSegments,
    _attention_seqlens,
    _cu_seqlens,
    _interpolation,
    _position_ids,
    _window_index,
)
from hfax.programs.buckets import Buckets

pytestmark = pytest.mark.filterwarnings("ignore")
_MODULE = types.SimpleNamespace(config=types.SimpleNamespace(model_type="", image_token_id=99))


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Glm4v", "PaddleOCRVL"])
def test_images_of_all_sizes_of_a_class_share_one_program(tmp_path: Path, name: str) -> None:
    plain, ours = models(tmp_path, name)
    sizes = [[(2, 3)], [(5, 4)], [(4, 2), (3, 3)], [(9, 9)]]
    for seed, row in enumerate(sizes):
        agree(plain, ours, inputs_with_images(plain.config, row, seed=seed))
    assert len(ours.parts.programs.made) == 2  # for prompts and for steps


def test_rows_with_several_images_and_without(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Qwen2_5_VL")
    agree(plain, ours, inputs_with_images(plain.config, [(6, 5), (2, 2)], [(3, 4)], []))


def test_padding_of_images_can_be_turned_off(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Qwen2VL")
    ours.pads_inputs = False
    for row in ([(2, 3)], [(5, 4)]):
        agree(plain, ours, inputs_with_images(plain.config, row))
    assert len(ours.parts.programs.made) == 3


def test_a_model_that_reads_grids_otherwise_has_a_program_for_each_mix(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Ernie4_5_VLMoe")
    for row in ([(2, 3)], [(5, 4)]):
        agree(plain, ours, inputs_with_images(plain.config, row))
    assert len(ours.parts.programs.made) > 2


def test_a_black_image_takes_no_part(tmp_path: Path) -> None:
    """Whatever its pixels are: no number of the model's answer depends on them."""
    _, ours = models(tmp_path, "Qwen2_5_VL")
    inputs = inputs_with_images(ours.config, [(5, 4)])
    number = len(inputs["pixel_values"])
    request = ours.read_request(inputs.pop("input_ids"), **inputs, **GREEDY)
    loop, arrays = ours.open_loop(request)
    patches = np.asarray(arrays["pixel_values"])
    assert len(patches) > number
    logits = []
    for fill in (0.0, 100.0):
        changed = np.concatenate([np.full_like(patches[:-number], fill), patches[-number:]])
        logits.append(loop.record(loop.start({**arrays, "pixel_values": changed}), "logits"))
    assert np.isfinite(logits[0]).all()
    np.testing.assert_array_equal(*logits)


def test_a_hundred_sizes_have_at_most_eight_programs() -> None:
    """Each side of 100 to 1,500 pixels, as Qwen2.5-VL's processor makes them into grids, with the same question."""
    rng = np.random.default_rng(0)
    found = set()
    for rows, columns in np.maximum(rng.integers(100, 1500, (100, 2)) // 28, 4):
        ids = np.asarray([[1, 2, 3, *[99] * (rows * columns), *range(4, 34)]], np.int32)
        grid = np.asarray([(1, rows * 2, columns * 2)], np.int32)
        arrays = {"pixel_values": np.zeros((int(grid.prod()), 1), np.float32), "image_grid_thw": grid}
        padding = image_padding(_MODULE, ids, arrays)
        assert padding is not None
        assert padding.arrays["image_grid_thw"].prod(1).sum() == len(padding.arrays["pixel_values"])
        assert len(padding.tokens) + rows * columns == len(padding.arrays["pixel_values"]) // 4
        shapes = (padding.arrays["pixel_values"].shape, padding.arrays["image_grid_thw"].shape)
        found.add((shapes, Buckets().prompt(1, ids.shape[1] + len(padding.tokens))))
    assert len(found) <= 8


@pytest.mark.parametrize("tokens", [3, 11])
def test_prompts_whose_tokens_are_not_their_features_are_left_to_the_model(tokens: int) -> None:
    ids = np.asarray([[1, *[99] * tokens, 2]], np.int32)
    arrays = {"pixel_values": np.zeros((16, 4), np.float32), "image_grid_thw": np.asarray([(1, 4, 4)], np.int32)}
    assert image_padding(_MODULE, ids, arrays) is None


def test_padding_has_to_fit_the_sizes_that_are_made() -> None:
    made = Buckets(made=((1, 64, 200), (1, 128, 200)), most_padding=70)
    assert made.have_room(1, 60, 60)
    assert not made.have_room(1, 60, 69)  # longer than any
    assert not made.have_room(1, 50, 20)  # 78 tokens of padding
    assert Buckets().have_room(1, 60, 1000)
    assert not Buckets().have_room(1, 60, 1000, 1023)


def test_layers_outputs_of_prompts_with_images(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Qwen2_5_VL")
    inputs = inputs_with_images(plain.config, [(5, 4)], [(3, 3), (2, 2)], seed=3)
    options = {**GREEDY, "output_hidden_states": True}
    expected, found = plain.generate(**inputs, **options), ours.generate(**inputs, **options)
    assert found.sequences.tolist() == expected.sequences.tolist()
    masks = [inputs["attention_mask"].bool(), *[torch.ones(2, 1, dtype=torch.bool)] * 3]
    for theirs, own, mask in zip(expected.hidden_states, found.hidden_states, masks, strict=True):
        for wanted, layer in zip(theirs, own, strict=True):
            assert (torch.as_tensor(np.asarray(layer)) - wanted)[mask].abs().max() < 1e-4 * wanted.abs().max()


# ---------------------------------------------------------------------------- pixels of any height and width (Idefics 2)


def test_a_hundred_sizes_of_pixels_have_at_most_eight() -> None:
    rng = np.random.default_rng(0)
    vision = types.SimpleNamespace(image_size=980, patch_size=14)
    module = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=vision))
    process = transformers.Idefics2ImageProcessorPil()
    found = set()
    for height, width in rng.integers(100, 1500, (100, 2)):
        pixels = process([Image.fromarray(np.zeros((height, width, 3), np.uint8))], return_tensors="np")
        padded = _in_size_classes(module, dict(pixels))
        size = pixels["pixel_values"].shape[-2:]
        assert padded["pixel_attention_mask"].sum() == size[0] * size[1]
        assert padded["pixel_attention_mask"][..., : size[0], : size[1]].all()
        found.add(padded["pixel_values"].shape)
    assert len(found) <= 8


def test_padded_pixels_change_nothing(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Idefics2")
    vision, latents = plain.config.vision_config, plain.config.perceiver_config.resampler_n_latents
    side = vision.image_size
    ids = torch.tensor([[7, 8, *[plain.config.image_token_id] * latents, 11, 12]])
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    generator = torch.Generator().manual_seed(0)
    for height, width in ((side, side // 2 + 3), (side, side // 2 + 9), (side // 3, side // 3 + 5)):
        pixels = torch.randn((1, 1, 3, height, width), generator=generator)
        mask = torch.ones((1, 1, height, width), dtype=torch.long)
        for images in ({"pixel_values": pixels}, {"pixel_values": pixels, "pixel_attention_mask": mask}):
            agree(plain, ours, {**text, **images})
            with torch.no_grad():
                expected = plain(**text, **images).logits
            assert (ours(**text, **images).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    assert len(ours.parts.programs.made) == 5  # of two sizes, for prompts and forward passes, and one for steps


def test_images_of_any_shape_share_a_program_of_siglip_2(tmp_path: Path) -> None:
    config: Any = hfax.shrink_config(transformers.Siglip2Config())
    plain = transformers.Siglip2Model(config).eval()
    draw_weights(plain)
    plain.save_pretrained(tmp_path)
    ours = hfax.AutoModelForTPU.from_pretrained(tmp_path)
    width, most = 3 * config.vision_config.patch_size**2, 24
    generator = torch.Generator().manual_seed(0)
    for shapes in ([(4, 6), (2, 3)], [(3, 8), (5, 4)], [(1, 24), (7, 1)]):
        mask = torch.tensor([[1] * (h * w) + [0] * (most - h * w) for h, w in shapes])
        inputs = {
            "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]),
            "pixel_values": torch.randn((2, most, width), generator=generator) * mask[..., None],
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor(shapes),
        }
        with torch.no_grad():
            expected = plain(**inputs)
        found = ours(**inputs)
        for name in ("image_embeds", "text_embeds", "logits_per_image"):
            wanted = expected[name]
            assert (found[name] - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert len(ours.parts.programs.made) == 1


def test_sizes_of_images_in_tiles_share_programs(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "LlavaNext")
    side = plain.config.vision_config.image_size
    plain.config.image_grid_pinpoints = ours.config.image_grid_pinpoints = [[side, 2 * side], [2 * side, side]]
    process = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=plain.config.image_grid_pinpoints,
    )
    rng = np.random.default_rng(0)
    for sizes in ([(40, 70)], [(33, 90)], [(80, 20)], [(50, 60), (90, 31)]):
        pictures = [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
        images = process(pictures, return_tensors="pt")
        with torch.no_grad():
            counts = [len(features) for features in plain.get_image_features(**images).pooler_output]
        texts = [[7, 8, *[plain.config.image_token_id] * number, 11] for number in counts]
        length = max(map(len, texts))
        ids = torch.tensor([[0] * (length - len(text)) + text for text in texts])
        agree(plain, ours, {"input_ids": ids, "attention_mask": (ids != 0).long(), **images})
    assert len(ours.parts.programs.made) == 4  # with one row and with two, for prompts and for steps


@pytest.mark.parametrize("name", ["InternVL", "AyaVision"])
def test_numbers_of_tiles_share_programs(tmp_path: Path, name: str) -> None:
    plain, ours = models(tmp_path, name)
    side = plain.config.vision_config.image_size
    side = side[0] if isinstance(side, (list, tuple)) else side
    generator = torch.Generator().manual_seed(0)
    for rows in ((5,), (6,), (2, 4)):
        pixels = torch.randn((sum(rows), 3, side, side), generator=generator)
        with torch.no_grad():
            each = sum(f.shape[-2] for f in plain.get_image_features(pixels[:1]).pooler_output)
        texts = [[7, 8, *[plain.config.image_token_id] * (each * number), 11] for number in rows]
        length = max(map(len, texts))
        ids = torch.tensor([[0] * (length - len(text)) + text for text in texts])
        agree(plain, ours, {"input_ids": ids, "attention_mask": (ids != 0).long(), "pixel_values": pixels})
    assert len(ours.parts.programs.made) == 4  # with one row and with two, for prompts and for steps


# ------------------------------------------------------------------------------------- what programs compute from grids


def _random_grids(rng: np.random.Generator, merge: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(1, 9, (rng.integers(1, 5), 3)) * [1, merge, merge])


def _packed(grids: torch.Tensor) -> PackedGrids:
    return PackedGrids(torch.nn.functional.pad(grids, (0, 0, 0, 3)).int(), grids.prod(1).sum()[None])


def _ids_of(cumulative: torch.Tensor) -> list[int]:
    lengths = (cumulative[1:] - cumulative[:-1]).tolist()
    return [i for i, length in enumerate(lengths) for _ in range(length)]


def _same_segments(packed: PackedSegments, cumulative: torch.Tensor) -> None:
    segments = structure_of(packed.mask()).segments
    assert segments is not None
    _, found = np.unique(segments.ids.numpy(), return_inverse=True)
    assert found.tolist() == _ids_of(cumulative)  # in order: the tokens of a segment follow each other
    assert (cumulative[1:] - cumulative[:-1]).max() <= segments.longest


@pytest.mark.parametrize("seed", range(8))
def test_positions_and_segments_are_those_of_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    merge = int(rng.integers(1, 4))
    grids = _random_grids(rng, merge)
    for temporal in (False, True):
        expected = vision_utils.get_vision_position_ids(grids, merge, include_temporal=temporal)
        assert torch.equal(_position_ids(_packed(grids), merge, include_temporal=temporal), expected)
        cumulative = vision_utils.get_vision_cu_seqlens(grids, merge_temporal=temporal)
        _same_segments(_cu_seqlens(_packed(grids), merge_temporal=temporal), cumulative)
        segments, longest = _attention_seqlens(_packed(grids), None, merge_temporal=temporal)
        _same_segments(segments, cumulative)
        assert longest == len(segments)


@pytest.mark.parametrize("seed", range(8))
def test_windows_are_those_of_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    grids = _random_grids(rng, 2)
    given = {"spatial_merge_size": 2, "window_size": int(rng.integers(1, 5)) * 28, "patch_size": 14}
    index, cumulative = vision_utils.get_vision_window_index(grids, **given)
    found, segments = _window_index(_packed(grids), **given)
    assert torch.equal(found, index)
    _same_segments(segments, cumulative)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("seed", range(4))
def test_interpolation_is_that_of_transformers(seed: int, mode: str) -> None:
    rng = np.random.default_rng(seed)
    merge = int(rng.integers(1, 3))
    grids = _random_grids(rng, merge)
    given = {"mode": mode, "align_corners": bool(seed % 2), "spatial_merge_size": merge}
    expected = vision_utils.get_vision_interpolation_indices_and_weights(grids, 7, **given)
    for found, wanted in zip(_interpolation(_packed(grids), 7, **given), expected, strict=True):
        assert torch.equal(found, wanted)
