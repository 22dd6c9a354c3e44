"""Meshes, plans of weights, what each device holds and reads, and the communication of the compiled programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tiny_models import tiny_llama_config

import hfax
from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError
from hfax.kernels.target import compiling_for
from hfax.load import safetensors_file
from hfax.parallelism import plan_over
from hfax.sharding.mesh import make_mesh
from hfax.tracing.abstract import open_skeleton

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
LLAMA = tiny_llama_config(**SIZES)
IDS = np.arange(3, 15)[None]


def decode_text(model, batch=1, capacity=64):
    """The compiled text of a decoding step."""
    ids = jnp.asarray(np.repeat(IDS, batch, axis=0), jnp.int32)
    mask = jnp.ones_like(ids)
    traced = model._traced
    with compiling_for("cpu", mesh=model.mesh):
        prefill = jax.jit(lambda p, i, m: traced.prefill(p, {"input_ids": i, "attention_mask": m}, {}, capacity))
        _, cache = prefill(model.params, ids, mask)

    def step(params, cache, token):
        with compiling_for("cpu", mesh=model.mesh):
            return traced.decode_step(
                params,
                cache,
                token,
                length=jnp.int32(12),
                positions=jnp.full((batch,), 12, jnp.int32),
                attention_mask=jnp.ones((batch, capacity), jnp.int32),
                capacity=capacity,
                static={},
            )

    return jax.jit(step, donate_argnums=1).lower(model.params, cache, ids[:, :1]).compile().as_text()


def collectives(text):
    """(kind, numbers in its result) of each."""
    found = re.findall(
        r"= \(?\w+\[([\d,]*)\][^=]*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(",
        text,
    )
    return [(kind, int(np.prod([int(n) for n in dims.split(",") if n]))) for dims, kind in found]


@pytest.mark.parametrize("tensor", [2, 8])
def test_a_dense_layer_has_two_sums_and_nothing_large_moves(tensor):
    model = AutoModelForTPU.from_config(LLAMA, parallelism={"tensor": tensor})
    found = collectives(decode_text(model))
    sums = [size for kind, size in found if kind == "all-reduce"]
    # two a layer, and one of the split embedding table
    assert len(sums) == 2 * SIZES["num_hidden_layers"] + 1
    assert max(sums) == 2 * SIZES["hidden_size"]  # two rows of the table: of one, XLA would gather it
    moved = [(kind, size) for kind, size in found if kind != "all-reduce"]
    assert all(size <= SIZES["vocab_size"] for _, size in moved), moved  # the logits


def test_keys_and_values_are_held_by_groups_of_devices():
    config = tiny_llama_config(**{**SIZES, "num_key_value_heads": 2})
    model = AutoModelForTPU.from_config(config, parallelism={"tensor": 8})
    assert dict(model.mesh.shape) == {"data": 1, "fsdp": 1, "expert": 1, "tensor": 2, "group": 4}
    shard = model.params["model.layers.0.self_attn.k_proj.weight"].addressable_shards[0].data
    assert shard.shape == (8, 64)  # one of the two heads
    assert model.params["model.layers.0.self_attn.q_proj.weight"].addressable_shards[0].data.shape == (8, 64)
    found = collectives(decode_text(model))
    assert all(size <= SIZES["vocab_size"] for kind, size in found if kind != "all-reduce"), found


def test_the_plan_is_a_table_that_adds_up():
    model = AutoModelForTPU.from_config(LLAMA, parallelism={"tensor": 4})
    plan = model.sharding_plan()
    held = sum(a.addressable_shards[0].data.nbytes for a in model.params.values())
    assert plan.bytes_per_device == held
    text = str(plan)
    assert re.search(
        r"model\.layers\.\*\.mlp\.down_proj\.weight +64 x 256 +-, tensor +3 x 16,384 +the model's plan: rowwise", text
    )
    assert f"mesh: tensor 4; {held:,} of " in text
    assert AutoModelForTPU.from_config(LLAMA).sharding_plan() is None


def test_fully_sharded_weights():
    model = AutoModelForTPU.from_config(LLAMA, parallelism={"fsdp": 8})
    held = sum(a.addressable_shards[0].data.nbytes for a in model.params.values())
    assert held < sum(a.nbytes for a in model.params.values()) / 7


def test_a_model_without_a_plan_is_split_by_its_structure():
    config = transformers.OPTConfig(
        vocab_size=128, hidden_size=64, word_embed_proj_dim=64, ffn_dim=256, num_hidden_layers=2, num_attention_heads=8
    )
    model = AutoModelForTPU.from_config(config, parallelism={"tensor": 4})
    assert not model._skeleton.module.tp_plan
    weights = model.sharding_plan().weights
    assert weights["model.decoder.layers.0.self_attn.q_proj.weight"].spec == P(("tensor", "group"), None)
    assert weights["model.decoder.layers.0.self_attn.q_proj.bias"].spec == P(("tensor", "group"))
    assert weights["model.decoder.layers.1.self_attn.out_proj.weight"].spec == P(None, ("tensor", "group"))
    assert weights["model.decoder.layers.1.fc2.weight"].spec == P(None, ("tensor", "group"))
    assert weights["model.decoder.layers.1.fc2.weight"].why == "traced: it reads 256 heads or channels"
    assert weights["model.decoder.layers.1.fc2.bias"].spec == P(None)
    found = collectives(decode_text(model))
    assert len([1 for kind, _ in found if kind == "all-reduce"]) == 2 * 2 + 1


def test_attention_is_split_however_many_experts_there_are():
    """gpt-oss's plan names its embedding alone, and its attention is 1% of its weights."""
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=256, num_experts_per_tok=2,
    )  # fmt: skip
    skeleton = open_skeleton(config)
    attention = sum(t.numel() for name, t in skeleton.shapes.items() if "self_attn" in name)
    assert attention < 0.01 * sum(t.numel() for t in skeleton.shapes.values())
    weights = plan_over(skeleton, make_mesh({"tensor": 2}, config, jax.devices()[:2])).weights
    assert weights["model.layers.1.self_attn.q_proj.weight"].spec == P(("tensor", "group"), None)
    assert weights["model.layers.1.self_attn.o_proj.weight"].spec == P(None, ("tensor", "group"))


