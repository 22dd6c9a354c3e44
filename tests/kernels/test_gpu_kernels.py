"""Attention as GPUs compute it, here by XLA, which takes the same arguments as cuDNN; no GPU is needed, and none is tested."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfax.kernels.attention import Causal, Mask, attention, causal_positions
from hfax.kernels.gpu import attention as kernels
from hfax.kernels.gpu.attention import fits, fits_step, prompt_attention, step_attention, step_attention_works
from hfax.kernels.target import compiling_for


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
    got = prompt_attention(query, key, value, is_real, scale=0.3, window=window, implementation="xla")
    np.testing.assert_allclose(got * rows, expected * rows, atol=1e-5)


def test_what_cudnn_takes():
    half = [normal(1, 4, 8, 64, dtype=jnp.bfloat16)] * 3
    assert fits(*half)
    assert not fits(*[array.astype(jnp.float32) for array in half])
    assert not fits(half[0][:, :, :1], *half[1:])  # a decoding step
    assert not fits(*[normal(1, 4, 8, 256, dtype=jnp.bfloat16)] * 3)


def a_step(capacity=1024, width=64, dtype=jnp.bfloat16):
    query, key, value = (normal(3, n, m, width, seed=n, dtype=dtype) for n, m in ((8, 1), (2, capacity), (2, capacity)))
    seen = (jnp.arange(capacity) >= jnp.array([[0], [5], [700]])) & (jnp.arange(capacity) < 801)
    return query, key, value, seen[:, None, None]


def test_a_step_reads_what_it_sees():
    query, key, value, mask = a_step()
    expected, _ = attention(query, key, value, mask, scale=0.3)
    # what is not seen may be anything
    hidden = jnp.where(mask[:, :, 0, :, None], 0.0, jnp.inf).astype(key.dtype)
    far = jnp.arange(1024)[:, None] >= 896  # parts that have nothing to see are not even read
    got = step_attention(query, key + jnp.where(far, hidden, 0), value, mask, scale=0.3, interpret=True)
    np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=2.0**-6)


def test_the_steps_that_the_triton_kernel_takes():
    long = a_step(capacity=32768)
    assert fits_step(*long)
    assert not fits_step(*a_step())  # short
    assert not fits_step(*a_step(capacity=32768 + 64))
    assert not fits_step(*a_step(capacity=32768, width=96))
    assert not fits_step(*a_step(capacity=32768, dtype=jnp.float32))
    assert not fits_step(long[0], *long[1:3], jnp.zeros(long[3].shape))


def test_the_triton_kernel_lowers_for_a_gpu():
    arguments = a_step(capacity=4096, width=128)
    lowered = (
        jax.jit(functools.partial(step_attention, scale=0.3)).trace(*arguments).lower(lowering_platforms=("cuda",))
    )
    assert "xla.gpu.triton" in lowered.as_text()


def test_without_a_gpu_the_triton_kernel_is_not_tried():
    assert not step_attention_works()


@pytest.mark.parametrize(("change", "works"), [(None, False), ("interpreted", True), ("wrong", False)])
def test_the_triton_kernel_is_tried_where_there_is_a_gpu(monkeypatch, caplog, change, works):
    """Within a trace, as programs ask; a kernel that fails, as here without a GPU, or that gives other numbers is left out."""
    monkeypatch.setattr(kernels, "is_there", lambda: True)
    interpreted = functools.partial(step_attention, interpret=True)
    if change == "interpreted":
        monkeypatch.setattr(kernels, "step_attention", interpreted)
    elif change == "wrong":
        monkeypatch.setattr(kernels, "step_attention", lambda *args, **kwargs: interpreted(*args, **kwargs) * 1.5)
    found = []
    step_attention_works.cache_clear()
    try:
        jax.jit(lambda x: found.append(step_attention_works()) or x)(1.0)
    finally:
        step_attention_works.cache_clear()
    assert found == [works]
    assert bool(caplog.records) != works


def test_a_program_for_a_gpu_that_is_not_there_is_plain():
    query = normal(1, 2, 8, 16, dtype=jnp.bfloat16)
    mask = Mask(array=causal_positions(8, 8), causal=Causal(window=None, is_real=None))
    with compiling_for("gpu") as where:
        attention(query, query, query, mask, scale=1.0)
    assert not [way for way in where.chosen if "cuDNN" in way]
