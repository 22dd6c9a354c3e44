"""Forward calls and training steps with images of many sizes: few programs, and what transformers computes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from prompts_with_images import inputs_with_images, models

from hfax.errors import InvalidInputError
from hfax.train.step import make_train_step

pytestmark = pytest.mark.filterwarnings("ignore")
_SIZES = [[(2, 3)], [(4, 2), (3, 3)], [(5, 4)], [(9, 9)]]
"""Sizes of the images of a row, in merged patches: three classes of lengths, and two of images."""


def _on_the_right(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs with rows padded on the right, as for training."""
    counts = inputs["attention_mask"].sum(1).tolist()
    moved = {n: v for n, v in inputs.items() if n in ("input_ids", "attention_mask", "mm_token_type_ids")}
    rows = {n: torch.stack([row.roll(c) for row, c in zip(v, counts, strict=True)]) for n, v in moved.items()}
    return {**inputs, **rows}


def _inputs(config: Any, *rows: list[tuple[int, int]], seed: int = 0) -> dict[str, torch.Tensor]:
    inputs = _on_the_right(inputs_with_images(config, *rows, seed=seed))
    hidden = (inputs["attention_mask"] == 0) | (inputs["mm_token_type_ids"] == 1)
    return {**inputs, "labels": inputs["input_ids"].masked_fill(hidden, -100)}


def _to_length(array: torch.Tensor, length: int, name: str) -> torch.Tensor:
    """A text's inputs padded on the right."""
    if name in ("pixel_values", "image_grid_thw"):
        return array
    return torch.nn.functional.pad(array, (0, length - array.shape[1]), value=-100 if name == "labels" else 0)


