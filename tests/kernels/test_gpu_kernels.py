"""Attention as GPUs compute it, here by XLA, which takes the same arguments as cuDNN; no GPU is needed, and none is tested."""

import jax.numpy as jnp
import numpy as np
import pytest

from hfax.kernels.attention import Causal, Mask, attention, causal_positions
from hfax.kernels.gpu.attention import fits, prompt_attention
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


def test_a_program_for_a_gpu_that_is_not_there_is_plain():
    query = normal(1, 2, 8, 16, dtype=jnp.bfloat16)
    mask = Mask(array=causal_positions(8, 8), causal=Causal(window=None, is_real=None))
    with compiling_for("gpu") as where:
        attention(query, query, query, mask, scale=1.0)
    assert not [way for way in where.chosen if "cuDNN" in way]
