"""The kernels of GPUs. Without one Triton kernels are interpreted, and cuDNN's attention is computed by XLA, which takes the same
arguments; `make test-gpu` runs them on the GPU that is there.

What XLA's GPU compiler makes of them is in tests/planning/test_gpu_topology.py.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from packed_weights import FORMATS, packed_array, packed_tensor

from hfax.kernels.attention import Causal, Mask, Segments, attention, causal_positions
from hfax.kernels.encodings import BITS, FP4_VALUES
from hfax.kernels.gpu import cudnn, experts, flash, quantized, ranges
from hfax.kernels.gpu.codes import LIFT, as_float32, bias_of, exponent_of, number_bits
from hfax.kernels.linear import linear
from hfax.kernels.target import compiling_for
from hfax.load.quantize import quantize

ON_GPU = jax.default_backend() == "gpu"
INTERPRET = not ON_GPU


@pytest.fixture(autouse=True)
def float32_products():
    """What is expected is computed in float32, on a GPU too."""
    with jax.default_matmul_precision("highest"):
        yield


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("window", [None, 1, 10])
@pytest.mark.parametrize("padding", [None, [0, 13], [39, 1]])
def test_prompts(window, padding):
    length = 40
    query, key, value = normal(2, 4, length, 16), normal(2, 2, length, 16, seed=1), normal(2, 2, length, 16, seed=2)
    mask = causal_positions(length, length)
    if window is not None:
        mask = mask & (jnp.arange(length)[None, :] > jnp.arange(length)[:, None] - window)
    is_real = None
    mask = jnp.broadcast_to(mask, (2, 1, length, length))
    rows = jnp.ones((2, length, 1, 1))
    if padding is not None:
        is_real = (jnp.arange(length)[None] >= jnp.array(padding)[:, None]).astype(jnp.int32)
        mask, rows = mask & (is_real[:, None, None, :] != 0), is_real[:, :, None, None]
    expected, _ = attention(query, key, value, mask, scale=0.3)
    got = cudnn.prompt_attention(query, key, value, is_real, scale=0.3, window=window, implementation="xla")
    np.testing.assert_allclose(got * rows, expected * rows, atol=1e-5)


def test_what_cudnn_takes():
    half = [normal(1, 4, 8, 64, dtype=jnp.bfloat16)] * 3
    assert cudnn.fits(*half)
    assert not cudnn.fits(*[array.astype(jnp.float32) for array in half])
    assert not cudnn.fits(half[0][:, :, :1], *half[1:])  # a decoding step
    assert not cudnn.fits(*[normal(1, 4, 8, 256, dtype=jnp.bfloat16)] * 3)


def a_step(batch=3, heads=8, kv_heads=2, tokens=1, capacity=1024, widths=(64, 64), dtype="bfloat16", cache_dtype=None):
    """A query, a cache of which each sequence has filled another part after its padding, and the mask."""
    query = normal(batch, heads, tokens, widths[0], dtype=jnp.dtype(dtype))
    key, value = (normal(batch, kv_heads, capacity, n, seed=n).astype(cache_dtype or dtype) for n in widths)
    last = (
        jnp.linspace(capacity - 2, capacity // 9, batch).astype(int)[:, None, None]
        - tokens
        + jnp.arange(tokens)[:, None]
    )
    first = jnp.linspace(0, capacity // 10, batch).astype(int)[:, None, None]
    keys = jnp.arange(capacity)
    return query, key, value, ((keys >= first) & (keys <= last))[:, None]


@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize(
    ("step", "softcap", "has_sinks"),
    [
        ({}, None, False),
        ({"capacity": 130}, None, True),  # one program reads all keys
        ({"capacity": 2000}, 5.0, True),
        ({"heads": 6, "widths": (80, 80), "tokens": 3}, None, False),
        ({"heads": 8, "kv_heads": 8, "widths": (192, 128), "tokens": 16, "capacity": 700}, None, True),
        ({"heads": 71, "kv_heads": 1, "dtype": "float16", "tokens": 5}, None, False),
        ({"dtype": "float32", "tokens": 2}, None, False),
        ({"cache_dtype": "float8_e4m3fn", "capacity": 700}, None, False),
        ({"cache_dtype": "float8_e4m3fn", "dtype": "float32", "capacity": 100}, 3.0, True),
    ],
    ids=str,
)
def test_a_step_reads_the_keys_that_it_sees(step, softcap, has_sinks, is_contiguous):
    query, key, value, mask = a_step(**step)
    if not is_contiguous:  # as in a ring of the last tokens
        mask = mask & (jnp.arange(mask.shape[3]) % 7 != 3)
    sinks = 3 * normal(query.shape[1]) if has_sinks else None
    exact = [array.astype(jnp.float32) for array in (query, key, value)]
    expected, _ = attention(*exact, mask, scale=0.3, softcap=softcap, sinks=sinks)
    options = {"scale": 0.3, "softcap": softcap, "is_contiguous": is_contiguous, "interpret": INTERPRET}
    assert ranges.fits(query, key, value)
    got = ranges.cache_attention(query, key, value, mask, sinks, **options)
    assert got.dtype == query.dtype
    tolerance = 1e-5 if query.dtype == jnp.float32 else 2.0**-6
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=tolerance)


def test_keys_before_and_after_those_that_are_seen_are_not_read():
    query, key, value, _ = a_step()
    places = jnp.arange(1024)
    mask = jnp.broadcast_to((places >= 130) & (places < 400), (3, 1, 1, 1024))
    expected, _ = attention(*(array.astype(jnp.float32) for array in (query, key, value)), mask, scale=0.3)
    is_read = ((places >= 128) & (places < 448))[:, None]  # in blocks of 64
    key, value = (jnp.where(is_read, array, jnp.nan) for array in (key, value))
    got = ranges.cache_attention(query, key, value, mask, scale=0.3, interpret=INTERPRET)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=2.0**-6)


@pytest.mark.parametrize("lengths", [[200, 57, 300], [64] * 9, [5, 1, 1, 90]], ids=str)
@pytest.mark.parametrize("width", [64, 80])
def test_segments_of_packed_images(lengths, width):
    ids = jnp.repeat(jnp.arange(len(lengths)) * 3, jnp.array(lengths))
    query, key, value = (normal(1, n, len(ids), width, seed=n, dtype=jnp.bfloat16) for n in (4, 2, 2))
    exact = [array.astype(jnp.float32) for array in (query, key, value)]
    expected, _ = attention(*exact, (ids[:, None] == ids)[None, None], scale=0.1)
    seen = jnp.stack(Segments(ids=ids, longest=max(lengths)).ranges())[None]
    got = ranges.segment_attention(query, key, value, seen, scale=0.1, is_local=False, interpret=INTERPRET)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=2.0**-6)


def test_a_token_that_sees_nothing():
    query, key, value, mask = a_step(capacity=100)
    got = ranges.cache_attention(
        query, key, value, mask & (jnp.arange(3) != 1)[:, None, None, None], scale=0.3, interpret=INTERPRET
    )
    assert not got[1].any()
    assert got[0].any()


def test_the_caches_that_the_kernel_of_steps_takes():
    query, key, value, _ = a_step(batch=1)
    assert ranges.fits(query, key, value)
    assert ranges.fits(query, *(array.astype("float8_e4m3fn") for array in (key, value)))
    assert not ranges.fits(query, key.astype(jnp.float32), value)
    assert not ranges.fits(
        query.astype(jnp.float64) if jax.config.jax_enable_x64 else query.astype(jnp.int32), key, value
    )
    assert not ranges.fits(*a_step(batch=1, widths=(320, 64))[:3])
    assert not ranges.fits(*a_step(batch=1, heads=129, kv_heads=1)[:3])
    many = jax.ShapeDtypeStruct((1 << 14, 2, 1024, 64), jnp.bfloat16)
    assert not ranges.fits(query, many, many)


def test_the_kernel_of_steps_lowers_for_a_gpu():
    step = functools.partial(ranges.cache_attention, scale=0.3)
    lowered = jax.jit(step).trace(*a_step(capacity=4096)).lower(lowering_platforms=("cuda",))
    assert "xla.gpu.triton" in lowered.as_text()


@pytest.mark.parametrize(
    ("length", "widths", "window", "softcap", "padding", "has_sinks"),
    [
        (40, (64, 64), None, None, None, False),
        (200, (128, 128), 50, None, [0, 130], False),
        (100, (80, 80), None, 20.0, [3, 99], False),
        (130, (64, 64), 8, None, None, True),
        (70, (192, 128), None, None, [0, 5], True),
        (65, (256, 256), None, 5.0, None, False),
    ],
)
def test_prompts_by_the_triton_kernel(length, widths, window, softcap, padding, has_sinks):
    width, value_dim = widths
    shapes = ((2, 4, length, width), (2, 2, length, width), (2, 2, length, value_dim))
    query, key, value = (normal(*shape, seed=n, dtype=jnp.bfloat16) for n, shape in enumerate(shapes))
    assert flash.fits(query, key, value)
    sinks = normal(4) if has_sinks else None
    rows, columns = jnp.arange(length)[:, None], jnp.arange(length)
    seen = (columns <= rows) & (columns > rows - (window or length))
    is_real = None if padding is None else jnp.arange(length)[None] >= jnp.array(padding)[:, None]
    real = 1 if is_real is None else is_real[:, :, None, None]
    seen = jnp.broadcast_to(seen, (2, 1, length, length)) & (True if is_real is None else is_real[:, None, None, :])
    exact = [array.astype(jnp.float32) for array in (query, key, value)]
    expected, _ = attention(*exact, seen, scale=0.2, softcap=softcap, sinks=sinks)
    options = {"scale": 0.2, "window": window, "softcap": softcap}
    got = flash.flash_attention(query, key, value, is_real, sinks, **options, interpret=INTERPRET)
    assert got.dtype == query.dtype
    np.testing.assert_allclose(got.astype(jnp.float32) * real, expected * real, atol=2.0**-6)


@pytest.mark.parametrize("rows", [1, 2, 17, 32])
@pytest.mark.parametrize(
    ("shape", "bits"),
    [((64, 256), 8), ((48, 384), 8), ((64, 256), 4), ((128, 1024), 4), ((32, 8192), 8), ((32, 8192), 4)],
)
def test_packed_weights_by_the_triton_kernel(rows, shape, bits):
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))
    packed = quantize(weight, f"int{bits}", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert quantized.fits(rows, packed.shape, packed.encoding, packed.group)
    x = normal(rows, shape[1], dtype=jnp.bfloat16)
    got = quantized.linear(
        x, packed.values, packed.scale, encoding=packed.encoding, out_dtype=jnp.float32, interpret=INTERPRET
    )
    scale = np.repeat(np.asarray(packed.scale, np.float64), packed.group, axis=1)
    expected = np.asarray(x, np.float64) @ (np.asarray(packed.numbers(), np.float64) * scale).T
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("encoding", "at"),
    [(encoding, at) for encoding, bits in BITS.items() for at in range(0, 32, bits)],
)
def test_codes_are_the_bits_of_numbers(encoding, at):
    """The compiled kernels take these bits as they are. Interpreted ones do not: XLA's CPU code takes subnormal numbers as 0."""
    rng, bits = np.random.default_rng(0), BITS[encoding]
    codes = np.arange(1 << bits, dtype=np.uint32)
    others = rng.integers(0, 1 << 32, codes.shape, np.uint32) & ~np.uint32(((1 << bits) - 1) << at)
    found = np.asarray(number_bits(jnp.asarray((others | codes << at).view(np.int32)), at, encoding))
    got = found.view(np.float32).astype(np.float64) * 2.0 ** exponent_of(encoding, at) - bias_of(encoding)
    if encoding in ("fp8", "fp4"):
        table = codes.astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float64) if encoding == "fp8" else FP4_VALUES
        is_number = np.isfinite(table)
        np.testing.assert_array_equal(got[is_number], np.asarray(table)[is_number])
    else:
        order = codes.astype(np.uint8).view(np.int8) if encoding == "int8" else codes.astype(np.int8) - 8
        np.testing.assert_array_equal(got, order)
    lifted = np.asarray(as_float32(jnp.asarray(found), interpret=True), np.float64) * 2.0 ** (
        exponent_of(encoding, at) - LIFT
    )
    np.testing.assert_array_equal(lifted - bias_of(encoding), got)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", [form for form in FORMATS if not form[3]], ids=str)
