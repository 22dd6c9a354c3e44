"""Attention in blocks against attention with the whole matrix, and the memory of a long prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from hfax import AutoModelForTPU
from hfax.kernels import attention as module
from hfax.kernels.attention import Mask, attention, causal_mask, causal_positions


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_MAX_SCORES_BYTES", 0)
    monkeypatch.setattr(module, "_QUERY_BLOCK", 16)
    monkeypatch.setattr(module, "_KEY_BLOCK", 24)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("window", [None, 20])
def test_blocks_give_what_the_whole_matrix_gives(small_blocks, options, window):
    length = 90  # neither a multiple of the query block nor of the key block
    query, key, value = normal(2, 4, length, 8), normal(2, 2, length, 8, seed=1), normal(2, 2, length, 12, seed=2)
    options = {n: normal(4, seed=3) if n == "sinks" else v for n, v in options.items()}
    start = np.array([[0], [37]])  # of the text, after padding

    def block(rows, columns):
        seen = (columns[None, :] <= rows[:, None])[None] & (columns[None, None, :] >= start[:, :, None])
        if window is not None:
            seen = seen & (columns[None, :] > rows[:, None] - window)[None]
        return seen[:, None]

    array = block(jnp.arange(length), jnp.arange(length))
    expected, _ = attention(query, key, value, array, scale=0.3, **options)
    got, _ = attention(query, key, value, Mask(array=array, block=block), scale=0.3, **options)
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_causal_blocks_without_padding(small_blocks):
    query, key, value = normal(1, 2, 33, 8), normal(1, 2, 33, 8, seed=1), normal(1, 2, 33, 8, seed=2)
    expected, _ = attention(query, key, value, causal_positions(33, 33), scale=0.3)
    np.testing.assert_allclose(attention(query, key, value, causal_mask(33, 33), scale=0.3)[0], expected, atol=2e-6)


def test_a_prompt_of_32768_tokens_needs_no_matrix_of_scores():
    config = transformers.Qwen3Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=65536,
    )
    model = AutoModelForTPU.from_config(config, dtype="bfloat16")
    traced, length = model._traced, 32768
    from hfax.kernels.target import compiling_for

    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    with compiling_for("cpu") as where:
        prefill = jax.jit(lambda p, x: traced.prefill(p, x, {}, length))
        compiled = prefill.lower(model.params, {"input_ids": ids, "attention_mask": ids}).compile()
    assert "attention: blocks of queries and keys" in where.chosen
    scores = 2 * 16 * length * length  # bytes of one layer's in bfloat16: 34 GB
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 25
