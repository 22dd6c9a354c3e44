"""TPU's kernels for packed weights, interpreted, in each way that codes are multiplied."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from packed_weights import packed_array, packed_tensor

from hfax.kernels.experts import grouped_linear
from hfax.kernels.quantized import QuantizedArray, linear
from hfax.kernels.target import compiling_for
from hfax.kernels.tpu import products, quantized
from hfax.load.quantize import quantize

FORMS = [
    ("int8", 128, "float32", False),
    ("int8", 64, "bfloat16", True),
    ("int8", 16, "float32", False),
    ("int4", 128, "float32", True),
    ("int4", 64, "bfloat16", False),
    ("int4", 32, "float32", True),
    ("int4", 16, "float32", True),
    ("fp4", 64, "bfloat16", False),
    ("fp4", 32, "bfloat16", False),
    ("fp4", 16, "float32", False),
    ("fp8", 128, "float32", True),
    ("fp8", 32, "bfloat16", False),
]
WAYS = ["digits", "numbers", "weights"]


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def ways_of(encoding):
    return WAYS if encoding in ("int8", "int4") else WAYS[1:]


def as_multiplied(packed, way):
    """The weight as the products see it, [..., out, in] float64: only "weights" rounds it to bfloat16."""
    kept = dataclasses.replace(packed, dtype=jnp.dtype("bfloat16" if way == "weights" else "float32"))
    return np.asarray(kept.dequantize(), np.float64)


def made(bits, *shape):
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    return quantize(values, f"int{bits}", jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def product(x, packed, way, chip=None):
    parts = packed.values, packed.scale
    how = {"way": way, "chip": chip and products.abilities_of(chip), "interpret": True}
    return quantized.linear(x, *parts, encoding=packed.encoding, out_dtype=jnp.float32, **how)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 13, 200])
@pytest.mark.parametrize(("out", "width"), [(256, 512), (384, 1792), (128, 4096), (650, 512)])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_packed_product(bits, out, width, rows, way):
    packed = made(bits, out, width)
    assert quantized.fits(rows, packed.shape, packed.encoding, packed.group)
    x = normal(rows, width, seed=1).astype(jnp.bfloat16)
    expected = np.asarray(x, np.float64) @ as_multiplied(packed, way).T
    np.testing.assert_allclose(product(x, packed, way), expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("rows", "shape", "group"),
    [(1, (100, 512), 128), (1, (256, 320), 64), (1, (256, 128), 128)],
)
def test_packed_products_that_no_kernel_takes(rows, shape, group):
    assert not quantized.fits(rows, shape, "int8", group)


@pytest.mark.parametrize("chip", ["TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize(("form", "way"), [(form, way) for form in FORMS for way in ways_of(form[0])], ids=str)
def test_every_code_and_scale(form, way, chip):
    """-0, subnormal numbers, and scales from 2 ** -18 to 4 among them."""
    packed = packed_array(packed_tensor(*form[:3], False, (256, 512)))
    for rows in (1, 3, 20):
        x = normal(rows, 512, seed=1).astype(jnp.bfloat16)
        got, expected = product(x, packed, way, chip), np.asarray(x, np.float64) @ as_multiplied(packed, way).T
        np.testing.assert_allclose(got, expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("bits", [8, 4])
def test_more_rows_than_a_block_takes(bits):
    packed, x = made(bits, 128, 256), normal(2100, 256, seed=1).astype(jnp.bfloat16)
    assert quantized.fits(2100, packed.shape, packed.encoding, packed.group)
    expected = np.asarray(x, np.float64) @ as_multiplied(packed, "weights").T
    np.testing.assert_allclose(product(x, packed, "weights"), expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("chip", ["TPU v6 lite", "TPU7x"])
@pytest.mark.parametrize("way", ["numbers", "weights"])
def test_every_number_of_fp8(way, chip):
    """One at a time, by activations with a single 1; weights with NaN are not packed."""
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(2, 128).at[:, 127].set(0).repeat(64, axis=0)
    codes = jax.lax.bitcast_convert_type(jnp.concatenate([codes, codes], axis=1), jnp.float8_e4m3fn)
    packed = QuantizedArray(
        values=codes, scale=jnp.ones((128, 2), jnp.bfloat16), encoding="fp8", dtype=jnp.dtype("bfloat16")
    )
    got = product(jnp.eye(128, 256, dtype=jnp.bfloat16), packed, way, chip)
    np.testing.assert_array_equal(got, np.asarray(codes, np.float32)[:, :128].T)


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_any_size(way):
    """Rows are far apart, one has outliers, one is 0; infinities and NaN come through in their own rows."""
    packed, x = made(4, 128, 512), np.array(normal(8, 512, seed=1))
    x[0] *= 1e-30
    x[1] *= 1e30
    x[2, ::97] *= 2000
    x[3] = 0
    x[4, 5], x[5, 6] = np.inf, np.nan
    x[6] = 2.0 ** np.arange(512).clip(max=14)
    x = jnp.asarray(x, jnp.bfloat16)
    got, expected = (np.asarray(a, np.float64) for a in (product(x, packed, way), x @ as_multiplied(packed, way).T))
    assert not np.isfinite(got[4:6]).any()
    for row in (0, 1, 2, 3, 6, 7):
        np.testing.assert_allclose(got[row], expected[row], atol=1e-6 * np.abs(expected[row]).max())


def test_digits_of_bfloat16():
    """All significands, and all numbers of which no digit is lost."""
    x = jnp.asarray(np.outer([1.0, -1.0], 2.0 ** -np.arange(15)).reshape(30, 1) * (1 + np.arange(128) / 128))
    x = jnp.concatenate([x, jnp.full((30, 1), 1.9921875)], axis=1).astype(jnp.bfloat16)
    fixed, unit = products._fixed_point(x[None])
    digits = [(np.asarray(fixed) >> shift & 255) - 128.0 for shift in (16, 8, 0)]
    assert all(np.abs(d).max() <= 128 for d in digits)
    values = (digits[0] * 256 + digits[1]) * 256 + digits[2]
    np.testing.assert_array_equal((values * np.asarray(unit, np.float64))[0], np.asarray(x, np.float64))


@pytest.mark.parametrize(
    ("device", "rows", "encoding", "group", "expected"),
    [
        ("TPU v5 lite", 1, "int4", 32, "digits"),
        ("TPU v5", 16, "int4", 128, "digits"),
        ("TPU v5", 1, "int8", 128, "numbers"),
        ("TPU v6 lite", 17, "int8", 128, "numbers"),
        ("TPU v6 lite", 5, "int4", 32, "numbers"),
        ("TPU v6 lite", 129, "int8", 128, "weights"),
        ("TPU v6 lite", 33, "int4", 32, "weights"),
        ("TPU v6 lite", 1, "fp8", 128, "numbers"),
        ("TPU7x", 1, "int4", 128, "numbers"),
        ("TPU v4", 8, "int8", 128, "numbers"),
    ],
)
def test_the_way_follows_from_the_chip(device, rows, encoding, group, expected):
    kind = type("Device", (), {"platform": "tpu", "device_kind": device})()
    with compiling_for(kind):
        assert products.way_of(rows, encoding, group, quantized._chip()) == expected


@pytest.mark.parametrize(
    ("out", "width", "rows"),
    [
        (256, 512, 1),
        (128, 4096, 7),
        (650, 768, 1),
        (256, 512, 300),
        *(
            pytest.param(*shape, marks=pytest.mark.sweep)
            for shape in ((256, 512, 7), (128, 4096, 1), (128, 4096, 300), (650, 768, 7), (650, 768, 300))
        ),
    ],
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_experts(bits, way, out, width, rows):
    packed = made(bits, 5, out, width)
    assert quantized.fits_experts(packed.shape, packed.encoding, packed.group)
    x, chosen = normal(rows, width, seed=1).astype(jnp.bfloat16), np.random.default_rng(2).integers(0, 6, rows)
    got = quantized.experts_linear(
        x, packed.values, packed.scale, jnp.asarray(chosen), encoding=packed.encoding, way=way, interpret=True
    )
    is_real = chosen < 5  # the others belong to nobody here
    expected = np.einsum("ri,roi->ro", np.asarray(x, np.float64)[is_real], as_multiplied(packed, way)[chosen[is_real]])
    np.testing.assert_allclose(got[is_real], expected, atol=1e-6 * np.abs(expected).max(initial=1))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("shape", [(256, 512), (5, 256, 512)], ids=["linear", "experts"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_stored_weights(monkeypatch, form, shape, rows):
    """Groups that share words, offsets, columns in another order."""
    for name in ("linear", "experts_linear"):
        monkeypatch.setattr(quantized, name, functools.partial(getattr(quantized, name), interpret=True))
    packed = packed_array(packed_tensor(*form, shape, permuted=True))
    x, numbers = normal(rows, 512, seed=1).astype(jnp.bfloat16), np.asarray(packed.dequantize(), np.float64)
    with compiling_for("tpu") as where:
        if len(shape) == 2:
            got, expected = jax.jit(linear)(x, packed), np.asarray(x, np.float64) @ numbers.T
        else:
            experts = np.random.default_rng(2).integers(0, 5, rows)
            got = jax.jit(grouped_linear)(x, packed, jnp.asarray(experts))
            expected = np.einsum("ri,roi->ro", np.asarray(x, np.float64), numbers[experts])
    assert all(f"Pallas kernel ({form[0]} weights)" in way for way in where.chosen)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=2.0**-7 * np.abs(expected).max())
