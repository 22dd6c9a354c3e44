"""Models over four devices of torch_xla (SPMD) write what they write on one, split as JAX's backend splits them."""

import os

os.environ["CPU_NUM_DEVICES"] = "4"

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_models import random_model, save, tiny_llama_config

from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError, UnsupportedOptionError

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": tiny_llama_config(**SIZES, num_key_value_heads=4),
    "two_kv_heads": transformers.Qwen2Config(**SIZES, num_key_value_heads=2),
    "mixtral": transformers.MixtralConfig(**SIZES, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("sizes", [{"tensor": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_the_same_tokens(name: str, sizes: dict, tmp_path: Path) -> None:
    reference = random_model(CONFIGS[name], attn_implementation="eager")
    model = AutoModelForTPU.from_pretrained(save(tmp_path, reference), backend="torch_xla", parallelism=sizes)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 120, (2, 9)))
    given = {"max_new_tokens": 10, "do_sample": False}
    assert model.generate(ids, **given).tolist() == reference.generate(ids, **given).tolist()
    np.testing.assert_allclose(model(input_ids=ids).logits, reference(ids).logits.detach(), atol=2e-4)


def test_what_each_device_holds(tmp_path: Path) -> None:
    save(tmp_path, random_model(CONFIGS["llama"]))
    model = AutoModelForTPU.from_pretrained(tmp_path, backend="torch_xla", parallelism={"tensor": 4})
    plan = model.sharding_plan()
    assert "model.layers.*.self_attn.q_proj.weight" in str(plan)
    import torch_xla

    expected = {
        "model.layers.0.self_attn.q_proj.weight": (16, 64),
        "model.layers.0.self_attn.o_proj.weight": (64, 16),
        "model.layers.0.mlp.down_proj.weight": (64, 32),
        "model.embed_tokens.weight": (32, 64),
        "model.norm.weight": (64,),
    }
    held = model.module.state_dict(keep_vars=True)
    for name, shape in expected.items():
        parts = plan.weights[name].shape
        split = [n // size for n, size in zip(parts, _parts(plan, name), strict=True)]
        assert tuple(split) == shape
        spec = torch_xla._XLAC._get_xla_sharding_spec(held[name])
        assert ("replicated" in spec) == (tuple(parts) == shape), (name, spec)
        shards = torch_xla._XLAC._get_local_shards([held[name]])[0]
        assert {tuple(shard.shape) for shard, *_ in shards} == {shape}


def _parts(plan: object, name: str) -> list[int]:
    from hfax.sharding.mesh import size_of

    return [size_of(plan.mesh, axes) for axes in plan.weights[name].spec]


def test_what_does_not_fit() -> None:
    config = CONFIGS["llama"]
    with pytest.raises(InvalidInputError, match="needs 8 devices; there are 4"):
        AutoModelForTPU.from_config(config, backend="torch_xla", parallelism={"tensor": 8})
    with pytest.raises(UnsupportedOptionError, match="2 of 4 devices"):
        AutoModelForTPU.from_config(config, backend="torch_xla", parallelism={"tensor": 2})
    with pytest.raises(UnsupportedOptionError, match="sizes by axis"):
        AutoModelForTPU.from_config(config, backend="torch_xla", parallelism={"*.weight": ("tensor",)})
