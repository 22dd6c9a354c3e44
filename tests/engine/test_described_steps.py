"""The engine's step, compiled by the real compilers for TPUs and GPUs that are not there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_models import TPU_SIZES, tiny_llama_config

from hfax.kernels import pool, target
from hfax.kernels.rows import Rows
from hfax.parallelism import plan_over
from hfax.planning.devices import topology_devices
from hfax.sharding.mesh import make_mesh
from hfax.tracing.abstract import open_skeleton, without_weights


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize(
    ("num_rows", "kv_heads", "dtype"), [(16, 4, "bfloat16"), (128, 4, "bfloat16"), (16, 8, "float8_e4m3fn")]
)
def test_a_step_reads_the_pool_by_the_ragged_kernel_and_copies_none_of_it(topology, num_rows, kv_heads, dtype):
    config = tiny_llama_config(**TPU_SIZES | {"num_key_value_heads": kv_heads})
    where, compiled, pool_bytes = compiled_step(config, topology, num_rows, dtype)
    assert any("ragged paged kernel (Pallas), pool" in way for way in where.chosen)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') >= 2
    stats = compiled.memory_analysis()
    assert stats.alias_size_in_bytes >= pool_bytes
    assert stats.temp_size_in_bytes < pool_bytes / 4


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
def test_heads_that_the_ragged_kernel_does_not_take_are_gathered():
    config = tiny_llama_config(
        **TPU_SIZES | {"hidden_size": 1280, "num_attention_heads": 40, "num_key_value_heads": 20}
    )
    where, _, _ = compiled_step(config, "v5e:2x2", 16, "bfloat16")
    assert any("gathered" in way for way in where.chosen)


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
    shape = (1, config.num_key_value_heads, 8, 128)
    shards = len(devices) if platform == "tpu" else None
    num_pages, page_size = (256, 128) if shards else (4096, 32)
    shapes = pool.pool_shapes(num_pages, page_size, shape, shape, jnp.dtype(dtype), tpu_shards=shards)
    pools = {
        f"layers.{layer}.{name}": there(shape, dtype, pool.pool_spec(plan.mesh, name, shape))
        for layer in range(2)
        for name, shape in shapes.items()
    }
    counts = {"starts": (17,), "lengths": (16,), "tables": (16, 16), "count": (1,)}
    rows = Rows(**{name: there(shape, jnp.int32, P()) for name, shape in counts.items()})
    tokens, wanted = there((num_rows,), jnp.int32, P()), there((16,), jnp.int32, P())
    with target.compiling_for(devices[0], mesh=plan.mesh) as where:
        lowered = jax.jit(model.run_rows, donate_argnums=1).lower(params, pools, tokens, rows, wanted)
    pool_bytes = sum(np.prod(p.shape) * p.dtype.itemsize for p in pools.values()) // len(devices)
    return where, lowered.compile(), pool_bytes
