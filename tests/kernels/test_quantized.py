"""Packed weights: the numbers that they stand for, and products with them in plain JAX."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from packed_weights import FORMATS, HERE, packed_array, packed_tensor

from hfax.kernels import quantized
from hfax.kernels.experts import grouped_linear
from hfax.load.packed import PackedLayout
from hfax.load.quantize import kept_layout
from hfax.load.quantize import pack as pack_stored

from .cpu_programs import normal, pack


@pytest.fixture(params=[8, 4])
def weight(request):
    """Numbers, and what they were packed to."""
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32))
    return values.numpy(), pack(values, request.param)


def test_numbers_are_near_those_that_were_given(weight):
    given, packed = weight
    assert packed.shape == given.shape
    step = np.abs(given).max() / (127 if packed.bits == 8 else 8)
    # of 4 bits the largest magnitude becomes -8, and one as large with the other sign becomes 7
    most = 0.52 * step if packed.bits == 8 else 1.02 * step
    assert np.abs(np.asarray(packed.dequantize()) - given).max() <= most
    assert packed.nbytes < given.nbytes * (0.27 if packed.bits == 8 else 0.14)


def test_plain_jax_multiplies_with_those_numbers(weight):
    _, packed = weight
    x = normal(3, 256)
    expected = np.asarray(x) @ np.asarray(packed.dequantize()).T
    np.testing.assert_allclose(quantized.linear(x, packed), expected, rtol=1e-5, atol=1e-3)


def test_rows_of_a_table(weight):
    _, packed = weight
    index = jnp.array([[3, 39], [0, 3]])
    np.testing.assert_array_equal(packed.rows(index), np.asarray(packed.dequantize())[np.asarray(index)])


def test_a_group_of_zeros_stays_zero(weight):
    _, one = weight
    packed = pack(torch.zeros(4, 128), one.bits)
    assert (np.asarray(packed.dequantize()) == 0).all()


def test_plain_jax_gives_each_row_the_packed_matrix_of_its_expert(weight):
    _, one = weight
    values = torch.from_numpy(np.random.default_rng(1).standard_normal((5, 24, 128)).astype(np.float32))
    packed = pack(values, one.bits)
    x, experts = normal(7, 128), jnp.array([4, 0, 0, 2, 4, 4, 1])
    expected = np.einsum("ri,roi->ro", x, np.asarray(packed.dequantize())[np.asarray(experts)])
    np.testing.assert_allclose(grouped_linear(x, packed, experts), expected, atol=1e-3)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_a_stored_weight_keeps_its_numbers(form, permuted):
    """Bit for bit, in the weight's order of columns."""
    tensor = packed_tensor(*form, permuted=permuted)
    packed, expected = packed_array(tensor), tensor.dequantize().numpy()
    np.testing.assert_array_equal(packed.dequantize(), expected)
    np.testing.assert_array_equal(packed.rows(jnp.array([3, 0])), expected[[3, 0]])
    x = normal(3, 512)
    np.testing.assert_allclose(quantized.linear(x, packed), np.asarray(x) @ expected.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("encoding", "group", "width", "platform", "kept"),
    [
        ("int4", 32, 512, "cpu", 32),
        ("int4", 512, 512, "cpu", 128),  # a group of a whole row is several with one scale
        ("int4", 32, 192, "cpu", 32),
        ("int4", 32, 64, "cpu", None),  # as large as with 8 bits
        ("int8", 576, 576, "cpu", 64),
        ("int8", 8, 512, "cpu", None),
        ("fp8", 128, 512, "tpu", 128),
        ("fp8", 64, 512, "tpu", 64),
        ("int8", 32, 512, "tpu", 32),
        ("int8", 8, 512, "tpu", None),
        ("int4", 32, 512, "tpu", 32),
        ("fp4", 16, 512, "tpu", 16),
        ("int4", 64, 512, "gpu", 64),
        ("int4", 256, 512, "tpu", 128),
        ("int8", 128, 512, "gpu", 128),
        ("fp4", 32, 512, "gpu", 32),
        ("fp8", 512, 512, "gpu", 128),
        ("int8", 8, 512, "gpu", None),
    ],
)
def test_weights_stay_packed_where_a_kernel_multiplies_with_them(encoding, group, width, platform, kept):
    found = kept_layout(PackedLayout(encoding=encoding, group=group, shape=(40, width)), platform)
    assert (None if found is None else found.group) == kept


def test_codes_without_a_number_are_not_kept():
    """Kernels take the code of float8's NaN for a number."""
    tensor = packed_tensor("fp8", 128, "float32", False)
    tensor.codes.view(torch.uint8)[3, 5] = 0x7F
    assert pack_stored(tensor, torch.float32, HERE) is None
