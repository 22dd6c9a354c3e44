"""Weights as other libraries store them, over virtual devices: groups and words stay whole, permuted columns are not split."""

import jax
import numpy as np
import pytest
import torch
from packed_weights import packed_array, packed_tensor
from tiny_models import tiny_llama_config

from hfax import AutoModelForTPU
from hfax.kernels.quantized import QuantizedArray

CONFIG = tiny_llama_config(
    vocab_size=96,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=8,
)
IDS = torch.tensor([[3, 17, 5, 40], [41, 9, 60, 22]])


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("form", [("int4", 32, "float16", True), ("fp8", 128, "float32", False)], ids=str)
def test_logits_are_those_of_one_device(form, permuted):
    model = AutoModelForTPU.from_config(CONFIG, dtype="float32")
    for name, array in model.params.items():
        if "proj" in name:
            model.params[name] = packed_array(packed_tensor(*form, tuple(array.shape), permuted=permuted))
    expected = model(input_ids=IDS).logits
    assert expected.isfinite().all()
    model.move_to({"tensor": 4})
    reads, makes = (model.params[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("down", "up"))
    assert isinstance(makes, QuantizedArray)
    assert makes.spec == makes.values.sharding.spec
    assert isinstance(reads, QuantizedArray) is not permuted  # its columns are split
    whole = model.params["model.layers.0.mlp.down_proj.weight"]
    for part in jax.tree.leaves(whole):
        assert part.sharding.shard_shape(part.shape)[-1] == part.shape[-1] // 4
    np.testing.assert_allclose(model(input_ids=IDS).logits, expected, atol=1e-4 * expected.abs().max().item())
