"""The TPU kernels of pages, interpreted with a check for races between copies, against attention of each sequence alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pallas_tpu

from hfax.kernels.attention import attention
from hfax.kernels.rows import Rows
from hfax.kernels.tiles import in_lanes
from hfax.kernels.tpu import page_blocks, pages_decode
from hfax.kernels.tpu import pages as kernels

INTERPRET = pallas_tpu.InterpretParams(detect_races=True)
PAGE = 32
PARTS = [(69, 70), (0, 12), (53, 90), (16, 17), (0, 31), (99, 100)]
"""The tokens of a step: the positions of each sequence's, from the first to before the last."""


@dataclasses.dataclass
class Heads:
    """Query heads, heads of keys and values, and their dimensions."""

    query: int = 8
    kv: int = 2
    key_width: int = 64
    value_width: int = 64


def rows_of(parts, unused=2) -> Rows:
    """Pages dealt out in an order that is not theirs; page 0 is nobody's."""
    tables = np.zeros((len(parts) + unused, 4), np.int32)
    tables[: len(parts)] = np.random.default_rng(1).permutation(np.arange(1, 4 * len(parts) + 1)).reshape(-1, 4)
    starts = np.cumsum([0, *(end - begin for begin, end in parts)])
    starts = np.append(starts, [starts[-1]] * unused)
    lengths = [end for _, end in parts] + [0] * unused
    arrays = {"starts": starts, "lengths": lengths, "tables": tables}
    return Rows(**{name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()})


def draws(parts, heads, dtype):
    """Queries, keys and values of each sequence, [1, heads, tokens, width]."""
    draw = np.random.default_rng(0).standard_normal
    kinds = (heads.query, heads.key_width), (heads.kv, heads.key_width), (heads.kv, heads.value_width)
    return [[jnp.asarray(draw((1, n, end, width)), dtype) for _, end in parts] for n, width in kinds]


def of_step(arrays, parts, size):
    """The tokens of a step, [heads, size, width]; after the last one, what is no number."""
    found = jnp.concatenate([a[0, :, begin:end] for a, (begin, end) in zip(arrays, parts, strict=True)], axis=1)
    return jnp.pad(found, ((0, 0), (0, size - found.shape[1]), (0, 0)), constant_values=jnp.nan)


def run(parts, heads=Heads(), dtype="float32", held=None, size=96, queries=None, keys=None, values=None, **options):  # noqa: B008
    """Write what is before the step, in pages of what is no number, then the step, and attend."""
    drawn_queries, drawn_keys, drawn_values = draws(parts, heads, dtype)
    keys = [key.astype(held or dtype) for key in keys or drawn_keys]
    values = [value.astype(held or dtype) for value in values or drawn_values]
    width = in_lanes(heads.key_width + heads.value_width)
    pages = jnp.full((4 * len(parts) + 1, heads.kv, PAGE, width), jnp.nan, held or dtype)
    past = [(0, begin) for begin, _ in parts]
    for step, count in ((past, sum(end for _, end in past) + 3), (parts, size)):
        rows, new = rows_of(step), [of_step(arrays, step, count) for arrays in (keys, values)]
        pages = kernels.pages_write(pages, *new, rows, interpret=INTERPRET)
    asked = of_step(queries or drawn_queries, parts, size)
    options = {"scale": 0.2, "value_width": heads.value_width, "interpret": INTERPRET} | options
    out = kernels.pages_attention(asked, pages, rows, **options)
    assert out.shape == (heads.query, size, heads.value_width)
    assert out.dtype == dtype
    return out, keys, values, pages


