"""The engine's step, compiled by the real compilers for TPUs and GPUs that are not there."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_models import TPU_SIZES, tiny_llama_config

from hfax.engine.page_layout import page_size_for
from hfax.engine.scheduler import Limits
from hfax.errors import InvalidInputError
from hfax.kernels import pool, target
from hfax.kernels.rows import Rows
from hfax.parallelism import plan_over
from hfax.planning.devices import topology_devices
from hfax.sharding.mesh import make_mesh
from hfax.tracing.abstract import open_skeleton, without_weights

GPT_OSS = transformers.GptOssConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    num_local_experts=8,
    layer_types=["sliding_attention", "full_attention"],
    dtype="bfloat16",
)


def of_heads(kv_heads: int, head_dim: int = 128, dtype: str = "bfloat16", **more):
    sizes = TPU_SIZES | {"num_key_value_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    return tiny_llama_config(**sizes, **more)


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize(
    ("config", "topology", "num_rows", "dtype"),
    [
        pytest.param(of_heads(4), "v5e:2x2", 16, "bfloat16", id="decoding"),
        pytest.param(of_heads(4), "v6e:2x2", 512, "bfloat16", id="prompts"),
        pytest.param(of_heads(8), "v5e:2x2", 128, "float8_e4m3fn", id="float8"),
        pytest.param(
            of_heads(4, kv_cache_scales=[[0.5, 0.25]] * 2), "v5e:1x1", 16, "float8_e4m3fn", id="float8 with scales"
        ),
        pytest.param(of_heads(4, 64), "tpu7x:1x1x1", 128, "bfloat16", id="64"),
        pytest.param(of_heads(4, 80), "v5p:1x1x1", 128, "bfloat16", id="80"),
        pytest.param(of_heads(4, 256), "v5e:1x1", 512, "bfloat16", id="256"),
        pytest.param(of_heads(1, dtype="float32"), "v6e:1x1", 16, "float32", id="one head"),
        pytest.param(GPT_OSS, "v6e:2x2", 128, "bfloat16", id="sinks"),
    ],
)
def test_a_step_reads_the_pool_where_it_is(config, topology, num_rows, dtype):
    """XLA had copied the whole pool to another layout, and back, for heads of other dimensions than 128."""
    where, compiled, pool_bytes = compiled_step(config, topology, num_rows, dtype)
    assert any("Pallas kernel, reads live pages" in way for way in where.chosen)
    assert not any("gathered" in way for way in where.chosen)
    text = compiled.as_text()
    for kernel in ("pages_write", "pages_attention"):
        assert len(re.findall(rf"%{kernel}\S* = .*custom-call", text)) == 2
    stats = compiled.memory_analysis()
    assert stats.alias_size_in_bytes >= pool_bytes
    assert stats.temp_size_in_bytes < pool_bytes / 4


@pytest.mark.parametrize(
    ("platform", "sequences", "tokens", "size"),
    [("cpu", 512, 131072, 32), ("tpu", 64, 8192, 128), ("tpu", 256, 131072, 256), ("tpu", 512, 1 << 20, 4096)],
)
def test_page_tables_fit_a_tpus_scalar_memory(platform, sequences, tokens, size):
    limits = Limits(max_num_seqs=sequences, max_num_batched_tokens=2048, max_model_len=tokens)
    assert page_size_for(platform, limits) == size
    assert page_size_for(platform, limits, size) == size
    if size > 128:
        with pytest.raises(InvalidInputError, match=f"Use block_size={size}"):
            page_size_for(platform, limits, 128)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("topology", ["h100:1", "h100:4", "a100:4"])
@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(16, "bfloat16"), (512, "bfloat16"), (16, "float8_e4m3fn"), (16, "float32")]
)
def test_a_step_reads_the_pool_by_the_triton_kernel_and_copies_none_of_it(topology, num_rows, dtype):
    config = tiny_llama_config(**TPU_SIZES | {"dtype": "float32" if dtype == "float32" else "bfloat16"})
    where, compiled, pool_bytes = compiled_step(config, topology, num_rows, dtype)
    assert any("reads live pages of the pool" in way for way in where.chosen)
    assert compiled.as_text().count("paged_attention") >= 2
    stats = compiled.memory_analysis()
    assert stats.alias_size_in_bytes >= pool_bytes
    assert stats.temp_size_in_bytes < pool_bytes / 4


def compiled_step(config, topology, num_rows, dtype):
    """A step over the heads of several devices: what was chosen for it, the program, and the bytes of a device's pool."""
    devices = topology_devices(topology)
    platform = devices[0].platform
    skeleton = open_skeleton(config)
    plan = plan_over(skeleton, make_mesh({"tensor": len(devices)}, config, devices))
    model, weights = without_weights(skeleton)

    def there(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(plan.mesh, spec))

    params = {name: there(w.shape, w.dtype, plan.weights[name].spec) for name, w in weights.items()}
    shape, is_for_tpu = (1, config.num_key_value_heads, 8, config.head_dim), platform == "tpu"
    num_pages, page_size = (512, 128) if is_for_tpu else (4096, 32)
    shapes = pool.pool_shapes(num_pages, page_size, shape, shape, jnp.dtype(dtype), is_for_tpu=is_for_tpu)
    pools = {
        f"layers.{layer}.{name}": there(shape, dtype, pool.pool_spec(plan.mesh, shape))
        for layer in range(2)
        for name, shape in shapes.items()
    }
    counts = {"starts": (17,), "lengths": (16,), "tables": (16, 16)}
    rows = Rows(**{name: there(shape, jnp.int32, P()) for name, shape in counts.items()})
    tokens, wanted = there((num_rows,), jnp.int32, P()), there((16,), jnp.int32, P())
    with target.compiling_for(devices[0], mesh=plan.mesh) as where:
        lowered = jax.jit(model.run_rows, donate_argnums=1).lower(params, pools, tokens, rows, wanted)
    pool_bytes = sum(np.prod(p.shape) * p.dtype.itemsize for p in pools.values()) // len(devices)
    return where, lowered.compile(), pool_bytes
