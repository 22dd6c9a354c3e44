"""The C++ kernels against products and attention in float64 and plain JAX, on every instruction set that the processor has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import hfax.patches.norms  # noqa: F401 - defines torch.ops.hfax.rotate
from hfax.kernels import norms
from hfax.kernels.attention import attention
from hfax.kernels.cache_write import cache_write
from hfax.kernels.cpu import calls, library
from hfax.kernels.experts import grouped_linear
from hfax.kernels.linear import linear
from hfax.kernels.target import compiling_for

from .cpu_programs import KERNELS, normal, on_cpu

pytestmark = pytest.mark.usefixtures("instruction_set")


@pytest.mark.parametrize(
    ("dtype", "rows"),
    [(dtype, rows) for dtype in ("float32", "bfloat16") for rows in (1, 2, 3, 5, 8, 16)]
    + [("bfloat16", rows) for rows in (33, 50, 150, 550)],
)
@pytest.mark.parametrize(("out", "width"), [(64, 128), (7, 100), (130, 1024), (1, 33), (96, 8192)])
def test_linear_agrees_with_a_product_in_float64(dtype, rows, out, width):
    x, weight = normal(rows, width, dtype=dtype), normal(out, width, dtype=dtype, seed=1)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    got, chosen = on_cpu(linear, x, weight)
    assert any(KERNELS in way for way in chosen)
    rounding = 2.0**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(got, exact, atol=rounding * np.abs(exact).max())


@pytest.mark.parametrize(
    ("dtype", "of_weight"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("shape", [(1, 1024), (5, 48), (16, 128), (3, 16), (700, 128)])
def test_norm_agrees_with_one_in_float64(dtype, of_weight, shape):
    x, weight = normal(*shape, dtype=dtype), normal(shape[1], dtype=of_weight, seed=1)
    wide = np.asarray(x, np.float64)
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * np.asarray(weight, np.float64)
    got, chosen = on_cpu(lambda x, w: norms.rms_norm(x, w, 1e-3), x, weight)
    assert chosen == {"norm: C++ kernel"}
    np.testing.assert_allclose(got, exact, rtol=2.0**-8 if dtype == "bfloat16" else 1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 17), (4, 0)])
def test_norm_of_other_widths_is_left_to_xla(shape):
    got, chosen = on_cpu(lambda x, w: norms.rms_norm(x, w, 1e-6), normal(*shape), jnp.ones(shape[1]))
    assert got.shape == shape
    assert not chosen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_finite_stays_so_in_norm_and_rotation(dtype):
    x = normal(3, 64, dtype=dtype).at[0, 3].set(jnp.nan).at[1, 5].set(jnp.inf)
    got, _ = on_cpu(lambda x, w: norms.rms_norm(x, w, 1e-6), x, jnp.ones(64, dtype))
    assert np.isnan(got[0]).all()
    assert np.isnan(got[1, 5])
    assert np.isfinite(got[2]).all()
    ones = jnp.ones((1, 1, 3, 64), dtype)
    turned, chosen = on_cpu(norms.rotate, x[None, None], ones, ones)
    assert chosen
    assert np.isnan(turned[0, 0, 0, [3, 35]]).all()
    assert np.isfinite(turned[0, 0, 0, 4])
    assert not np.isfinite(turned[0, 0, 1, [5, 37]]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "batch"),
    [((1, 16, 1, 128), 1), ((3, 2, 5, 64), 3), ((3, 2, 5, 32), 1), ((2, 3, 4, 22), 2), ((2, 3, 200, 64), 2)],
)
def test_rotation_is_torchs(dtype, shape, batch):
    x = normal(*shape, dtype=dtype)
    angles = np.random.default_rng(2).uniform(0, 6, (batch, 1, *shape[2:]))  # the halves need not be the same
    cos, sin = jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)
    got, chosen = on_cpu(norms.rotate, x, cos, sin)
    assert chosen == {"rotary embedding: C++ kernel"}
    tensors = (torch.from_numpy(np.array(a, np.float32)).to(getattr(torch, dtype)) for a in (x, cos, sin))
    with_torch = torch.ops.hfax.rotate(*tensors).float().numpy()
    if dtype == "bfloat16":  # rounded after the same steps
        np.testing.assert_array_equal(got, with_torch)
    else:
        np.testing.assert_allclose(got, with_torch, atol=1e-6)
    plainly = np.asarray(norms.rotate(x, cos, sin), np.float32)
    np.testing.assert_allclose(got, plainly, atol=2.0**-6 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_and_rotation_of_a_row_do_not_depend_on_the_other_rows(dtype):
    """Above 65,536 numbers they were XLA's, which rounds at other steps."""
    x, weight = normal(1100, 64, dtype=dtype), normal(64, dtype=dtype, seed=1)
    cos, sin = normal(1, 1, 1100, 64, dtype=dtype, seed=2), normal(1, 1, 1100, 64, dtype=dtype, seed=3)
    normed, _ = on_cpu(lambda x, w: norms.rms_norm(x, w, 1e-6), x, weight)
    turned, _ = on_cpu(norms.rotate, x[None, None], cos, sin)
    for rows in (1, 7, 300):
        few, _ = on_cpu(lambda x, w: norms.rms_norm(x, w, 1e-6), x[:rows], weight)
        np.testing.assert_array_equal(normed[:rows], few)
        few, _ = on_cpu(norms.rotate, x[None, None, :rows], cos[:, :, :rows], sin[:, :, :rows])
        np.testing.assert_array_equal(turned[:, :, :rows], few)


