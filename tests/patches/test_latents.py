"""Latent attention: the same as with expanded keys and values, without them in the program of a decoding step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hfax import AutoModelForTPU, LoraConfig, shrink_config
from hfax.kernels.latents import Latents, queries_of_latents, values_of_latents
from hfax.parallelism import plan_over
from hfax.planning.topology import compile_programs
from hfax.sharding.mesh import make_mesh
from hfax.tracing.abstract import open_skeleton

HEADS, NOPE, ROTARY, WIDTH, RANK, KEYS = 4, 16, 8, 24, 32, 40


@pytest.fixture
def given():
    draw = np.random.default_rng(0).standard_normal
    shapes = {
        "query": (2, HEADS, 3, NOPE + ROTARY),
        "latents": (2, 1, KEYS, RANK),
        "rotated": (2, 1, KEYS, ROTARY),
        "weight": (HEADS * (NOPE + WIDTH), RANK),
    }
    return {name: jnp.asarray(draw(shape), jnp.float32) for name, shape in shapes.items()}


def expanded(latents, rotated, weight):
    """Keys and values of all heads, as transformers makes them."""
    both = (latents @ weight.T).reshape(2, KEYS, HEADS, NOPE + WIDTH).transpose(0, 2, 1, 3)
    keys = jnp.concatenate([both[..., :NOPE], jnp.broadcast_to(rotated, (2, HEADS, KEYS, ROTARY))], axis=-1)
    return keys, both[..., NOPE:]


def test_products_with_latents_are_those_with_expanded_keys_and_values(given):
    with jax.default_matmul_precision("highest"):
        keys, values = expanded(given["latents"], given["rotated"], given["weight"])
        expected = jnp.einsum("bhqd,bhkd->bhqk", given["query"], keys)
        sizes = {"nope": NOPE, "width": WIDTH}
        queries = queries_of_latents(given["query"], given["weight"], **sizes)
        both = jnp.concatenate([given["latents"], given["rotated"]], axis=-1)[:, 0]
        scores = jnp.einsum("bhqd,bkd->bhqk", queries, both)
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-4)
        shares = jax.nn.softmax(expected)
        weighted = jnp.einsum("bhqk,bkr->bqhr", shares, given["latents"][:, 0])
        found = values_of_latents(weighted, given["weight"], **sizes)
        np.testing.assert_allclose(found, jnp.einsum("bhqk,bhkd->bqhd", shares, values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_products_of_half_precision_are_added_up_in_float32(given, dtype):
    sizes = {"nope": NOPE, "width": WIDTH}
    query, weight = given["query"].astype(dtype), given["weight"].astype(dtype)
    found = queries_of_latents(query, weight, **sizes)
    exact = queries_of_latents(query.astype(jnp.float32), weight.astype(jnp.float32), **sizes)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-6)
    weighted = jnp.broadcast_to(given["latents"][:, :, :HEADS].astype(dtype), (2, 3, HEADS, RANK))
    values = values_of_latents(weighted, weight, **sizes)
    exact = values_of_latents(weighted.astype(jnp.float32), weight.astype(jnp.float32), **sizes)
    np.testing.assert_allclose(values.astype(jnp.float32), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-6)


@pytest.mark.parametrize(("num_queries", "is_expanded"), [(1, False), (128, False), (256, True), (8192, True)])
def test_many_queries_are_cheaper_with_expanded_keys(num_queries, is_expanded):
    """DeepSeek V3's sizes: a pair costs 768 operations more, a token 131,072 to expand."""
    compressed, rotated = (jax.ShapeDtypeStruct((1, 1, 8192, width), jnp.bfloat16) for width in (512, 64))
    latents = Latents(compressed=compressed, rotated=rotated, weight=None, nope=128, width=128, expand=lambda: (0, 0))
    assert latents.is_expanded(num_queries) is is_expanded


def saved(kind, folder):
    """A small model of this type with weights large enough to tell tokens apart, and its folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shrink_config(AutoConfig.for_model(kind)), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


OPTIONS = {
    "max_new_tokens": 8,
    "do_sample": False,
    "eos_token_id": None,
    "output_scores": True,
    "return_dict_in_generate": True,
}
OWN = ("deepseek_v3", "deepseek_v32")
OTHERS = (
    *("glm4_moe_lite", "longcat_flash", "minicpm3", "youtu", "axk1", "axk2", "glm_moe_dsa", "hy_v4", "dots3_note"),
    "kimi_linear",  # it runs transformers' attention, with expanded keys
)


@pytest.mark.parametrize("kind", [*OWN, *(pytest.param(kind, marks=pytest.mark.sweep) for kind in OTHERS)])
def test_generation_is_that_of_transformers(kind, tmp_path):
    theirs = saved(kind, tmp_path)
    ids = torch.randint(3, theirs.config.vocab_size - 1, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ours = AutoModelForTPU.from_pretrained(tmp_path)
    expected = theirs.generate(ids, attention_mask=mask, **OPTIONS)
    found = ours.generate(ids, attention_mask=mask, **OPTIONS)
    assert np.array_equal(found.sequences, expected.sequences)
    for own, other in zip(found.scores, expected.scores, strict=True):
        np.testing.assert_allclose(np.asarray(own), other.numpy(), atol=2e-5)


def test_a_step_expands_nothing():
    config = shrink_config(AutoConfig.for_model("deepseek_v3"))
    skeleton = open_skeleton(config)
    plan = plan_over(skeleton, make_mesh({"tensor": 1}, config, jax.devices()[:1]))
    prefill, decode = compile_programs(skeleton, plan, batch_size=1, prompt_length=48, capacity=112)
    way = "attention: over latents, not expanded"
    assert way in decode.chosen
    assert way not in prefill.chosen
    expanded_size = 112 * config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    sizes = {array.size for each in decode.hlo.instructions() for array in each.arrays}
    assert max(sizes) >= 112 * config.kv_lora_rank
    assert expanded_size not in sizes


def test_an_adapter_of_the_projection_counts(tmp_path):
    """Its product is not in the projection's weight, so keys and values are expanded."""
    saved("deepseek_v3", tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path)
    ids = torch.randint(3, model.config.vocab_size - 1, (1, 12))
    plain = model.generate(ids, **OPTIONS)
    model.add_adapter(LoraConfig(r=4, target_modules=["kv_b_proj"], init_lora_weights=False))
    adapted = model.generate(ids, **OPTIONS)
    assert float(np.abs(np.asarray(adapted.scores[0]) - np.asarray(plain.scores[0])).max()) > 1e-3
    model.merge_and_unload()
    merged = model.generate(ids, **OPTIONS)
    assert np.array_equal(merged.sequences, adapted.sequences)
    for own, other in zip(merged.scores, adapted.scores, strict=True):
        np.testing.assert_allclose(np.asarray(own), np.asarray(other), atol=2e-5)
