"""The C++ kernels for weights of 8 and 4 bits against products in float64, on every instruction set that the processor has."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from packed_weights import FORMATS, packed_array, packed_tensor

from hfax.kernels import quantized
from hfax.kernels.cpu import library
from hfax.kernels.experts import grouped_linear

from .cpu_programs import KERNELS, normal, on_cpu, pack

pytestmark = pytest.mark.usefixtures("instruction_set")


@pytest.fixture(params=[8, 4])
def weight(request):
    """Numbers, and what they were packed to."""
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 256)).astype(np.float32))
    return values.numpy(), pack(values, request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 9, 30, 200, 550])
def test_kernel_multiplies_with_those_numbers(weight, dtype, rows):
    """With the integers times their scales; activations are rounded to 16 bits of their group's largest, the result once."""
    _, packed = weight
    x = normal(rows, 256, dtype=dtype)
    got, chosen = on_cpu(quantized.linear, x, packed)
    assert any(KERNELS in way for way in chosen)
    wide_x, wide = np.asarray(x, np.float64), np.asarray(packed.dequantize(), np.float64)
    exact = wide_x @ wide.T
    allowed = 2.0**-15 * np.abs(wide_x).max() * np.abs(wide).sum(1)
    if dtype == "bfloat16":
        allowed = allowed + 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)  # half a unit in the last place
    assert (np.abs(got - exact) <= allowed).all()


@pytest.mark.parametrize("width", [128, 384, 640, 1152])
@pytest.mark.parametrize("out", [1, 15, 17, 70, 200])
def test_every_width_and_number_of_columns(weight, width, out):
    """Blocks of columns that are not full, and rows of the weight that fill no vector."""
    _, one = weight
    values = torch.from_numpy(np.random.default_rng(1).standard_normal((out, width)).astype(np.float32))
    packed = pack(values, one.bits)
    x = normal(7, width)
    got, _ = on_cpu(quantized.linear, x, packed)
    exact = np.asarray(x, np.float64) @ np.asarray(packed.dequantize(), np.float64).T
    np.testing.assert_allclose(got, exact, atol=2.0**-15 * np.abs(x).max() * np.abs(packed.dequantize()).sum(1).max())


