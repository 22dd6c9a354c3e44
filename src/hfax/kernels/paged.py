"""A cache of keys and values in pages, as TPU's attention kernel for decoding reads it.

A page holds `PAGE_SIZE` tokens of one sequence, keys and values of all heads in turns: [page_size, 2 * kv_heads, head_dim]. A
sequence's tokens stand from its first page on without the padding before its prompt, at "slots". A layer with a window keeps only
as many pages as the window touches and uses them in a ring: logical page l is in place l modulo the number of pages. Here are the
functions of arrays; which layers keep pages is decided in `hfax.kv_cache`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

PAGE_SIZE = 128
HEAD_DIM = 128
"""The width of heads that TPU's kernel takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """One layer's pages in a decoding step.

    Args:
        array: [batch, pages, page_size, 2 * kv_heads, head_dim].
        slots: [batch] int32, where each sequence's newest token stands.
    """

    array: jax.Array
    slots: jax.Array

    def flat(self) -> jax.Array:
        """[batch * pages, page_size, 2 * kv_heads, head_dim]."""
        return self.array.reshape(-1, *self.array.shape[2:])

    def table(self) -> tuple[jax.Array, jax.Array]:
        """The places of each sequence's pages in order, [batch, pages] int32, and how many tokens stand on them, [batch] int32."""
        batch, count = self.array.shape[:2]
        last = self.slots // PAGE_SIZE
        first = jnp.maximum(last - count + 1, 0)
        places = (first[:, None] + jnp.arange(count, dtype=jnp.int32)) % count
        table = jnp.arange(batch, dtype=jnp.int32)[:, None] * count + places
        return table.astype(jnp.int32), (self.slots + 1 - first * PAGE_SIZE).astype(jnp.int32)


def num_pages(capacity: int, window: int | None) -> int:
    """Pages of a sequence: for all its tokens, or for those that a window touches wherever it stands."""
    whole = -(-capacity // PAGE_SIZE)
    return whole if window is None else min(whole, -(-window // PAGE_SIZE) + 1)


def fill_pages(key: jax.Array, value: jax.Array, padding: jax.Array, count: int) -> jax.Array:
    """The pages after a prompt.

    Args:
        key: [batch, kv_heads, length, head_dim].
        value: as `key`.
        padding: [batch] int32, tokens of padding before each prompt.
        count: pages a sequence.

    Returns:
        [batch, count, page_size, 2 * kv_heads, head_dim]; places beyond the prompt hold anything.
    """
    length = key.shape[2]
    last = (length - padding - 1) // PAGE_SIZE
    places = jnp.arange(count)
    logical = (
        last[:, None] - (last[:, None] - places) % count
    )  # [batch, count]; a place that is not used yet is below 0
    logical = jnp.where(logical < 0, places, logical)
    slots = (logical[:, :, None] * PAGE_SIZE + jnp.arange(PAGE_SIZE)).reshape(len(padding), -1)
    tokens = jnp.clip(slots + padding[:, None], 0, length - 1)
    # heads behind tokens, as models compute them: no transposed copy is made
    both = jnp.stack([key.swapaxes(1, 2), value.swapaxes(1, 2)], axis=3)
    rows = both.reshape(*both.shape[:2], 2 * key.shape[1], key.shape[3])[jnp.arange(len(padding))[:, None], tokens]
    return rows.reshape(key.shape[0], count, PAGE_SIZE, *rows.shape[2:])


def write_page(pages: jax.Array, key: jax.Array, value: jax.Array, slots: jax.Array) -> jax.Array:
    """The pages with a token more: `key` and `value`, [batch, kv_heads, 1, head_dim], at `slots`, [batch]; in place if donated."""
    batch, count = pages.shape[:2]
    both = jnp.stack([key[:, :, 0], value[:, :, 0]], axis=2).reshape(batch, -1, key.shape[3])
    places = slots // PAGE_SIZE % count
    return pages.at[jnp.arange(batch), places, slots % PAGE_SIZE].set(both.astype(pages.dtype))


def read_pages(pages: jax.Array, padding: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values, [batch, kv_heads, capacity, head_dim], with the padding in front again: what other attention reads.

    Tokens that a window has left behind are not there; other values stand for them.
    """
    batch, count = pages.shape[:2]
    slots = jnp.maximum(jnp.arange(capacity) - padding[:, None], 0)
    rows = pages[
        jnp.arange(batch)[:, None], slots // PAGE_SIZE % count, slots % PAGE_SIZE
    ]  # [batch, capacity, 2 * kv, d]
    return rows[:, :, 0::2].swapaxes(1, 2), rows[:, :, 1::2].swapaxes(1, 2)
