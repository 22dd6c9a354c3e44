"""Prompts with images through the engine, in slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import hfax
from hfax import Engine, EngineConfig, SamplingParams
from hfax.errors import InvalidInputError
from hfax.matrix.case import draw_weights

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    plain = transformers.Qwen2VLForConditionalGeneration(hfax.shrink_config(transformers.Qwen2VLConfig())).eval()
    draw_weights(plain)
    folder = tmp_path_factory.mktemp("qwen")
    plain.save_pretrained(folder)
    return plain, hfax.AutoModelForTPU.from_pretrained(folder)


def with_image(config, height: int, width: int, seed: int) -> tuple[list[int], dict]:
    """A prompt with a picture, and what the processor makes of it."""
    vision = config.vision_config
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        size={"shortest_edge": 56 * 56, "longest_edge": 140 * 140},
    )
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    found = processor([Image.fromarray(pixels)], return_tensors="pt")
    count = int(found["image_grid_thw"].prod() // vision.spatial_merge_size**2)
    ids = [7, 8, 9, *[config.image_token_id] * count, 11, 12]
    types = (torch.tensor([ids]) == config.image_token_id).long()
    return ids, {"mm_token_type_ids": types, **found}


def test_images_and_texts_side_by_side_write_what_transformers_writes(qwen):
    plain, ours = qwen
    prompts = [
        with_image(plain.config, 56, 56, 1),
        ([5, 6, 7, 8], {}),
        with_image(plain.config, 56, 112, 2),
        ([9, 10], {}),
    ]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for ids, inputs in prompts:
        given = torch.tensor([ids])
        written = plain.generate(input_ids=given, attention_mask=torch.ones_like(given), **inputs, **options)
        expected.append(written[0, len(ids) :].tolist())
    with Engine(ours, config=EngineConfig(max_num_seqs=3, max_model_len=128)) as engine:
        assert not engine.is_paged
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        texts: list[list[int]] = [[] for _ in prompts]
        streams = [engine.stream(ids, params, inputs=inputs) for ids, inputs in prompts]
        for index, stream in enumerate(streams):
            for delta in stream:
                texts[index] += delta.token_ids
    assert texts == expected


def test_an_image_that_does_not_fit_its_prompt_fails_alone(qwen):
    _, ours = qwen
    ids, inputs = with_image(ours.config, 56, 56, 1)
    with Engine(ours, config=EngineConfig(max_num_seqs=3, max_model_len=128)) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=4)
        request = engine.submit([5, 6, 7], params)
        with pytest.raises(InvalidInputError):
            list(
                engine.stream(
                    [*ids[:3], *ids[4:]],
                    params,
                    inputs={**inputs, "mm_token_type_ids": inputs["mm_token_type_ids"][:, 1:]},
                )
            )
        assert engine.generate([5, 6, 7], params)[0].outputs[0].token_ids == request.output.outputs[0].token_ids