def test_experts_with_biases_send_a_row_for_each_token():
    """Their products were summed over devices, for each of a token's experts, before the biases were added."""
    config = transformers.GptOssConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=4, pad_token_id=0,
    )  # fmt: skip
    sums = [size for kind, size in collectives(decode_text(AutoModelForTPU.from_config(config, parallelism={"tensor": 2})))
            if kind == "all-reduce"]  # fmt: skip
    assert len(sums) == 2 * 2 + 1
    assert max(sums) == 2 * 64  # of the embedding table


def test_specs_by_name_and_a_mesh_of_ones_own():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    given = {"mesh": mesh, "*.q_proj.weight": P(None, "data"), "*layers.1.mlp.up_proj.weight": P()}
    model = AutoModelForTPU.from_config(LLAMA, parallelism=given)
    weights = model.sharding_plan().weights
    assert weights["model.layers.2.self_attn.q_proj.weight"].spec == P(None, "data")
    assert weights["model.layers.1.mlp.up_proj.weight"].spec == P(None, None)
    assert weights["model.layers.0.mlp.up_proj.weight"].spec == P(("tensor", "group"), None)
    np.testing.assert_allclose(
        model(input_ids=IDS).logits, AutoModelForTPU.from_config(LLAMA)(input_ids=IDS).logits, atol=1e-4
    )


def test_auto_uses_every_device():
    model = AutoModelForTPU.from_config(LLAMA, parallelism="auto")
    assert model.mesh.size == 8
    assert model.mesh.shape["tensor"] == 8


@pytest.mark.parametrize(
    ("parallelism", "words"),
    [
        ({"tensor": 16}, "needs 16 devices; there are 8"),
        ({"data": 3, "tensor": 4}, "needs 12 devices"),
        ({"tensor": 3}, "8 attention heads cannot be divided among 3 devices"),
        ({"pipeline": 2}, "no axis 'pipeline'"),
        ({"tensor": 0}, "positive integers"),
        ("everything", "'everything' is not a known value"),
        ({"*.q_proj.weight": P("rows")}, "cannot be split as"),
        ({"*.q_projection.weight": P("tensor")}, "matches no weight"),
        ({"mesh": {"data": 2}, "*.norm.weight": P("data", "tensor")}, "cannot be split as"),
    ],
)
def test_meshes_and_specs_that_do_not_fit(parallelism, words):
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        AutoModelForTPU.from_config(LLAMA, parallelism=parallelism)