def test_stored_weights_by_the_triton_kernels(form, dtype, rows):
    x = normal(rows, 512, dtype=jnp.dtype(dtype))
    exact, chosen = np.asarray(x, np.float64), np.random.default_rng(2).integers(0, 3, rows)
    one, several = (packed_array(packed_tensor(*form, shape)) for shape in ((64, 512), (3, 64, 512)))
    assert quantized.fits(rows, one.shape, one.encoding, one.group)
    assert experts.fits_packed(x, several.shape, several.encoding, several.group)
    options = {"encoding": form[0], "interpret": INTERPRET}
    got = quantized.linear(x, one.values, one.scale, out_dtype=jnp.float32, **options)
    expected = exact @ np.asarray(one.dequantize(), np.float64).T
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())
    got = experts.grouped_linear_packed(x, several.values, several.scale, jnp.asarray(chosen), **options)
    expected = np.einsum("ri,roi->ro", exact, np.asarray(several.dequantize(), np.float64)[chosen])
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("rows", [5, 200])
def test_experts_by_the_triton_kernel(rows, is_transposed):
    weight = normal(3, 48, 80, dtype=jnp.bfloat16)
    x, chosen = normal(rows, 80, seed=1, dtype=jnp.bfloat16), np.random.default_rng(2).integers(0, 4, rows)
    given = weight.swapaxes(1, 2) if is_transposed else weight
    assert experts.fits(x, given, is_transposed=is_transposed)
    got = experts.grouped_linear(x, given, jnp.asarray(chosen), is_transposed=is_transposed, interpret=INTERPRET)
    is_here = chosen < 3  # others belong to another device
    exact = np.asarray(x, np.float64)[is_here], np.asarray(weight, np.float64)[chosen[is_here]]
    np.testing.assert_allclose(got[is_here], np.einsum("ri,roi->ro", *exact), atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [5, 200])
