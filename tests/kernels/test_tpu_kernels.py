"""TPU's kernels: interpreted, or their reference, against plain attention; caches in pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from jax.experimental.pallas import tpu as pallas_tpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as ragged_kernel

from hfax import AutoModelForTPU
from hfax.kernels import paged
from hfax.kernels.attention import attention, causal_positions
from hfax.kernels.expert_tiles import in_tiles
from hfax.kernels.target import compiling_for
from hfax.kernels.tpu.attention import (
    can_splash_segments,
    paged_attention,
    ragged_attention,
    segment_attention,
    splash_attention,
)
from hfax.kernels.tpu.experts import fits, grouped_linear
from hfax.tracing.traced_model import TracedModel


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_heads_that_the_ragged_kernel_takes(dtype):
    """Of other numbers of heads, such as Phi-4's ten, the kernel raises while it is traced."""
    for heads in range(1, 65):
        try:
            ragged_kernel.get_min_heads_per_blk(4 * heads, 2 * heads, jnp.bfloat16, jnp.dtype(dtype))
            takes = True
        except ValueError:
            takes = False
        assert paged.can_tile(heads, jnp.dtype(dtype)) == takes, heads


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_splash_attention_interpreted(window, softcap):
    length = 256
    query, key, value = normal(2, 4, length, 128), normal(2, 2, length, 128, seed=1), normal(2, 2, length, 128, seed=2)
    is_real = jnp.arange(length)[None] >= jnp.array([[0], [37]])
    mask = causal_positions(length, length) & is_real[:, None, None, :]
    if window is not None:
        mask = mask & (jnp.arange(length)[None, :] > jnp.arange(length)[:, None] - window)
    expected, _ = attention(query, key, value, mask, scale=0.1, softcap=softcap)
    got = splash_attention(query, key, value, is_real, scale=0.1, window=window, softcap=softcap, interpret=True)
    np.testing.assert_allclose(got * is_real[:, :, None, None], expected * is_real[:, :, None, None], atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "longest"), [([200, 57, 300], 557), ([64] * 9, 64), ([40, 64, 30, 64, 64], 64), ([150, 150, 3], 150)]
)
def test_segments_by_splash_attention_interpreted(lengths, longest):
    ids = jnp.repeat(jnp.arange(len(lengths)) * 3, jnp.array(lengths))
    tokens = len(ids)
    query, key, value = (normal(1, heads, tokens, 80, seed=heads) for heads in (4, 2, 2))
    expected, _ = attention(query, key, value, (ids[:, None] == ids)[None, None], scale=0.1)
    assert can_splash_segments(query, key, value)
    got = segment_attention(query, key, value, ids, scale=0.1, longest=longest, softcap=None, interpret=True)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(
    ("width", "window"), [(128, None), (128, 100), (128, 256), (256, None), (256, 128), (256, 256), (256, 512)]
)
def test_paged_attention_reads_what_the_pages_stand_for(width, window, softcap):
    """The ragged kernel by its own reference, since it cannot be interpreted: that it compiles is tested for a TPU topology."""
    capacity, length, padding = 512, 300, jnp.array([0, 77], jnp.int32)
    key, value = normal(2, 2, length, width), normal(2, 2, length, width, seed=1)
    assert paged.fits(width, window, capacity)
    arrays = paged.after_prompt(key, value, padding, capacity, window)
    for step in range(3):
        new_key, new_value = normal(2, 2, 1, width, seed=3 + step), normal(2, 2, 1, width, seed=9 + step)
        pages = paged.pages_of(arrays, length - padding).with_token(new_key, new_value)
        arrays = paged.arrays_of(pages)
        key, value = jnp.concatenate([key, new_key], axis=2), jnp.concatenate([value, new_value], axis=2)
        length += 1
    query = normal(2, 4, 1, width, seed=2)
    if width == 128:
        got = ragged_attention(query, pages, scale=0.1, window=window, softcap=softcap, is_reference=True)
    else:
        with pallas_tpu.force_tpu_interpret_mode():
            got = paged_attention(query, pages, scale=0.1, softcap=softcap)
    places = jnp.arange(length)
    mask = places[None] >= padding[:, None]
    if window is not None:
        mask = mask & (places[None] >= length - window)
    expected, _ = attention(query, key, value, mask[:, None, None], scale=0.1, softcap=softcap)
    np.testing.assert_allclose(got, expected, atol=1e-5 if width == 128 else 2e-2)  # interpreted with rounded products
    keys, values = pages.read(padding, capacity)
    seen = np.asarray(mask)
    for row in range(2):
        np.testing.assert_array_equal(keys[row, :, :length][:, seen[row]], key[row][:, seen[row]])
        np.testing.assert_array_equal(values[row, :, :length][:, seen[row]], value[row][:, seen[row]])


