"""Inputs that decide shapes: which they are, how they key programs, the positions that they give."""

import numpy as np
import pytest
import torch
import transformers

import hfax
from hfax.tracing.geometry import HostArray, forward_positions, is_geometry, keep_on_host


@pytest.mark.parametrize(
    "name",
    [
        *("image_grid_thw", "video_grid_thw", "image_sizes", "spatial_shapes", "pixel_attention_mask", "target_sizes"),
        *("audio_feature_lengths", "feature_attention_mask", "image_num_crops", "grid_thw", "image_position_ids"),
    ],
)
def test_what_decides_shapes_stays_on_the_host(name: str) -> None:
    assert is_geometry(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "input_ids",
            "attention_mask",
            "position_ids",
            "pixel_values",
            "pixel_values_videos",
            "input_features",
            "labels",
        ),
        *("token_type_ids", "decoder_input_ids", "inputs_embeds", "high_res_pixel_values", "input_values", "bbox"),
    ],
)
def test_what_does_not_is_traced(name: str) -> None:
    assert not is_geometry(name)


def test_a_host_array_is_known_by_its_values() -> None:
    one, same, other = (HostArray(np.array(v)) for v in ([[1, 2]], [[1, 2]], [[1, 3]]))
    assert (one == same, hash(one) == hash(same), repr(one) == repr(same)) == (True, True, True)
    assert one != other
    assert one.to_torch().dtype == torch.int64
    kept = keep_on_host({"image_grid_thw": np.array([[1, 4, 4]]), "input_ids": np.array([[1]])})
    assert isinstance(kept["image_grid_thw"], HostArray)
    assert not isinstance(kept["input_ids"], HostArray)


def test_positions_of_an_image_are_those_of_transformers() -> None:
    config = hfax.shrink_config(transformers.Qwen2VLConfig())
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    token = config.image_token_id
    ids = torch.tensor([[5, 6, token, token, token, token, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == token).long()}
    grid = torch.tensor([[1, 4, 4]])
    expected, _ = model.model.get_rope_index(**inputs, image_grid_thw=grid)
    found = forward_positions(model, keep_on_host({**inputs, "image_grid_thw": grid}))
    assert found is not None
    np.testing.assert_array_equal(found, expected.numpy())
    assert forward_positions(model, inputs) is None