@pytest.mark.parametrize("width", [1, 2, 8, 33, 1000])
def test_a_rows_sum_does_not_depend_on_the_other_rows(width):
    x = normal(300, width, dtype="float32")
    sums = np.asarray(jax.jit(calls.row_sums)(x))
    np.testing.assert_allclose(sums, np.asarray(x, np.float64).sum(1), atol=1e-5 * width**0.5)
    for rows in (1, 4, 7):
        np.testing.assert_array_equal(np.asarray(jax.jit(calls.row_sums)(x[:rows])), sums[:rows])


def test_exponentials_are_float32s_and_the_same_at_every_place():
    x = np.concatenate([np.linspace(-87, 88.7, 10_007), [0.0, -0.0, 88.73, -104.0, np.inf, -np.inf, np.nan]])
    x = x.astype(np.float32)
    found = np.asarray(jax.jit(calls.exp)(x))
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(found, np.exp(x.astype(np.float64)).astype(np.float32), rtol=2e-7)
    for count in (1, 5, 15, 17):
        np.testing.assert_array_equal(np.asarray(jax.jit(calls.exp)(x[-count:])), found[-count:])


@pytest.mark.parametrize("rows", [3, 7, 16, 17, 40, 64, 100])
def test_a_row_of_several_gives_the_same_sums_whatever_stands_beside_it(rows):
    x, weight = normal(100, 514, dtype="bfloat16"), normal(97, 514, dtype="bfloat16", seed=1)
    few, _ = on_cpu(linear, x[:2], weight)
    among, _ = on_cpu(linear, x[:rows], weight)
    np.testing.assert_array_equal(among[:2], few)


def with_gradients(function, *args):
    """What a program through which gradients are taken gives, the gradients for an output's gradient, and the ways chosen."""
    with compiling_for("cpu", is_differentiated=True) as where:

        def run(*args):
            out, pull = jax.vjp(function, *args)
            return out, pull(normal(*out.shape, dtype=out.dtype, seed=9))

        out, gradients = jax.jit(run)(*args)
        has_kernels = library.has_matmul()
    assert any(KERNELS in way for way in where.chosen) == has_kernels
    return np.asarray(out, np.float64), [np.asarray(g, np.float64) for g in gradients]


def assert_rounded(got, exact):
    np.testing.assert_allclose(got, exact, atol=2.0**-7 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("rows", "out", "width"),
    [(1, 1, 1), (7, 65, 3), (192, 192, 320), (193, 385, 321), (500, 70, 2048), (40, 300, 770), (530, 150, 1100)],
)
def test_a_products_gradients_agree_with_float64(rows, out, width):
    x, weight = normal(rows, width, dtype="bfloat16"), normal(out, width, dtype="bfloat16", seed=1)
    got, (for_x, for_weight) = with_gradients(linear, x, weight)
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    gradient = np.asarray(normal(rows, out, dtype="bfloat16", seed=9), np.float64)
    assert_rounded(got, x @ weight.T)
    assert_rounded(for_x, gradient @ weight)
    assert_rounded(for_weight, gradient.T @ x)