def _agree(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert tuple(found.shape) == tuple(expected.shape)
        scale = expected.abs().max() if expected.numel() else 1
        assert (torch.as_tensor(np.asarray(found)) - expected).abs().max() <= 1e-4 * scale
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            _agree(ours, theirs)
    elif hasattr(expected, "items"):
        for name, value in expected.items():
            if name != "cache":
                _agree(found[name], value)


_OF_EACH_LENGTH = ("Qwen3_5", "Exaone4_5_")
"""Models that have a program for each length of text: layers go through it in chunks, or the cache that is returned holds it."""


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v", "PaddleOCRVL", *_OF_EACH_LENGTH])
def test_images_of_many_sizes_share_programs(tmp_path: Path, name: str) -> None:
    """All outputs, those of the part that reads images too, have the call's own sizes and values."""
    plain, ours = models(tmp_path, name)
    for seed, row in enumerate(_SIZES):
        inputs = _inputs(plain.config, row, seed=seed)
        with torch.no_grad():
            expected = plain(**inputs, output_hidden_states=True)
        _agree(ours(**inputs, output_hidden_states=True), expected)
    assert len(ours.parts.programs.made) == (4 if name in _OF_EACH_LENGTH else 3)
    assert len(ours.why_not_padded) == (name in _OF_EACH_LENGTH)


def test_rows_with_several_images_and_without(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Qwen3VL")
    for rows, programs in (
        ([[(6, 5), (2, 2)], [(3, 4)], []], 1),
        ([[(2, 2)], [], [(3, 4), (6, 5)]], 1),  # as many tokens of images as before
        ([[(2, 2)], [], [(3, 4), (4, 5)]], 2),
        ([[], [(3, 4), (5, 5)], [(6, 2)]], 2),
    ):
        inputs = _inputs(plain.config, *rows)
        with torch.no_grad():
            expected = plain(**inputs)
        _agree(ours(**inputs), expected)
        assert len(ours.parts.programs.made) == programs


def test_texts_padded_on_the_left_share_images_of_many_sizes(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Qwen2VL")
    for rows in ([[(3, 4)], [(2, 3), (2, 2)]], [[(2, 6)], [(1, 2), (2, 4)]]):
        inputs = inputs_with_images(plain.config, *rows)
        with torch.no_grad():
            expected = plain(**inputs)
        found, mask = ours(**inputs), inputs["attention_mask"].bool()
        assert (found.logits - expected.logits)[mask].abs().max() < 1e-4 * expected.logits.abs().max()
        _agree(found.image_outputs, expected.image_outputs)
    assert len(ours.parts.programs.made) == 1


def test_videos(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Qwen2VL")
    config = plain.config
    for frames, rows, columns in ((2, 4, 6), (3, 2, 4)):
        tokens = frames * rows * columns // 4
        ids = torch.tensor([[7, 8, *[config.video_token_id] * tokens, 11, 12]])
        pixels = torch.randn(4 * tokens, inputs_with_images(config, [(1, 1)])["pixel_values"].shape[1])
        inputs = {
            **{"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values_videos": pixels},
            **{"mm_token_type_ids": 2 * (ids == config.video_token_id)},
            **{"video_grid_thw": torch.tensor([[frames, rows, columns]])},
        }
        with torch.no_grad():
            expected = plain(**inputs)
        _agree(ours(**inputs), expected)
    assert len(ours.parts.programs.made) == 2  # the first number of tokens is a class of its own


def test_attention_weights_are_those_of_the_images_alone(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Qwen2VL")
    plain.set_attn_implementation("eager")
    inputs = _inputs(plain.config, [(2, 3)])
    with torch.no_grad():
        expected = plain(**inputs, output_attentions=True)
    found = ours(**inputs, output_attentions=True)
    _agree(found.attentions, expected.attentions)
    _agree(found.image_outputs.last_hidden_state, expected.image_outputs.last_hidden_state)


def test_outputs_without_names_have_the_sizes_of_the_call(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Qwen2VL")
    for size in ((2, 3), (3, 3)):
        inputs = _inputs(plain.config, [size])
        with torch.no_grad():
            expected = plain(**inputs, return_dict=False, use_cache=False)
        _agree(ours(**inputs, return_dict=False, use_cache=False), expected)


@pytest.mark.parametrize("number", [1, 3, 5, 13])
def test_other_tokens_than_features_are_the_models_own_error(tmp_path: Path, number: int) -> None:
    """Also as many as there would be with other blocks of patches."""
    plain, ours = models(tmp_path, "Qwen2VL")
    inputs, token = _inputs(plain.config, [(4, 3)]), plain.config.image_token_id
    assert (inputs["input_ids"] == token).sum() == 12
    inputs["input_ids"] = torch.where(inputs["input_ids"] == token, 20, inputs["input_ids"])
    inputs["input_ids"][0, 1 : 1 + number] = token
    with pytest.raises(InvalidInputError, match="get_placeholder_mask"):
        ours(**inputs)


def test_the_pure_function_takes_traced_grids(tmp_path: Path) -> None:
    plain, ours = models(tmp_path, "Qwen2_5_VL")
    traced = []

    @jax.jit
    def logits(params: Any, inputs: dict[str, jax.Array]) -> jax.Array:
        traced.append(1)
        return ours.apply(params, **inputs).logits

    for size in ((3, 4), (2, 6)):
        inputs = _inputs(plain.config, [size])
        with torch.no_grad():
            expected = plain(**inputs).logits
        prepared = ours.prepare_inputs({n: v.numpy() for n, v in inputs.items() if n != "labels"})
        grids = jnp.asarray(inputs["image_grid_thw"].numpy(), jnp.int32)
        _agree(logits(ours.params, {**prepared, "image_grid_thw": grids}), expected)
    assert len(traced) == 1


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v", "PaddleOCRVL"])
def test_training_on_images_of_many_sizes_has_two_programs(tmp_path: Path, name: str) -> None:
    plain, ours = models(tmp_path, name)
    plain.train()
    step = make_train_step(ours, optax.sgd(0.0), dropout=False)
    state = step.init()
    batches = (
        [[(3, 4)], [(2, 3), (2, 2)]],
        [[(2, 6)], [(1, 2), (2, 4)]],
        [[(2, 2)], [(5, 2)]],
        [[(2, 3)], [(1, 5), (5, 1)]],
    )
    for seed, rows in enumerate(batches):
        inputs = {n: _to_length(v, 24, n) for n, v in _inputs(plain.config, *rows, seed=seed).items()}
        plain.zero_grad()
        loss = plain.eval()(**inputs).loss
        loss.backward()
        trained = dict(plain.named_parameters())
        norm = torch.stack([p.grad.norm() for n, p in trained.items() if p.grad is not None]).norm()
        state, metrics = step(state, inputs)
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=1e-3)
    assert len(step._programs) == 2  # for the first number of tokens of images, and for all up to 96
