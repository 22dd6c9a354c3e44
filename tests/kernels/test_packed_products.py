"""The C++ kernels for weights of 8 and 4 bits against products in float64, on every instruction set that the processor has."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from hfax.kernels import quantized
from hfax.kernels.experts import grouped_linear
from hfax.kernels.linear import linear

from .cpu_programs import KERNELS, normal, on_cpu, pack

pytestmark = pytest.mark.usefixtures("instruction_set")


@pytest.fixture(params=[8, 4])
def weight(request):
    """Numbers, and what they were packed to."""
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32))
    return values.numpy(), pack(values, request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 9, 30, 200])
def test_kernel_multiplies_with_those_numbers(weight, dtype, rows):
    """With the integers times their scales; but several bfloat16 rows, where the processor multiplies pairs of bfloat16, and
    more rows than the kernel takes, with these rounded to bfloat16. The result is rounded once, and off by no more."""
    _, packed = weight
    x = normal(rows, 256, dtype=dtype)
    got, chosen = on_cpu(quantized.linear, x, packed)
    is_unbounded = any("any number of rows" in way for way in chosen)
    assert any(KERNELS in way for way in chosen) == (rows <= 128 or is_unbounded)
    numbers = packed.dequantize()
    if rows > 128 or (is_unbounded and rows > 1):
        numbers = numbers.astype(dtype)
    wide_x, wide = np.asarray(x, np.float64), np.asarray(numbers, np.float64)
    exact = wide_x @ wide.T
    # a single row may become 16-bit integers; float32 sums are off by less
    allowed = 2.0**-15 * np.abs(wide_x).max() * np.abs(wide).sum(1)
    if dtype == "bfloat16":
        allowed = allowed + 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)  # half a unit in the last place
    assert (np.abs(got - exact) <= allowed).all()
    if is_unbounded and rows > 1 and dtype == "bfloat16":  # both sums have one order
        np.testing.assert_array_equal(got, on_cpu(linear, x, numbers)[0])


def test_each_row_gets_the_packed_matrix_of_its_expert(weight):
    _, one = weight
    values = torch.from_numpy(np.random.default_rng(1).standard_normal((5, 24, 128)).astype(np.float32))
    packed = pack(values, one.bits)
    x, experts = normal(7, 128), jnp.array([4, 0, 0, 2, 4, 4, 1])
    expected = np.einsum("ri,roi->ro", x, np.asarray(packed.dequantize())[np.asarray(experts)])
    got, chosen = on_cpu(grouped_linear, x, packed, experts)
    assert any(KERNELS in way for way in chosen)
    np.testing.assert_allclose(got, expected, atol=1e-3)


def test_what_is_not_finite_shows(weight):
    _, packed = weight
    x = normal(1, 256).at[0, 3].set(jnp.nan)
    got, _ = on_cpu(quantized.linear, x, packed)
    assert np.isnan(got).all()
    x = normal(3, 256, dtype="bfloat16").at[1, 3].set(jnp.inf)
    got, _ = on_cpu(quantized.linear, x, packed)
    assert (~np.isfinite(np.asarray(got, np.float32)).all(axis=1)).tolist() == [False, True, False]