@functools.cache
def attention_in_float32(heads, kv_heads, queries, keys, width, softcap, kind):
    """Query, key and value in bfloat16, a mask, and what plain JAX gives for them in float32: attention, and its gradients."""
    query = normal(2, heads, queries, width, dtype="bfloat16")
    key = normal(2, kv_heads, keys, width, dtype="bfloat16", seed=1)
    value = normal(2, kv_heads, keys, 24, dtype="bfloat16", seed=2)
    mask = None
    if kind != "none":
        seen = np.random.default_rng(3).random((2, heads, queries, keys)) < 0.4
        seen = np.tril(np.ones((1, 1, queries, keys), bool)) if kind == "causal" else seen
        seen[:, :, 5] = False  # sees nothing
        mask = jnp.asarray(seen)

    def run(*args):
        out, pull = jax.vjp(lambda *args: attention(*args, mask, scale=0.2, softcap=softcap)[0], *args)
        return out, pull(normal(*out.shape, dtype="bfloat16", seed=9).astype(jnp.float32))

    out, gradients = jax.jit(run)(*(x.astype(jnp.float32) for x in (query, key, value)))
    return (query, key, value), mask, np.asarray(out), [np.asarray(g) for g in gradients]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "keys", "width", "softcap", "kind"),
    [  # every pair of values at least once
        (4, 4, 100, 100, 64, None, "causal"),
        (4, 2, 100, 100, 64, 5.0, "random"),
        (6, 1, 100, 100, 64, None, "none"),
        (4, 4, 37, 200, 40, 5.0, "none"),
        (4, 2, 37, 200, 40, None, "causal"),
        (6, 1, 37, 200, 40, 5.0, "random"),
        (4, 4, 200, 130, 10, None, "random"),
        (4, 2, 200, 130, 10, 5.0, "none"),
        (6, 1, 200, 130, 10, 5.0, "causal"),
    ],
)
def test_attention_of_a_prompt_and_its_gradients(heads, kv_heads, queries, keys, width, softcap, kind):
    inputs, mask, expected, gradients = attention_in_float32(heads, kv_heads, queries, keys, width, softcap, kind)
    run = lambda *args: attention(*args, mask, scale=0.2, softcap=softcap)[0]  # noqa: E731
    got, found = with_gradients(run, *inputs)
    assert_rounded(got, expected)
    for own, exact in zip(found, gradients, strict=True):
        assert_rounded(own, exact)
    alone, ways = on_cpu(run, *inputs)
    assert_rounded(alone, expected)
    if any(KERNELS in way for way in ways):
        # one kernel for both, where XLA fuses, and so rounds, each program in its own way
        np.testing.assert_array_equal(alone, got.astype(np.float32))
    if mask is not None:
        assert (got[:, 5] == 0).all()


def test_bias_is_added_before_rounding():
    x, weight, bias = (
        normal(4, 64, dtype="bfloat16"),
        normal(8, 64, dtype="bfloat16", seed=1),
        normal(8, dtype="bfloat16"),
    )
    got, _ = on_cpu(linear, x, weight, bias)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T + np.asarray(bias, np.float64)
    np.testing.assert_allclose(
        got, np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float32), atol=2.0**-7 * np.abs(exact).max()
    )


def test_many_rows_and_unknown_targets_use_xla():
    x, weight = normal(64, 32), normal(8, 32)
    _, chosen = on_cpu(linear, x, weight)
    assert not any(KERNELS in way for way in chosen)
    assert "custom_call" not in jax.jit(linear).lower(x[:2], weight).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