def expected(parts, keys, values, heads=Heads(), dtype="float32", **options):  # noqa: B008
    queries, _, _ = draws(parts, heads, dtype)
    window, found = options.pop("window", None), []
    for (begin, end), query, key, value in zip(parts, queries, keys, values, strict=True):
        position, place = np.arange(begin, end)[:, None], np.arange(end)[None]
        mask = (place <= position) & (place > position - (window or end + 1))
        out, _ = attention(
            query[:, :, begin:],
            key.astype(dtype),
            value.astype(dtype),
            jnp.asarray(mask[None, None]),
            **{"scale": 0.2} | options,
        )
        found.append(out[0].swapaxes(0, 1))
    return jnp.concatenate(found, axis=1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Sequences have several blocks of pages, and steps several blocks of queries, which begin and end within sequences."""
    monkeypatch.setattr(page_blocks, "_BLOCK", 2 * PAGE)
    monkeypatch.setattr(kernels, "_QUERIES", 32)


@pytest.fixture(autouse=True)
def no_races(capfd):
    """The interpreter only prints that it found one."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


SINKS = jnp.linspace(-1, 2, 8)


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        pytest.param(Heads(), {}, id="64"),
        pytest.param(Heads(), {"window": 20, "sinks": SINKS}, id="window and sinks"),
        pytest.param(Heads(), {"softcap": 5.0, "window": 40}, id="softcap"),
        pytest.param(Heads(6, 2, 48, 80), {"sinks": SINKS[:6]}, id="a key and a value in the same lanes"),
        pytest.param(Heads(3, 3, 192, 128), {}, id="heads that share nothing", marks=pytest.mark.sweep),
        pytest.param(
            Heads(10, 1, 128, 128), {"sinks": jnp.linspace(-1, 2, 10)}, id="ten heads of one", marks=pytest.mark.sweep
        ),
    ],
)
def test_each_token_attends_to_its_own_sequence(heads, options):
    out, keys, values, _ = run(PARTS, heads, **options)
    count = sum(end - begin for begin, end in PARTS)
    np.testing.assert_allclose(out[:, :count], expected(PARTS, keys, values, heads, **options), atol=2e-5)


@pytest.mark.parametrize(
    ("heads", "dtype", "held", "options"),
    [
        pytest.param(Heads(), "float32", "float32", {"window": 20, "sinks": SINKS}, id="window and sinks"),
        pytest.param(
            Heads(6, 2, 48, 80), "float32", "float32", {"softcap": 5.0}, id="a key and a value in the same lanes"
        ),
        pytest.param(Heads(3, 3, 192, 128), "bfloat16", "float8_e4m3fn", {}, id="float8"),
    ],
)
def test_the_newest_token_of_each_sequence(heads, dtype, held, options):
    parts = [(end - 1, end) for end in (1, 70, 33, 100, 64)]
    _, keys, values, pages = run(parts, heads, dtype=dtype, held=held, size=len(parts), **options)
    wanted = expected(parts, keys, values, heads, dtype=dtype, **options)
    rows, (queries, *_) = rows_of(parts, unused=0), draws(parts, heads, dtype)
    asked = of_step(queries, parts, len(parts)).swapaxes(0, 1)
    given = {"scale": 0.2, "value_width": heads.value_width, "interpret": INTERPRET} | options
    got = pages_decode.decode_attention(asked, pages, rows.lengths, rows.tables, **given)
    assert got.dtype == dtype
    found = [array.astype(jnp.float32) for array in (got.swapaxes(0, 1), wanted)]
    np.testing.assert_allclose(*found, atol=2e-5 if dtype == "float32" else 0.03)


def test_the_beginning_of_a_key_is_its_value():
    """As in attention over latents, whose rows are a latent and what only keys have."""
    parts, heads = [(69, 70), (30, 33), (99, 100)], Heads(8, 1, 48, 16)
    _, latents, rotated, pages = run(parts, heads, size=16)
    keys = [jnp.concatenate(both, axis=3) for both in zip(latents, rotated, strict=True)]
    of_query = dataclasses.replace(heads, key_width=64)
    wanted = expected(parts, keys, latents, of_query)
    queries, rows = of_step(draws(parts, of_query, "float32")[0], parts, 16), rows_of(parts)
    options = {"scale": 0.2, "value_width": 48, "value_at": 0, "interpret": INTERPRET}
    out = kernels.pages_attention(queries, pages, rows, **options)
    np.testing.assert_allclose(out[:, :5], wanted, atol=2e-5)
    last = jnp.array([0, 3, 4])
    newest = pages_decode.decode_attention(
        queries[:, last].swapaxes(0, 1), pages, rows.lengths[:3], rows.tables[:3], **options
    )
    np.testing.assert_allclose(newest.swapaxes(0, 1), wanted[:, last], atol=2e-5)