def test_packed_experts_by_the_triton_kernel(rows, bits):
    weight = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 48, 256), np.float32))
    packed = quantize(weight, f"int{bits}", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    x, chosen = normal(rows, 256, seed=1, dtype=jnp.bfloat16), np.random.default_rng(2).integers(0, 4, rows)
    assert experts.fits_packed(x, packed.shape, packed.encoding, packed.group)
    got = experts.grouped_linear_packed(
        x, packed.values, packed.scale, jnp.asarray(chosen), encoding=packed.encoding, interpret=INTERPRET
    )
    is_here = chosen < 3
    scale = np.repeat(np.asarray(packed.scale, np.float64), packed.group, axis=2)
    numbers = np.asarray(packed.numbers(), np.float64) * scale
    expected = np.einsum("ri,roi->ro", np.asarray(x, np.float64)[is_here], numbers[chosen[is_here]])
    np.testing.assert_allclose(got[is_here], expected, atol=1e-5 * np.abs(expected).max())


def test_products_that_the_kernel_of_packed_weights_does_not_take():
    assert quantized.fits(32, (64, 256), "int4", 128)
    assert not quantized.fits(33, (64, 256), "int4", 128)
    assert quantized.fits(128, (64, 256), "int8", 128)
    assert quantized.fits(1, (64, 256), "int8", 64)
    assert not quantized.fits(1, (64, 256), "int8", 256)
    assert not quantized.fits(1, (64, 192), "int8", 64)
    x = jnp.zeros(
        (4, 3072), jnp.bfloat16
    )  # gpt-oss-120b's experts have more codes than a 32-bit index counts, and fewer words
    assert experts.fits_packed(x, (128, 5760, 3072), "fp4", 32)
    assert not experts.fits_packed(x, (128, 5760, 3072), "fp8", 32)
    assert not quantized.fits(1, (72, 256), "int8", 128)
    with pytest.raises(ValueError, match="no kernel for 129 rows"):
        quantized.linear(
            jnp.zeros((129, 256), jnp.bfloat16),
            jnp.zeros((64, 256), jnp.int8),
            jnp.ones((64, 2), jnp.bfloat16),
            encoding="int8",
            out_dtype=jnp.float32,
        )


TRIALS = {
    **{
        f"step {cache}": (
            ranges,
            ["cache_attention", "pages_attention"],
            ranges.works,
            jnp.dtype("bfloat16"),
            jnp.dtype(cache),
        )
        for cache in ("bfloat16", "float8_e4m3fn")
    },
    "prompt": (flash, ["flash_attention"], flash.works),
    "experts": (experts, ["grouped_linear"], experts.works, None, jnp.dtype("float16")),
    **{
        f"{encoding} {name}": (module, [name], module.works, encoding, jnp.dtype("bfloat16"))
        for encoding in BITS
        for module, name in ((quantized, "linear"), (experts, "grouped_linear_packed"))
    },
}


@pytest.mark.parametrize(
    ("kernel", "wrong", "works"),
    [(kernel, None, ON_GPU) for kernel in TRIALS]
    + [(kernel, wrong, False) for kernel, (_, names, *_) in TRIALS.items() for wrong in names]
    + [(kernel, "", True) for kernel in TRIALS],
)
def test_kernels_are_tried_before_programs_use_them(monkeypatch, caplog, kernel, wrong, works):
    """Within a trace, as programs ask; a kernel that fails, as here without a GPU, or that gives other values is left out."""
    module, names, trial, *arguments = TRIALS[kernel]
    for name in names if wrong is not None else ():
        factor, interpreted = 1.5 if name == wrong else 1, functools.partial(getattr(module, name), interpret=INTERPRET)
        monkeypatch.setattr(
            module, name, lambda *a, run=interpreted, factor=factor, **options: run(*a, **options) * factor
        )
    found = []
    trial.cache_clear()
    try:
        jax.jit(lambda x: found.append(trial(*arguments)) or x)(1.0)
    finally:
        trial.cache_clear()
    assert found == [works]
    assert bool(caplog.records) != works


class Device(SimpleNamespace):
    """What programs ask of a device."""

    __hash__ = object.__hash__


DESCRIBED = Device(platform="gpu", device_kind="NVIDIA H100", client=type("CompileOnlyPyClient", (), {})())


@pytest.mark.parametrize(
    ("device", "has_kernel"),
    [
        (DESCRIBED, True),
        (Device(platform="rocm", device_kind="AMD Instinct MI300X", client=DESCRIBED.client), False),
        (Device(platform="gpu", device_kind="Tesla V100", client=None, compute_capability="7.0"), False),
        (Device(platform="gpu", device_kind="NVIDIA V100", client=None, compute_capability="7.0"), False),
        ("gpu", False),
    ],
    ids=["nvidia", "amd", "old", "old nvidia", "unknown"],
)
def test_the_target_decides_not_this_machine(device, has_kernel):
    query = normal(1, 2, 8, 16, dtype=jnp.bfloat16)
    mask = Mask(array=causal_positions(8, 8), causal=Causal(window=None, is_real=None))
    with compiling_for(device) as where:
        jax.eval_shape(lambda q: attention(q, q, q, mask, scale=1.0)[0], query)
    assert ("attention: Triton kernel, prompts" in where.chosen) == has_kernel


@pytest.mark.parametrize(
    ("mask", "way"),
    [
        ({"causal": Causal(window=None, is_real=None)}, "reads the keys that are seen"),
        ({}, "reads the keys that are seen"),  # a ring of the last tokens
        ({"numbers": True}, None),
        ({"numbers": True, "seen": True}, "reads the keys that are seen"),
        ({"heads": 2}, None),
    ],
    ids=str,
)
def test_steps_that_have_a_kernel(mask, way):
    query, key = normal(1, 2, 3, 16, dtype=jnp.bfloat16), normal(1, 2, 40, 16, dtype=jnp.bfloat16)
    seen = jnp.ones((1, mask.pop("heads", 1), 3, 40), jnp.bool_)
    array = jnp.where(seen, 0.0, -1e30) if mask.pop("numbers", False) else seen
    given = Mask(array=array, **mask | ({"seen": seen} if "seen" in mask else {}))
    with compiling_for(DESCRIBED) as where:
        jax.eval_shape(lambda q, k: attention(q, k, k, given, scale=1.0)[0], query, key)
    assert [text for text in where.chosen if "Triton" in text] == (
        [] if way is None else [f"attention: Triton kernel, {way}"]
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_rounded_as_they_are_written(dtype, has_bias):
    """A float32 result would be written, read and rounded by a kernel of its own. With a bias it is rounded after the addition."""
    x, weight, bias = jnp.ones((4, 8), dtype), jnp.ones((16, 8), dtype), jnp.ones(16, dtype) if has_bias else None
    with compiling_for("gpu"):
        equations = jax.make_jaxpr(lambda x, weight: linear(x, weight, bias))(x, weight).eqns
    (product,) = [eqn for eqn in equations if eqn.primitive.name == "dot_general"]
    assert product.outvars[0].aval.dtype == (jnp.float32 if has_bias else dtype)
    assert equations[-1].outvars[0].aval.dtype == dtype
