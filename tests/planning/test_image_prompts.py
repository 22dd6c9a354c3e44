"""Prompts with images of plans are those of `generate`."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from prompts_with_images import inputs_with_images, models

import hfax
from hfax.cli.app import run
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.matrix.case import draw_weights
from hfax.planning.image_prompts import image_prompt
from hfax.planning.plan import make_plans
from hfax.tracing.abstract import open_skeleton, without_weights


def planned(config, **options):
    return image_prompt(*without_weights(open_skeleton(config)), **options)


def shapes_of(arrays):
    return {name: (array.shape, np.dtype(array.dtype)) for name, array in arrays.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "rows"),
    [("Qwen2VL", 1), ("Qwen2_5_VL", 2), ("Qwen3VL", 1), ("Glm4v", 1), ("PaddleOCRVL", 1), ("Ernie4_5_VLMoe", 1)],
)
def test_packed_patches(tmp_path: Path, name: str, rows: int) -> None:
    _, ours = models(tmp_path, name)
    inputs = inputs_with_images(ours.config, *[[(5, 4)]] * rows)
    ids = inputs.pop("input_ids")
    arrays = {name: ours._host_array(name, value) for name, value in inputs.items()}
    prompts = ours._prompts(ids, arrays, ours.generation_config)
    vision = ours.config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    # as the processor does, pixels are rounded to whole tokens
    options = {"batch": rows, "length": prompts.padded_length, "size": (5 * side + 3, 4 * side - 3)}
    shapes, static = planned(ours.config, **options)
    assert shapes_of(shapes) == shapes_of(prompts.inputs)
    assert {n: v.array.tolist() for n, v in static.items()} == {n: v.array.tolist() for n, v in prompts.static.items()}
    assert bool(static) == (name == "Ernie4_5_VLMoe")  # whose sizes are constants of programs


@pytest.mark.filterwarnings("ignore")
def test_whole_images_of_one_size(tmp_path: Path) -> None:
    config = hfax.shrink_config(transformers.LlavaConfig())
    plain = transformers.LlavaForConditionalGeneration(config).eval()
    draw_weights(plain)
    plain.save_pretrained(tmp_path)
    ours = hfax.AutoModelForTPU.from_pretrained(tmp_path)
    side = config.vision_config.image_size
    shapes, static = planned(config, batch=1, length=64, size=(side, side))
    assert static == {}
    count = (
        plain.get_image_features(pixel_values=torch.zeros(1, 3, side, side), return_dict=True).pooler_output[0].shape[0]
    )
    ids = torch.tensor([[7, *[config.image_token_id] * count, 8]])
    arrays = {"pixel_values": ours._host_array("pixel_values", torch.zeros(1, 3, side, side))}
    prompts = ours._prompts(ids, arrays, ours.generation_config)
    given = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in prompts.inputs.items() if name == "pixel_values"
    }
    assert shapes_of(given) == shapes_of({"pixel_values": shapes["pixel_values"]})
    with pytest.raises(InvalidInputError, match=f"reads all images as {side} x {side}"):
        planned(config, batch=1, length=64, size=(side + 1, side))


def test_what_cannot_be_planned() -> None:
    text = hfax.shrink_config(transformers.LlamaConfig())
    with pytest.raises(UnsupportedOptionError, match="LlamaForCausalLM takes no images"):
        planned(text, batch=1, length=64, size=(64, 64))
    with pytest.raises(UnsupportedOptionError, match="without compiling"):
        list(make_plans("llama", text, ["h100:1"], context=64, image_size=(64, 64), compiles=False))
    tiles = hfax.shrink_config(transformers.LlavaNextConfig())
    with pytest.raises(UnsupportedOptionError, match=r"It takes pixel_values, image_sizes\."):
        planned(tiles, batch=1, length=64, size=(64, 64))
    packed = hfax.shrink_config(transformers.Qwen2VLConfig())
    with pytest.raises(InvalidInputError, match=r"does not fit a prompt of 64 tokens[\s\S]*at least \d+ tokens"):
        planned(packed, batch=1, length=64, size=(2000, 2000))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--image-size", "1024"], "--image-size '1024' is not the size of an image."),
        (["--image-size", "0x64"], "--image-size '0x64' is not the size of an image."),
        (["--image-size", "64x64", "--train", "full"], "Fine-tuning cannot be planned with images."),
        (["--image-size", "64x64", "--no-compile"], "Prompts with images cannot be planned without compiling."),
        (["--image-size", "64x64"], "LlamaForCausalLM takes no images."),
    ],
    ids=str,
)
def test_the_option(tmp_path: Path, capfd, options: list[str], said: str) -> None:
    config = hfax.shrink_config(transformers.LlamaConfig(architectures=["LlamaForCausalLM"]))
    config.save_pretrained(tmp_path)
    assert run(["plan", str(tmp_path / "config.json"), "--machines", "cpu:1", "--context", "64", *options]) == 1
    assert said in " ".join(capfd.readouterr().err.split())