def test_a_block_of_queries_fits_the_memory(monkeypatch):
    monkeypatch.setattr(kernels, "_STATE_BYTES", 300_000)
    parts = [(60, 90), (0, 12)]
    out, keys, values, _ = run(parts, Heads(16, 2), size=64)
    np.testing.assert_allclose(out[:, :42], expected(parts, keys, values, Heads(16, 2)), atol=2e-5)


def test_heads_are_divided_where_they_take_too_much_memory(monkeypatch):
    monkeypatch.setattr(kernels, "_STATE_BYTES", 1)
    parts = PARTS[:3]
    out, keys, values, _ = run(parts, size=64)
    np.testing.assert_allclose(out[:, :50], expected(parts, keys, values), atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "held"), [pytest.param("bfloat16", "bfloat16", marks=pytest.mark.sweep), ("bfloat16", "float8_e4m3fn")]
)
def test_half_precision(dtype, held):
    parts = PARTS[:4]
    out, keys, values, _ = run(parts, dtype=dtype, held=held, size=64)
    found, wanted = (array.astype(jnp.float32) for array in (out[:, :51], expected(parts, keys, values, dtype=dtype)))
    np.testing.assert_allclose(found, wanted, atol=0.03)


def test_pages_hold_what_was_written_and_nothing_else():
    parts = [(69, 70), (30, 67), (0, 5)]
    *_, keys, values, pages = run(parts, Heads(2, 2, 48, 64), dtype="bfloat16", size=48)
    tables = np.asarray(rows_of(parts).tables)
    held = np.asarray(pages.astype(jnp.float32))
    for row, (_, end) in enumerate(parts):
        found = held[tables[row]].swapaxes(0, 1).reshape(2, -1, 128)
        both = jnp.concatenate([keys[row][0], values[row][0]], axis=2).astype(jnp.float32)
        np.testing.assert_array_equal(found[:, :end, : 48 + 64], both)
        np.testing.assert_array_equal(found[:, :end, 48 + 64 :], 0)
        assert np.isnan(found[:, end:]).all()
    assert np.isnan(held[0]).all()


def test_what_is_no_number_stays_in_its_sequence():
    """Neither its neighbours in a block of queries nor those that share a part of a step's rows with it see it."""
    parts = PARTS[:5]
    _, keys, values = draws(parts, Heads(), "float32")
    for bad in (0, 2):
        keys[bad], values[bad] = jnp.full_like(keys[bad], jnp.nan), jnp.full_like(values[bad], jnp.inf)
    out, *_ = run(parts, keys=keys, values=values)
    wanted = expected(parts, keys, values)
    good = np.concatenate([np.full(end - begin, row not in (0, 2)) for row, (begin, end) in enumerate(parts)])
    np.testing.assert_allclose(out[:, : len(good)][:, good], wanted[:, good], atol=2e-5)
    assert not jnp.isfinite(out[:, : len(good)][:, ~good]).any()


def test_a_token_is_the_same_among_others_where_that_is_asked_for():
    drawn = draws(PARTS, Heads(), "float32")
    together, *_ = run(PARTS, is_batch_invariant=True)
    starts = np.cumsum([0, *(end - begin for begin, end in PARTS)])
    for row in (0, 2):
        queries, keys, values = (arrays[row : row + 1] for arrays in drawn)
        alone, *_ = run(
            PARTS[row : row + 1], size=64, queries=queries, keys=keys, values=values, is_batch_invariant=True
        )
        count = PARTS[row][1] - PARTS[row][0]
        np.testing.assert_array_equal(alone[:, :count], together[:, starts[row] : starts[row] + count])


def test_without_a_tpu_that_runs_them_they_are_left_out(caplog):
    kernels.works.cache_clear()
    assert not kernels.works(jnp.dtype("bfloat16"), jnp.dtype("bfloat16"))
    assert "does not work here" in caplog.text
    kernels.works.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "held"), [pytest.param("float32", "float32", marks=pytest.mark.sweep), ("bfloat16", "float8_e4m3fn")]
)
def test_the_trial_finds_that_they_work(monkeypatch, dtype, held):
    monkeypatch.setattr(page_blocks, "_BLOCK", 512)
    found, wanted = kernels._trial(jnp.dtype(dtype), jnp.dtype(held), INTERPRET)
    np.testing.assert_allclose(found, wanted, atol=0.01 if dtype == "bfloat16" else 1e-5)
