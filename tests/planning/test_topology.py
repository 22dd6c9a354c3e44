"""Programs compiled by the real TPU compiler, for topologies of chips that are not there."""

import re

import jax
import jax.numpy as jnp
import pytest
import transformers
from tiny_models import TPU_SIZES, tiny_llama_config

from hfax.errors import BackendNotAvailableError
from hfax.kernels import precision
from hfax.kernels.attention import attention
from hfax.kernels.target import compiler_options, compiling_for
from hfax.parallelism import plan_over
from hfax.planning.devices import topology_devices
from hfax.planning.topology import compile_for, compile_programs
from hfax.sharding.mesh import make_mesh
from hfax.tracing.abstract import open_skeleton

pytestmark = pytest.mark.usefixtures("tpu_compiler")

CONFIGS = {
    "dense": tiny_llama_config(**TPU_SIZES),
    "experts": transformers.Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        moe_intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
        **TPU_SIZES,
    ),
    "windows": transformers.Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"],
        **TPU_SIZES,
    ),
    "wide": transformers.Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"],
        **TPU_SIZES | {"head_dim": 256},
    ),
    "sinks": transformers.GptOssConfig(
        architectures=["GptOssForCausalLM"],
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"],
        **TPU_SIZES | {"head_dim": 64, "intermediate_size": 720},
    ),
    "latents": transformers.DeepseekV3Config(
        architectures=["DeepseekV3ForCausalLM"],
        q_lora_rank=128,
        kv_lora_rank=256,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        first_k_dense_replace=2,
        **TPU_SIZES | {"num_key_value_heads": 8, "head_dim": 64},
    ),
    # its class does not say that it uses transformers' attention interface
    "linear attention": transformers.Qwen3NextConfig(
        architectures=["Qwen3NextForCausalLM"],
        layer_types=["linear_attention", "full_attention", "full_attention"],
        mlp_only_layers=[0, 1, 2],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        **TPU_SIZES | {"num_hidden_layers": 3, "head_dim": 256},
    ),
    "ten heads": tiny_llama_config(
        **TPU_SIZES | {"hidden_size": 1280, "num_attention_heads": 20, "num_key_value_heads": 10, "head_dim": 96}
    ),
}


@pytest.mark.parametrize(
    ("topology", "is_packed", "expected"),
    [
        ("v5e:2x2", True, {"xla_tpu_sliced_prefetch_max_slices": "1"}),
        ("v5e:2x2", False, {}),
        ("v6e:2x2", True, {}),
        ("tpu7x:2x2x1", False, {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}),
    ],
)
def test_options_of_the_compiler(topology, is_packed, expected):
    """That libtpu knows them is in the tests that compile for these chips."""
    device = topology_devices(topology)[0]
    assert compiler_options(device, has_few_rows=True, has_packed_weights=is_packed) == expected


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("dense", "v5e:2x2"),
        pytest.param("dense", "tpu7x:1x1x1", marks=pytest.mark.tpu_compile),
        pytest.param("experts", "v6e:2x2", marks=pytest.mark.tpu_compile),
        pytest.param("windows", "v6e:2x2", marks=pytest.mark.tpu_compile),
        pytest.param("wide", "v6e:1x1", marks=pytest.mark.tpu_compile),
        pytest.param("sinks", "v6e:2x2", marks=pytest.mark.tpu_compile),
        pytest.param("ten heads", "v5e:1x1", marks=pytest.mark.tpu_compile),
        pytest.param("latents", "v6e:2x2", marks=pytest.mark.tpu_compile),
        pytest.param("linear attention", "v5e:1x1", marks=pytest.mark.tpu_compile),
    ],
)
def test_programs_have_pallas_kernels_and_copy_nothing_large(name, topology):
    config = CONFIGS[name]
    prefill, decode = compile_for(config, topology, prompt_length=256, capacity=1024)
    assert prefill.kernels["splash_mha_fwd_segmented_no_residuals"] == 2
    assert decode.kernels["pages_write"] == decode.kernels["pages_decode_attention"] == 2
    assert prefill.large_copies == ()
    assert decode.large_copies == ()
    assert decode.temporary_bytes < decode.argument_bytes / 2  # small weights; of large ones it is far less
    if name in ("experts", "sinks"):
        assert prefill.kernels["gmm"] == decode.kernels["gmm"] == 4
        # a sum of activations after attention and one after the experts of each layer, and one of embeddings
        activations = 256 * config.hidden_size * 2
        assert prefill.collective_bytes < (2 * 2 + 1.5) * activations
    # one sum over devices after attention and one after the feed-forward part, at least
    assert decode.collectives.get("all-reduce", 0) >= (0 if topology.endswith(":1x1") else 4)
    assert "model/layers.1/self_attn/o_proj" in decode.text  # scopes carry the modules' names