@pytest.mark.parametrize("group", [32, 64, 512])
def test_every_group_of_8_bits(group):
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.integers(-127, 128, (40, 1536)), jnp.int8)
    scale = jnp.asarray(rng.random((40, 1536 // group)), jnp.bfloat16)
    packed = quantized.QuantizedArray(values=values, scale=scale, encoding="int8", dtype=jnp.dtype("float32"))
    x = normal(3, 1536)
    got, _ = on_cpu(quantized.linear, x, packed)
    numbers = np.asarray(packed.dequantize(), np.float64)
    allowed = 2.0**-15 * np.abs(x).max() * np.abs(numbers).sum(1)
    assert (np.abs(got - np.asarray(x, np.float64) @ numbers.T) <= allowed).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_beside_others_and_on_every_instruction_set(weight, dtype):
    """Sums of integers are exact, and the groups' are added in their order."""
    _, packed = weight
    x = normal(200, 256, dtype=dtype)
    got, _ = on_cpu(quantized.linear, x, packed)
    for first, count in ((0, 1), (5, 2), (11, 3), (20, 7), (50, 64)):
        some, _ = on_cpu(quantized.linear, x[first : first + count], packed)
        np.testing.assert_array_equal(some, got[first : first + count])
    for instructions in library.available_instruction_sets()[:1]:
        with library.compiled_for(instructions.name):
            np.testing.assert_array_equal(on_cpu(quantized.linear, x, packed)[0], got)


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


def exact_products(x, packed):
    """In float64, and the error that rounded activations and a sum in float32 allow."""
    wide_x, wide = np.asarray(x, np.float64), np.asarray(packed.dequantize(), np.float64)
    allowed = 2.0**-15 * np.abs(wide_x).max() * np.abs(wide).sum(1)
    if packed.offset is not None:  # numbers near 0 may be sums of large ones
        allowed = (
            allowed
            + 2.0**-15 * np.abs(wide_x).max() * np.abs(np.asarray(packed.offset, np.float64)).sum(1) * packed.group
        )
    return wide_x @ wide.T, allowed


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_format_of_stored_weights(form):
    """With each, a row has the same bits alone, beside others and on every instruction set."""
    packed = packed_array(packed_tensor(*form))
    x = normal(9, 512)
    exact, allowed = exact_products(x, packed)
    for rows in (1, 9):
        got, chosen = on_cpu(quantized.linear, x[:rows], packed)
        assert any(KERNELS in way for way in chosen)
        assert (np.abs(got - exact[:rows]) <= allowed).all()
    alone, _ = on_cpu(quantized.linear, x[:1], packed)
    np.testing.assert_array_equal(alone[0], got[0])
    for instructions in library.available_instruction_sets()[:1]:
        with library.compiled_for(instructions.name):
            np.testing.assert_array_equal(on_cpu(quantized.linear, x, packed)[0], got)


@pytest.mark.parametrize("form", [("int4", 128, "float16", True), ("fp8", 128, "float32", False)], ids=str)
def test_every_number_of_columns_of_stored_weights(form):
    """Rows of a weight that fill no vector, more rows of activations than are computed together, and permuted columns."""
    for out in (1, 15, 70):
        packed = packed_array(packed_tensor(*form, (out, 640), permuted=True))
        x = normal(200, 640)
        exact, allowed = exact_products(x, packed)
        got, _ = on_cpu(quantized.linear, x, packed, is_batch_invariant=True)
        assert (np.abs(got - exact) <= allowed).all()
        some, _ = on_cpu(quantized.linear, x[197:198], packed, is_batch_invariant=True)
        np.testing.assert_array_equal(some, got[197:198])


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("group", [16, 128])
@pytest.mark.parametrize("rows", [1, 3, 16, 40, 600])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_rows_of_float8_use_its_numbers_in_their_dtype(dtype, rows, group, has_offset):
    """As transformers does, which dequantizes to the model's dtype; few rows use them as they are."""
    tensor = packed_tensor("fp8", group, "float32", has_offset, (300, 640))
    packed = packed_array(tensor, getattr(torch, dtype))
    numbers = tensor.dequantize()
    wide = (numbers if rows < 16 else numbers.to(getattr(torch, dtype))).double().numpy()
    x = normal(rows, 640, dtype=dtype)
    wide_x = np.asarray(x, np.float64)
    exact = wide_x @ wide.T
    # a number with an offset may be rounded to the next
    allowed = (2.0**-8 if has_offset and dtype == "bfloat16" else 2.0**-18) * (np.abs(wide_x) @ np.abs(wide).T)
    if dtype == "bfloat16":
        allowed = allowed + 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8)  # half a unit in the last place
    got, _ = on_cpu(quantized.linear, x, packed)
    assert (np.abs(got - exact) <= allowed).all()
    together, _ = on_cpu(quantized.linear, x, packed, is_batch_invariant=True)
    alone, _ = on_cpu(quantized.linear, x[-1:], packed, is_batch_invariant=True)
    np.testing.assert_array_equal(alone[0], together[-1])


@pytest.mark.parametrize("width", [96, 160, 192, 2880])
@pytest.mark.parametrize(("encoding", "has_offset"), [("int4", True), ("fp4", False)])
def test_rows_of_4_bits_are_padded_to_whole_words(encoding, has_offset, width):
    """Beside the weight's numbers there are only zeros."""
    tensor = packed_tensor(encoding, 32, "bfloat16", has_offset, (40, width), permuted=True)
    packed = packed_array(tensor)
    assert packed.shape == (40, width)
    assert packed.num_columns > width
    np.testing.assert_array_equal(packed.dequantize(), tensor.dequantize())
    for rows in (1, 9):
        x = normal(rows, width)
        exact, allowed = exact_products(x, packed)
        got, chosen = on_cpu(quantized.linear, x, packed)
        assert any(KERNELS in way for way in chosen)
        assert (np.abs(got - exact) <= allowed).all()


@pytest.mark.parametrize(
    "form", [("int4", 32, "bfloat16", True), ("fp4", 32, "bfloat16", False), ("fp8", 128, "float32", False)], ids=str
)
@pytest.mark.parametrize("rows", [7, 90])
def test_each_row_gets_the_transposed_matrix_of_its_expert(form, rows):
    """Matrices that the model has as [in, out] are stored with the rows that are multiplied."""
    width = 256 if form[0] == "fp8" else 160
    tensor = dataclasses.replace(packed_tensor(*form, (5, 24, width)), is_transposed=True)
    packed = packed_array(tensor)
    assert packed.shape == (5, width, 24)
    numbers = tensor.dequantize().double().numpy()
    np.testing.assert_array_equal(packed.dequantize(), numbers)
    x, experts = normal(rows, width), jnp.asarray(np.random.default_rng(0).integers(0, 5, rows), jnp.int32)
    got, chosen = on_cpu(grouped_linear, x, packed, experts, is_transposed=True)
    assert any(KERNELS in way for way in chosen)
    expected = np.einsum("ri,rio->ro", np.asarray(x, np.float64), numbers[np.asarray(experts)])
    np.testing.assert_allclose(got, expected, atol=2.0**-14 * np.abs(x).max() * np.abs(numbers).sum(1).max())


@pytest.mark.parametrize(
    "form", [("int4", 32, "bfloat16", True), ("fp4", 32, "bfloat16", False), ("fp8", 128, "float32", True)], ids=str
)
def test_each_row_gets_the_stored_matrix_of_its_expert(form):
    packed = packed_array(packed_tensor(*form, (5, 24, 256), permuted=True))
    x, experts = normal(7, 256), jnp.array([4, 0, 0, 2, 4, 4, 1])
    got, chosen = on_cpu(grouped_linear, x, packed, experts)
    assert any(KERNELS in way for way in chosen)
    matrices = np.asarray(packed.dequantize(), np.float64)[np.asarray(experts)]
    expected = np.einsum("ri,roi->ro", np.asarray(x, np.float64), matrices)
    np.testing.assert_allclose(got, expected, atol=2.0**-14 * np.abs(x).max() * np.abs(matrices).sum(-1).max())
