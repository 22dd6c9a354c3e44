"""Weights as other libraries store them, over virtual devices: groups and words stay whole, permuted columns are not split."""

import jax
import numpy as np
import pytest
import torch
import transformers
from packed_weights import packed_array, packed_tensor
from tiny_models import SIZES, random_model, save, tiny_llama_config

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


@pytest.mark.parametrize("sizes", [{"expert": 4}, {"tensor": 4}, {"fsdp": 2, "expert": 2}], ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_transposed_experts(tmp_path, sizes, quantization):
    """gpt-oss's matrices are [experts, in, out], and their codes [experts, out, in]; rows of 160 columns of 4 bits are padded."""
    shape = {**SIZES, "hidden_size": 160, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.GptOssConfig(**shape, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
    folder = save(tmp_path / "model", random_model(config))
    model = AutoModelForTPU.from_pretrained(folder, dtype="float32", quantization=quantization)
    expected = model(input_ids=IDS).logits
    split = AutoModelForTPU.from_pretrained(folder, dtype="float32", quantization=quantization, parallelism=sizes)
    saved = tmp_path / "saved"
    split.save_pretrained(saved, format="orbax")
    again = AutoModelForTPU.from_pretrained(saved, dtype="float32", parallelism=sizes)
    model.move_to(sizes)
    for each in (split, again, model):
        experts = each.params["model.layers.0.mlp.experts.gate_up_proj"]
        assert isinstance(experts, QuantizedArray)
        assert experts.spec == experts.values.sharding.spec
        assert experts.values.sharding.shard_shape(experts.values.shape) != experts.values.shape or "tensor" in sizes
        logits = each(input_ids=IDS).logits
        # on one device, activations are rounded to 16 bits
        np.testing.assert_allclose(logits, expected, atol=2e-3 * expected.abs().max().item())
        np.testing.assert_array_equal(logits, split(input_ids=IDS).logits)