def test_a_window_that_no_kernel_takes_is_not_kept_in_pages():
    assert not paged.fits(256, window=100, capacity=512)
    assert not paged.fits(96)


@pytest.mark.parametrize(("rows", "width", "is_transposed"), [(8, 256, False), (300, 128, False), (40, 256, True)])
def test_grouped_product_interpreted(rows, width, is_transposed):
    x, weight = normal(rows, width), normal(8, 128, width, seed=1)
    experts = np.sort(np.random.default_rng(2).integers(0, 8, rows))
    sizes = jnp.asarray(np.bincount(experts, minlength=8), jnp.int32)
    expected = np.einsum("ri,roi->ro", x, np.asarray(weight)[experts])
    given = weight.swapaxes(1, 2) if is_transposed else weight
    assert fits(x, given, is_transposed=is_transposed)
    assert not fits(x, given, is_transposed=not is_transposed) or width == 128
    got = grouped_linear(x, given, sizes, is_transposed=is_transposed, interpret=True)
    np.testing.assert_allclose(got, expected, atol=1e-3)


def test_rows_of_experts_are_put_into_tiles():
    experts = jnp.array([2, 5, 0, 2, 2, 0, 2, 3, 2])  # expert 5 is nobody's, 1 and 4 have no rows
    of_tile, used, source, place = in_tiles(experts, 5, 4, 9 // 4 + 5)
    assert used.tolist() == [4]
    assert of_tile.tolist() == [0, 2, 2, 3, 3, 3, 3]
    for row, expert in enumerate(experts.tolist()):
        if expert < 5:
            assert source[place[row]] == row
            assert of_tile[place[row] // 4] == expert


CONFIGS = {
    "full": transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        initializer_range=0.1,
    ),
    "windows": transformers.Gemma3TextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        sliding_window=100,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.1,
    ),
}
CONFIGS["wide"] = transformers.Gemma3TextConfig(
    **CONFIGS["windows"].to_dict() | {"head_dim": 256, "sliding_window": 128}
)


def decode(traced: TracedModel, params, ids, mask, *, steps: int, capacity: int, pages: bool):
    """Greedy tokens, [batch, steps], the last logits, and the cache."""

    def run(params, ids, mask):
        with compiling_for("cpu", pages=pages):
            logits, cache = traced.prefill(params, {"input_ids": ids, "attention_mask": mask}, {}, capacity)
            whole_mask = jnp.pad(mask, ((0, 0), (0, capacity - mask.shape[1])), constant_values=1)
            tokens = []
            for step in range(steps):
                tokens.append(logits.argmax(-1)[:, None].astype(jnp.int32))
                logits, cache = traced.decode_step(
                    params,
                    cache,
                    tokens[-1],
                    length=jnp.int32(ids.shape[1] + step),
                    positions=mask.sum(1) + step,
                    attention_mask=whole_mask,
                    capacity=capacity,
                    static={},
                )
                logits = logits[:, -1]
            return jnp.concatenate(tokens, axis=1), logits, cache

    return jax.jit(run)(params, ids, mask)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.sweep] if n == "wide" else []) for n in CONFIGS])
def test_a_cache_in_pages_gives_the_same_text(name):
    model = AutoModelForTPU.from_config(CONFIGS[name], dtype="float32")
    ids = jnp.asarray(np.random.default_rng(0).integers(3, 60, (2, 380)), jnp.int32)
    mask = (jnp.arange(380)[None] >= jnp.array([[0], [77]])).astype(jnp.int32)
    plain = decode(model._traced, model.params, ids, mask, steps=8, capacity=512, pages=False)
    in_pages = decode(model._traced, model.params, ids, mask, steps=8, capacity=512, pages=True)
    np.testing.assert_array_equal(in_pages[0], plain[0])
    np.testing.assert_allclose(in_pages[1], plain[1], atol=1e-5)
    kept = {n: a.size for n, a in in_pages[2].items()}
    assert all(n.endswith("pages") for n in kept)
    small = [n for n, size in kept.items() if size < max(kept.values())]
    # a window of 100 touches two pages of 128; one of 128 has a page for keys and one for values
    assert len(small) == {"full": 0, "windows": 2, "wide": 4}[name]
