"""Attention over a pool of pages that sequences share, by each way that there is, against attention of each sequence alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hfax.kernels import pool, target
from hfax.kernels.attention import attention
from hfax.kernels.cpu import library
from hfax.kernels.gpu import ranges
from hfax.kernels.rows import Rows

PAGE, HEADS, KV_HEADS, WIDTH = 16, 8, 2, 32


@dataclasses.dataclass
class Case:
    """Sequences of `lengths` tokens, the last `new` of which are the step's."""

    lengths: list[int]
    new: list[int]
    num_rows: int

    def rows(self) -> tuple[Rows, int]:
        """Pages dealt out in an order that is not theirs, and how many there are."""
        places = np.random.default_rng(1).permutation(np.arange(1, 64))
        tables = np.zeros((len(self.lengths) + 2, 8), np.int32)
        taken = 0
        for row, length in enumerate(self.lengths):
            count = -(-length // PAGE)
            tables[row, :count] = places[taken : taken + count]
            taken += count
        starts = np.full(len(tables) + 1, sum(self.new), np.int32)
        starts[: len(self.new) + 1] = np.concatenate([[0], np.cumsum(self.new)])
        lengths = np.array([*self.lengths, 0, 0], np.int32)
        return Rows(starts=starts, lengths=lengths, tables=tables), 64  # pyright: ignore


CASES = {
    "decoding": Case([5, 33, 16, 100], [1, 1, 1, 1], 8),
    "a prompt": Case([40], [40], 64),
    "parts of prompts between decoding": Case([70, 12, 90, 17, 31], [1, 12, 37, 1, 31], 96),
    "nothing": Case([], [], 8),
}


def by_sequences(case: Case, keys, values, queries, **options):
    """Reference: each sequence alone, with a mask of its own."""
    out, row = [], 0
    for i, (length, new) in enumerate(zip(case.lengths, case.new, strict=True)):
        query = queries[:, :, row : row + new]
        at = np.arange(length - new, length)
        mask = np.arange(length)[None] <= at[:, None]
        if (window := options.get("window")) is not None:
            mask &= np.arange(length)[None] > at[:, None] - window
        rest = {name: value for name, value in options.items() if name != "window"}
        found, _ = attention(query, keys[i], values[i], jnp.asarray(mask[None, None]), **rest)
        out.append(found)
        row += new
    return jnp.concatenate(out, axis=1) if out else jnp.zeros((1, 0, HEADS, WIDTH))


def run(case: Case, kind: str, dtype: str, held: str | None = None, **options):
    """What a step gives, and what attention of each sequence gives; `held`: dtype of the pages, if it is another."""
    draw = np.random.default_rng(0).standard_normal
    keys = [jnp.asarray(draw((1, KV_HEADS, n, WIDTH)), dtype) for n in case.lengths]
    values = [jnp.asarray(draw((1, KV_HEADS, n, WIDTH)), dtype) for n in case.lengths]
    if held is not None:
        keys, values = ([x.astype(held).astype(dtype) for x in each] for each in (keys, values))
    queries = jnp.asarray(draw((1, HEADS, case.num_rows, WIDTH)), dtype)
    rows, num_pages = case.rows()
    shapes = pool.pool_shapes(
        num_pages,
        PAGE,
        keys[0].shape if keys else (1, KV_HEADS, 1, WIDTH),
        (1, KV_HEADS, 1, WIDTH),
        jnp.dtype(held or dtype),
    )
    if kind == "joint":
        shapes = {"pages": (num_pages, KV_HEADS, PAGE, 128)}
    arrays = {name: jnp.zeros(shape, held or dtype) for name, shape in shapes.items()}

    def step(arrays, rows, key, value, queries):
        written = pool.pool_of(arrays, rows).with_rows(key, value)
        if kind == "triton":
            pages = written.key_pages, written.value_pages
            return pool.arrays_of(written), ranges.pages_attention(queries[0], *pages, rows, **options, interpret=True)[
                None
            ]
        return pool.arrays_of(written), pool.attend(queries, written, **options)

    def all_of(parts, end, count):
        """What the step before wrote (all but the new tokens), or the new ones."""
        rows = [p[:, :, :-n] if end else p[:, :, -n:] for p, n in zip(parts, case.new, strict=True)]
        rows = jnp.concatenate([*rows, jnp.zeros((1, KV_HEADS, 0, WIDTH), dtype)], axis=2)
        return jnp.pad(rows, ((0, 0), (0, 0), (0, count - rows.shape[2]), (0, 0)))

    old = [n - m for n, m in zip(case.lengths, case.new, strict=True)]
    before = dataclasses.replace(
        rows, starts=np.array([0, *np.cumsum(old), *[sum(old)] * 2], np.int32), lengths=np.array([*old, 0, 0], np.int32)
    )
    with target.compiling_for("cpu" if kind == "kernel" else "gpu") as where:
        compiled = jax.jit(step)
        total = sum(old) + 1
        padding = jnp.zeros((1, HEADS, total, WIDTH), dtype)
        arrays, _ = compiled(arrays, before, all_of(keys, True, total), all_of(values, True, total), padding)
        new = all_of(keys, False, case.num_rows), all_of(values, False, case.num_rows)
        _, out = compiled(arrays, rows, *new, queries)
    return out[:, : sum(case.new)], by_sequences(case, keys, values, queries, **options), where


OPTIONS = {
    "all": {},
    "window": {"window": 20},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": jnp.linspace(-1, 2, HEADS)},
}


def cases_and_options():
    """The richest case with every option, every other case with none; the sweep has all pairs."""
    for case in CASES:
        for name, options in OPTIONS.items():
            marks = () if case == "parts of prompts between decoding" or not options else pytest.mark.sweep
            yield pytest.param(CASES[case], options, marks=marks, id=f"{case}-{name}")


def check_each_sequence(kind, case, options):
    out, expected, where = run(case, kind, "float32", scale=0.2, **options)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    return where.chosen


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(("case", "options"), list(cases_and_options()))
def test_each_token_attends_to_its_own_sequence_in_the_kernel(case, options):
    assert any("C++" in way for way in check_each_sequence("kernel", case, options))


@pytest.mark.parametrize(("case", "options"), list(cases_and_options()))
@pytest.mark.parametrize("kind", ["gathered", "joint", "triton"])
def test_each_token_attends_to_its_own_sequence(kind, case, options):
    check_each_sequence(kind, case, options)


@pytest.mark.parametrize("kind", ["kernel", "gathered", "triton"])
def test_bfloat16(kind):
    """Without a compiler, both are plain JAX."""
    out, expected, _ = run(CASES["parts of prompts between decoding"], kind, "bfloat16", scale=0.2)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["kernel", "gathered", "joint", "triton"])
def test_pages_of_float8(kind, dtype):
    case = CASES["parts of prompts between decoding"]
    out, expected, where = run(case, kind, dtype, "float8_e4m3fn", scale=0.2)
    assert out.dtype == dtype
    tolerance = 0.03 if dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=tolerance)
    assert kind != "kernel" or library.problem() is not None or any("C++" in way for way in where.chosen)


def test_positions_and_sequences_of_rows():
    rows, _ = CASES["parts of prompts between decoding"].rows()
    rows = jax.tree.map(jnp.asarray, rows)
    positions = rows.positions(96)
    assert positions[:14].tolist() == [69, *range(12), 53]
    assert positions[82:].tolist() == [-1] * 14
    assert rows.sequences(96)[:14].tolist() == [0, *[1] * 12, 2]