@pytest.mark.tpu_compile
def test_an_encoders_attention_with_a_soft_cap():
    """VideoPrism's: of bfloat16 products with the precision of float32, libtpu could not make its kernel."""
    (device,) = topology_devices("v5e:1x1")
    array = jax.ShapeDtypeStruct((1, 4, 256, 64), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))

    def attend(query, key, value):
        with precision.as_torch():
            return attention(query, key, value, None, scale=0.1, softcap=50.0)[0]

    with compiling_for(device):
        compiled = jax.jit(attend).lower(array, array, array).compile()
    assert "bf16[1,256,4,64]" in compiled.as_text()


@pytest.mark.tpu_compile
def test_attention_to_a_prompt_in_the_models_own_code():
    """Of bfloat16 products with the precision of float32, libtpu could not make its kernel."""
    config = transformers.BloomConfig(
        architectures=["BloomForCausalLM"], vocab_size=1024, hidden_size=512, n_layer=2, n_head=8, dtype="bfloat16"
    )
    _, decode = compile_for(config, "v5e:1x1", batch_size=2, prompt_length=128, capacity=512)
    assert not decode.kernels


@pytest.mark.tpu_compile
def test_a_batch_writes_into_its_pages_where_they_are():
    """XLA had copied every layer's pages to another layout, and back, for each token."""
    _, decode = compile_for(CONFIGS["wide"], "v6e:1x1", batch_size=4, prompt_length=256, capacity=1024)
    assert decode.kernels["pages_write"] == decode.kernels["pages_decode_attention"] == 2
    assert not re.search(r"= bf16\[(4,3|4,8|12|32),4,128,512\]\S* copy\(", decode.text)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("scales", [[], [[0.5, 0.25]] * 2])
def test_float8_is_written_and_read_by_the_kernels(scales):
    config = tiny_llama_config(**TPU_SIZES, kv_cache_scales=scales)
    sizes = {"prompt_length": 256, "capacity": 1024, "kv_cache_dtype": "fp8"}
    _, decode = compile_for(config, "v5e:1x1", batch_size=4, **sizes)
    assert decode.kernels["pages_write"] == decode.kernels["pages_decode_attention"] == 2


@pytest.mark.tpu_compile
@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 2}, {"fsdp": 4}])
def test_devices_have_the_pages_of_their_own_rows(sizes):
    skeleton, devices = open_skeleton(CONFIGS["dense"]), topology_devices("v6e:2x2")
    plan = plan_over(skeleton, make_mesh(sizes, CONFIGS["dense"], devices))
    _, decode = compile_programs(skeleton, plan, batch_size=8, prompt_length=256, capacity=1024)
    assert decode.kernels["pages_decode_attention"] == 2
    rows, heads = (4, 2) if "data" in sizes else (2, 4)
    assert f"bf16[{rows * 8},{heads},128,256]" in decode.text
    assert decode.large_copies == ()


@pytest.mark.tpu_compile
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    ("name", "topology", "linears", "experts", "part"),
    [
        ("dense", "v5e:1x1", 7 * 2 + 1, 0, "512,1024"),
        ("dense", "v5e:2x2", 7 * 2 + 1, 0, "512,256"),
        ("experts", "v6e:2x2", 4 * 2 + 1, 2 * 2, "2,1024,512"),
    ],
)
def test_packed_weights_are_never_written_as_numbers(name, topology, linears, experts, part, quantization):
    """Without the kernels, XLA has more of them in memory than there are arguments."""
    prefill, decode = compile_for(CONFIGS[name], topology, prompt_length=256, capacity=1024, quantization=quantization)
    for program in (prefill, decode):
        assert program.kernels[f"{quantization}_linear"] == linears
        assert program.kernels.get(f"{quantization}_experts", 0) == experts
        assert f"linear: Pallas kernel ({quantization} weights)" in program.chosen
        assert program.large_copies == ()
    assert not re.search(rf"(f32|bf16)\[{part}\]", decode.text)  # what a chip has of a large weight


def test_a_topology_that_is_none_is_an_error():
    with pytest.raises(BackendNotAvailableError, match="v99:1x1"):
        compile_for(CONFIGS["dense"], "v99:1x1")
