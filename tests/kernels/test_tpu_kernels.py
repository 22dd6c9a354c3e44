"""TPU's kernels: interpreted, or their reference, against plain attention; caches in pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from jax.experimental.pallas import tpu as pallas_tpu

from hfax import AutoModelForTPU
from hfax.kernels import paged
from hfax.kernels.attention import attention, causal_positions
from hfax.kernels.expert_tiles import in_tiles
from hfax.kernels.target import compiling_for
from hfax.kernels.tpu.attention import can_splash, segment_attention, splash_attention
from hfax.kernels.tpu.experts import fits, grouped_linear
from hfax.tracing.traced_model import TracedModel


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def seen_by(length, *, padding=(0, 0), window=None):
    """The causal mask of two rows, [2, 1, length, length]."""
    places = jnp.arange(length)
    mask = causal_positions(length, length) & (places >= jnp.array(padding)[:, None])[:, None, None]
    return mask if window is None else mask & (places[None, :] > places[:, None] - window)


@pytest.mark.parametrize(
    ("widths", "length", "window", "softcap", "has_sinks"),
    [
        ((128, 128), 256, None, None, False),
        ((128, 128), 256, 100, 4.0, False),
        ((64, 64), 256, 100, None, True),
        ((80, 80), 200, None, None, False),
        ((192, 128), 300, None, None, False),
    ],
)
def test_splash_attention_interpreted(widths, length, window, softcap, has_sinks):
    query, key = normal(2, 4, length, widths[0]), normal(2, 2, length, widths[0], seed=1)
    value, sinks = normal(2, 2, length, widths[1], seed=2), normal(4, seed=3) if has_sinks else None
    is_real = jnp.arange(length)[None] >= jnp.array([[0], [37]])
    mask = seen_by(length, padding=(0, 37), window=window)

    def by_kernel(query, key, value, sinks):
        options = {"scale": 0.1, "window": window, "softcap": softcap}
        return (
            splash_attention(query, key, value, is_real, sinks, **options, interpret=True) * is_real[:, :, None, None]
        )

    def plainly(query, key, value, sinks):
        out, _ = attention(query, key, value, mask, scale=0.1, softcap=softcap, sinks=sinks)
        return out * is_real[:, :, None, None]

    given = query, key, value, sinks
    np.testing.assert_allclose(by_kernel(*given), plainly(*given), atol=1e-5)
    weights = normal(2, length, 4, widths[1], seed=4)
    wanted = (0, 1, 2, 3)[: 3 + has_sinks]
    got, expected = (
        jax.grad(lambda *given, call=call: (call(*given) * weights).sum(), wanted)(*given)
        for call in (by_kernel, plainly)
    )
    for of_kernel, of_plain in zip(got, expected, strict=True):
        np.testing.assert_allclose(of_kernel, of_plain, atol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "longest"), [([200, 57, 300], 557), ([64] * 9, 64), ([40, 64, 30, 64, 64], 64), ([150, 150, 3], 150)]
)
def test_segments_by_splash_attention_interpreted(lengths, longest):
    ids = jnp.repeat(jnp.arange(len(lengths)) * 3, jnp.array(lengths))
    tokens = len(ids)
    query, key, value = (normal(1, heads, tokens, 80, seed=heads) for heads in (4, 2, 2))
    expected, _ = attention(query, key, value, (ids[:, None] == ids)[None, None], scale=0.1)
    assert can_splash(query, key)
    got = segment_attention(query, key, value, ids, scale=0.1, longest=longest, softcap=None, interpret=True)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("widths", "window", "softcap", "has_sinks", "is_written_by_kernel"),
    [
        ((64, 64), None, None, False, True),
        ((64, 64), 100, None, True, True),
        ((128, 128), 256, 4.0, False, False),
        ((192, 128), None, None, False, False),
        pytest.param((80, 80), 512, None, False, True, marks=pytest.mark.sweep),
    ],
)
def test_attention_reads_what_the_pages_stand_for(
    monkeypatch, widths, window, softcap, has_sinks, is_written_by_kernel
):
    capacity, length, padding = 512, 300, jnp.array([0, 77], jnp.int32)
    key, value = normal(2, 2, length, widths[0]), normal(2, 2, length, widths[1], seed=1)
    monkeypatch.setattr(paged, "has_tpu_kernels", lambda *_: is_written_by_kernel)
    sinks = normal(4, seed=5) if has_sinks else None
    array = paged.after_prompt(key, value, padding, capacity, window)
    assert array.shape[1] == (4 if window is None or window > 256 else -(-window // 128) + 1)
    assert paged.holds_all(array, capacity) == (array.shape[1] == 4)
    for step, count in enumerate((1, 3, 1) if paged.holds_all(array, capacity) else (1, 1, 1)):
        new_key, new_value = (
            normal(2, 2, count, widths[0], seed=3 + step),
            normal(2, 2, count, widths[1], seed=9 + step),
        )
        key, value = jnp.concatenate([key, new_key], axis=2), jnp.concatenate([value, new_value], axis=2)
        length += count
        query = normal(2, 4, count, widths[0], seed=2)
        with pallas_tpu.force_tpu_interpret_mode():
            pages = paged.Pages(pages=array, slots=length - 1 - padding, capacity=capacity, widths=widths)
            pages = pages.with_tokens(new_key, new_value)
            got = pages.attend(query, scale=0.1, window=window, softcap=softcap, sinks=sinks)
        array = pages.pages
        mask = seen_by(length, padding=(0, 77), window=window)[:, :, -count:]
        expected, _ = attention(query, key, value, mask, scale=0.1, softcap=softcap, sinks=sinks)
        np.testing.assert_allclose(got, expected, atol=1e-5)
    keys, values = pages.read(padding)
    for row in range(2):
        seen = np.asarray(mask[row, 0, -1])
        np.testing.assert_array_equal(keys[row, :, :length][:, seen], key[row][:, seen])
        np.testing.assert_array_equal(values[row, :, :length][:, seen], value[row][:, seen])


def test_a_window_in_pages_takes_one_token_at_a_time():
    array = paged.after_prompt(*[normal(1, 2, 300, 64)] * 2, jnp.zeros(1, jnp.int32), 512, 100)
    pages = paged.Pages(pages=array, slots=jnp.array([301]), capacity=512, widths=(64, 64))
    with pytest.raises(NotImplementedError, match="several tokens"):
        pages.with_tokens(*[normal(1, 2, 2, 64)] * 2)


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