def test_what_does_not_divide_is_whole_and_the_plan_says_so():
    config = tiny_llama_config(**{**SIZES, "vocab_size": 131, "intermediate_size": 250})
    model = AutoModelForTPU.from_config(config, parallelism={"tensor": 4})
    weights = model.sharding_plan().weights
    assert "131 does not divide by 4" in weights["lm_head.weight"].why
    assert weights["model.layers.0.mlp.up_proj.weight"].spec == P(None, None)


def test_only_slices_are_read(tmp_path, monkeypatch):
    AutoModelForTPU.from_config(LLAMA).save_pretrained(tmp_path)
    seen = []
    own = safetensors_file.SafetensorsFile.read_slice

    def read_slice(self, name, index):
        part = own(self, name, index)
        seen.append((name, part.nbytes))
        return part

    monkeypatch.setattr(safetensors_file.SafetensorsFile, "read_slice", read_slice)
    model = AutoModelForTPU.from_pretrained(tmp_path, parallelism={"tensor": 8})
    name = "model.layers.0.mlp.up_proj.weight"
    parts = [size for each, size in seen if each == name]
    assert parts == [model.params[name].nbytes // 8] * 8
    np.testing.assert_allclose(
        model(input_ids=IDS).logits, AutoModelForTPU.from_config(LLAMA)(input_ids=IDS).logits, atol=1e-4
    )


def test_quantized_weights_over_a_mesh(tmp_path):
    config = tiny_llama_config(**{**SIZES, "hidden_size": 128, "intermediate_size": 512})
    plain = AutoModelForTPU.from_config(config, quantization="int8")
    model = AutoModelForTPU.from_config(config, quantization="int8", parallelism={"tensor": 4})
    weight = model.params["model.layers.0.mlp.down_proj.weight"]
    assert weight.values.addressable_shards[0].data.shape == (128, 128)
    assert weight.scale.addressable_shards[0].data.shape == (128, 1)
    np.testing.assert_allclose(
        model(input_ids=IDS).logits, plain(input_ids=IDS).logits, atol=5e-3
    )  # one device rounds activations, too
    np.testing.assert_array_equal(model.generate(IDS, max_new_tokens=5), plain.generate(IDS, max_new_tokens=5))


def test_what_is_spread_can_be_saved(tmp_path):
    model = AutoModelForTPU.from_config(LLAMA, parallelism={"tensor": 4})
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, array in model.params.items():
        np.testing.assert_array_equal(again.state_dict()[name].numpy(), np.asarray(array))


def test_apply_under_jit_with_sharded_inputs():
    model = AutoModelForTPU.from_config(LLAMA, parallelism={"data": 2, "tensor": 4})
    ids = np.repeat(IDS, 4, axis=0)
    sharding = jax.sharding.NamedSharding(model.mesh, P("data"))
    logits = jax.jit(lambda p, i: model.apply(p, input_ids=i).logits)(model.params, jax.device_put(ids, sharding))
    np.testing.assert_allclose(logits, AutoModelForTPU.from_config(LLAMA)(input_ids=ids).logits, atol=1e-4)


@pytest.mark.parametrize("name", ["Qwen2VL", "Llava", "SmolVLM"])
def test_vision_parts_are_split(name):
    """Their plans, where they ship one, are of the text alone; the trace needs positions and numbers of features."""
    config = hfax.shrink_config(getattr(transformers, f"{name}Config")())
    config.architectures = [f"{name}ForConditionalGeneration"]
    model = AutoModelForTPU.from_config(config, parallelism={"tensor": 2, "data": 4})
    split = [n for n, plan in model.sharding_plan().weights.items() if any(plan.spec)]
    vision = [n for n in split if "vis" in n and n.endswith(("fc1.weight", "fc2.weight"))]
    assert len(vision) >= 2
