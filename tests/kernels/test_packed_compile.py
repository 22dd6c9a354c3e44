"""The kernels for weights as other libraries store them are compiled for chips that are not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hfax.kernels.encodings import BITS, STORED, columns_of
from hfax.kernels.experts import grouped_linear
from hfax.kernels.quantized import QuantizedArray, linear
from hfax.kernels.target import compiling_for
from hfax.planning.devices import topology_devices

over_shapes = pytest.mark.parametrize(
    ("lead", "rows"),
    [((), 1), ((), 30), ((8,), 1), ((8,), 30)],
    ids=["row", "rows", "row of experts", "rows of experts"],
)


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
@over_shapes
@pytest.mark.parametrize(
    ("encoding", "group", "dtype", "has_offset"),
    [
        ("int8", 128, "float32", True),
        ("int8", 16, "float32", False),
        ("int4", 128, "float32", True),
        ("int4", 32, "float32", True),
        ("fp4", 32, "bfloat16", False),
        ("fp4", 16, "float32", False),
        ("fp8", 128, "float32", False),
        ("fp8", 32, "bfloat16", False),
    ],
)
def test_kernels_compile_for_tpu(encoding, group, dtype, has_offset, lead, rows):
    check("v5e:2x2", encoding, group, dtype, has_offset, lead, rows)


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1", "tpu7x:2x2x1"])
@pytest.mark.parametrize(("encoding", "group"), [("int8", 128), ("int4", 32), ("fp4", 16), ("fp8", 128)])
def test_kernels_of_long_prompts_compile_for_tpu(encoding, group, topology):
    check(topology, encoding, group, "bfloat16", False, (), 3000)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("gpu_compiler")
@over_shapes
@pytest.mark.parametrize("machine", ["h100:1", "l4:1"])
@pytest.mark.parametrize(
    ("encoding", "group", "dtype", "has_offset"),
    [
        ("int8", 128, "float32", False),
        ("int8", 16, "float32", False),
        ("int4", 128, "float16", True),
        ("int4", 64, "float16", False),
        ("int4", 32, "float32", True),
        ("fp8", 128, "float32", False),
        ("fp8", 32, "bfloat16", False),
        ("fp4", 32, "bfloat16", False),
        ("fp4", 16, "float32", False),
    ],
)
def test_kernels_compile_for_gpu(machine, encoding, group, dtype, has_offset, lead, rows):
    check(machine, encoding, group, dtype, has_offset, lead, rows)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("gpu_compiler")
@over_shapes
@pytest.mark.parametrize("machine", ["a100-80gb:1", "b200:1"])
@pytest.mark.parametrize(("encoding", "group"), [("int8", 128), ("int4", 32), ("fp8", 128), ("fp4", 16)])
def test_kernels_for_float16_compile_for_gpu(machine, encoding, group, lead, rows):
    check(machine, encoding, group, "float16", False, lead, rows, of_x="float16")


def check(topology, encoding, group, dtype, has_offset, lead, rows, of_x="bfloat16"):
    """Compiles a product for the first of these devices, by the kernel."""
    device = topology_devices(topology)[0]
    mesh = Mesh(np.array([device]), ("tensor",))

    def given(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, P()))

    of_groups = given((*lead, 512, 1024 // group), dtype)
    weight = QuantizedArray(
        values=given((*lead, 512, 1024 * BITS[encoding] // 8), STORED[encoding]),
        scale=of_groups,
        offset=of_groups if has_offset else None,
        encoding=encoding,
        dtype=jnp.dtype("bfloat16"),
    )
    x, experts = given((rows, 1024), of_x), given((rows,), "int32")
    with compiling_for(device, mesh=mesh) as where:
        if lead:
            jax.jit(grouped_linear).lower(x, weight, experts).compile()
        else:
            jax.jit(linear).lower(x, weight).compile()
    assert all(f"kernel ({encoding} weights)" in way for way in where.chosen)


@pytest.mark.tpu_compile
@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize("rows", [4, 128])
@pytest.mark.parametrize("out", [5760, 2880])
def test_experts_of_gpt_oss_compile_for_tpu(out, rows):
    """Rows of 2,880 columns, padded, which the model holds as [experts, in, out]."""
    device = topology_devices("v6e:1x1")[0]
    where = NamedSharding(Mesh(np.array([device]), ("tensor",)), P())
    width, stored = 2880, columns_of(2880, "fp4")
    weight = QuantizedArray(
        values=jax.ShapeDtypeStruct((8, out, stored // 2), jnp.uint8, sharding=where),
        scale=jax.ShapeDtypeStruct((8, out, stored // 32), jnp.bfloat16, sharding=where),
        encoding="fp4",
        dtype=jnp.dtype("bfloat16"),
        width=width,
        is_transposed=True,
    )
    assert weight.shape == (8, width, out)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16, sharding=where)
    experts = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=where)
    with compiling_for(device, mesh=where.mesh) as program:
        jax.jit(functools.partial(grouped_linear, is_transposed=True)).lower(x, weight, experts).compile()
    assert program.chosen == {"experts: Pallas kernel (fp4 weights)"}