def test_attention_over_a_cache(dtype, heads, kv_heads, queries, options):
    capacity, width = 200, 40
    query = normal(2, heads, queries, width, dtype=dtype)
    key, value = (
        normal(2, kv_heads, capacity, width, dtype=dtype, seed=1),
        normal(2, kv_heads, capacity, 24, dtype=dtype, seed=2),
    )
    # padding in front, the text's end long before the capacity's, and one query that sees nothing
    places = np.arange(capacity)
    mask = np.stack([(places >= 9) & (places < 120), (places >= 70) & (places < 71)])[:, None, None].repeat(queries, 2)
    mask[1, 0, 0] = False
    options = {n: normal(heads, seed=3) if n == "sinks" else v for n, v in options.items()}
    expected = np.asarray(attention(query, key, value, jnp.asarray(mask), scale=0.2, **options)[0], np.float32)
    got, chosen = on_cpu(lambda *a: attention(*a, scale=0.2, **options)[0], query, key, value, jnp.asarray(mask))
    assert any(KERNELS in way for way in chosen)
    np.testing.assert_allclose(got, expected, atol=2e-2 if dtype == "bfloat16" else 2e-6)
    assert (got[1, 0] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("width", "value_width"), [(64, 32), (40, 24), (9, 5)])
@pytest.mark.parametrize("queries", [1, 3])
def test_attention_over_a_cache_of_float8(dtype, width, value_width, queries):
    """Every number of float8 is among the keys: its bits become the number that it stands for."""
    heads, kv_heads, capacity = 4, 2, 150
    query = normal(2, heads, queries, width, dtype=dtype)
    bits = np.arange(2 * kv_heads * capacity * width, dtype=np.uint64).reshape(2, kv_heads, capacity, width) * 37 % 256
    bits = np.where(bits % 128 == 127, 1, bits).astype(np.uint8)  # those are not numbers
    key = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float8_e4m3fn)
    value = normal(2, kv_heads, capacity, value_width, seed=2).astype(jnp.float8_e4m3fn)
    mask = jnp.asarray(np.random.default_rng(3).random((2, 1, queries, capacity)) < 0.7)
    as_floats = [held.astype(dtype) for held in (key, value)]
    run = lambda query, mask, *held: attention(query, *as_floats, mask, scale=1e-3, held=held)[0]  # noqa: E731
    expected = np.asarray(attention(query, *as_floats, mask, scale=1e-3)[0], np.float32)
    got, chosen = on_cpu(run, query, mask, key, value)
    assert any(KERNELS in way for way in chosen)
    np.testing.assert_allclose(got, expected, atol=2e-2 if dtype == "bfloat16" else 2e-6)


def test_attention_takes_masks_by_head():
    query, key, value = normal(1, 4, 1, 16), normal(1, 2, 70, 16, seed=1), normal(1, 2, 70, 16, seed=2)
    mask = jnp.asarray(np.random.default_rng(3).random((1, 4, 1, 70)) < 0.5)
    got, chosen = on_cpu(lambda *a: attention(*a, scale=0.3)[0], query, key, value, mask)
    assert any(KERNELS in way for way in chosen)
    np.testing.assert_allclose(got, attention(query, key, value, mask, scale=0.3)[0], atol=2e-6)


@pytest.mark.parametrize("start", [0, 5, 14, 99])
def test_cache_write_is_a_dynamic_update_slice(start):
    buffer, new = normal(2, 3, 16, 8, dtype="bfloat16"), normal(2, 3, 2, 8, dtype="bfloat16", seed=1)
    expected = jax.lax.dynamic_update_slice_in_dim(buffer, new, start, axis=2)
    got, chosen = on_cpu(cache_write, buffer, new, jnp.int32(start))
    assert any(KERNELS in way for way in chosen)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_each_row_gets_the_matrix_of_its_expert(dtype, rows):
    x, weight = normal(rows, 96, dtype=dtype), normal(6, 50, 96, dtype=dtype, seed=1)
    experts = jnp.asarray(np.random.default_rng(2).integers(0, 6, rows), jnp.int32)
    exact = np.einsum("ri,roi->ro", np.asarray(x, np.float64), np.asarray(weight, np.float64)[np.asarray(experts)])
    got, chosen = on_cpu(grouped_linear, x, weight, experts)
    assert any(KERNELS in way for way in chosen)
    rounding = 2.0**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(got, exact, atol=rounding * np.abs(exact).max())


def test_an_expert_that_is_not_there_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such expert"):
        on_cpu(grouped_linear, normal(2, 8), normal(3, 4, 8), jnp.array([0, 3]))
