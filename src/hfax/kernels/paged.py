"""A paged KV cache in the layout of the TPU decoding attention kernels.

A page holds `PAGE_SIZE` tokens of one sequence. The tokens of a sequence fill "slots" from its first page, without the padding
before its prompt. There are two formats, for the two kernels that ship with JAX:

- `JointPages`, head dimension 128: interleaved keys and values of all heads, [batch, pages, page_size, 2 * kv_heads, head_dim]. A
  sliding-window layer keeps the pages its window touches, as a ring: logical page l is at index l modulo their number.
- `SeparatePages`, other multiples of 128: keys and values, each [kv_heads, batch, pages, page_size, head_dim]. The kernel does not
  support windows, so a sliding-window layer keeps exactly its window, in a ring of slots; the window is a multiple of `PAGE_SIZE`.

This module has the array functions; `hfax.kv_cache` decides which layers use pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hfax.kernels.cache_numbers import FP8, to_cache

PAGE_SIZE = 128
_JOINT_WIDTH = 128
_MAX_WRITES = 64
"""Maximum sequences written by unrolled code; more would compile slowly, and are written by a loop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointPages:
    """The pages of one layer in a decoding step.

    Args:
        pages: [batch, pages, page_size, 2 * kv_heads, head_dim].
        slots: [batch] int32, slot of the newest token of each sequence.
    """

    pages: jax.Array
    slots: jax.Array

    @classmethod
    def after_prompt(
        cls, key: jax.Array, value: jax.Array, padding: jax.Array, capacity: int, window: int | None
    ) -> JointPages:
        """The implementation of `after_prompt` for this format."""
        batch, heads, length, width = key.shape
        whole = -(-capacity // PAGE_SIZE)
        count = whole if window is None else min(whole, -(-window // PAGE_SIZE) + 1)
        places = jnp.arange(min(count, -(-length // PAGE_SIZE)))
        last = (length - padding[:, None] - 1) // PAGE_SIZE
        logical = last - (last - places) % count  # [batch, count]; negative for unused entries
        logical = jnp.where(logical < 0, places, logical)
        slots = (logical[:, :, None] * PAGE_SIZE + jnp.arange(PAGE_SIZE)).reshape(batch, -1)
        tokens = jnp.clip(slots + padding[:, None], 0, length - 1)
        # heads after tokens, as models compute them: avoids a transposed copy
        both = jnp.stack([key.swapaxes(1, 2), value.swapaxes(1, 2)], axis=3).reshape(batch, length, 2 * heads, width)
        rows = both[jnp.arange(batch)[:, None], tokens]
        filled = rows.reshape(batch, -1, PAGE_SIZE, 2 * heads, width)
        return cls(pages=_extended(filled, 1, count), slots=length - padding - 1)

    def with_token(self, key: jax.Array, value: jax.Array) -> JointPages:
        """The pages with one more token, at `slots`; in place if the pages are donated."""
        batch, count = self.pages.shape[:2]
        both = jnp.stack([key[:, :, 0], value[:, :, 0]], axis=2).reshape(batch, -1, key.shape[3])
        at = self.pages.at[jnp.arange(batch), self.slots // PAGE_SIZE % count, self.slots % PAGE_SIZE]
        return dataclasses.replace(self, pages=at.set(to_cache(both, self.pages.dtype)))

    def read(self, padding: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        """The dense keys and values of `capacity` tokens, after `padding` tokens."""
        batch, count = self.pages.shape[:2]
        slots = jnp.maximum(jnp.arange(capacity) - padding[:, None], 0)
        # [batch, capacity, 2 * kv_heads, head_dim]
        rows = self.pages[jnp.arange(batch)[:, None], slots // PAGE_SIZE % count, slots % PAGE_SIZE]
        return rows[:, :, 0::2].swapaxes(1, 2), rows[:, :, 1::2].swapaxes(1, 2)

    def table(self) -> tuple[jax.Array, jax.Array]:
        """The page table of each sequence, [batch, pages] int32, and the number of tokens in its pages, [batch] int32."""
        batch, count = self.pages.shape[:2]
        first = jnp.maximum(self.slots // PAGE_SIZE - count + 1, 0)
        places = (first[:, None] + jnp.arange(count, dtype=jnp.int32)) % count
        table = jnp.arange(batch, dtype=jnp.int32)[:, None] * count + places
        return table.astype(jnp.int32), (self.slots + 1 - first * PAGE_SIZE).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeparatePages:
    """The pages of one layer in a decoding step.

    Args:
        key_pages: [kv_heads, batch, pages, page_size, head_dim].
        value_pages: as `key_pages`.
        slots: [batch] int32, slot of the newest token of each sequence, before wrapping around the ring.
    """

    key_pages: jax.Array
    value_pages: jax.Array
    slots: jax.Array

    @classmethod
    def after_prompt(
        cls, key: jax.Array, value: jax.Array, padding: jax.Array, capacity: int, window: int | None
    ) -> SeparatePages:
        """The implementation of `after_prompt` for this format."""
        batch, heads, length, width = key.shape
        count = -(-min(capacity, window or capacity) // PAGE_SIZE)
        newest = (length - padding - 1)[:, None]
        places = jnp.arange(min(count, -(-length // PAGE_SIZE)) * PAGE_SIZE)
        slots = newest - (newest - places) % (count * PAGE_SIZE)  # [batch, places]; negative for unused entries
        tokens = jnp.clip(slots + padding[:, None], 0, length - 1)

        def pages(array: jax.Array) -> jax.Array:
            rows = jax.vmap(lambda of_row, order: of_row[:, order], out_axes=1)(array, tokens)
            return _extended(rows.reshape(heads, batch, -1, PAGE_SIZE, width), 2, count)

        return cls(key_pages=pages(key), value_pages=pages(value), slots=length - padding - 1)

    def with_token(self, key: jax.Array, value: jax.Array) -> SeparatePages:
        """The pages with one more token, at `slots`; in place if the pages are donated."""
        batch, count = self.key_pages.shape[1:3]

        def written(pages: jax.Array, new: jax.Array) -> jax.Array:
            # row by row: XLA:TPU copies all pages to another layout for a scatter or a loop
            def write(row: int | jax.Array, pages: jax.Array) -> jax.Array:
                token = jax.lax.dynamic_index_in_dim(new, row, keepdims=False)[:, None, None]
                slot = jax.lax.dynamic_index_in_dim(self.slots, row, keepdims=False)
                place = (0, row, slot // PAGE_SIZE % count, slot % PAGE_SIZE, 0)
                return jax.lax.dynamic_update_slice(pages, to_cache(token, pages.dtype), place)

            if batch > _MAX_WRITES:
                return jax.lax.fori_loop(0, batch, write, pages)
            for row in range(batch):
                pages = write(row, pages)
            return pages

        return dataclasses.replace(
            self, key_pages=written(self.key_pages, key), value_pages=written(self.value_pages, value)
        )

    def read(self, padding: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        """The dense keys and values of `capacity` tokens, after `padding` tokens."""
        batch, count = self.key_pages.shape[1:3]
        slots = jnp.maximum(jnp.arange(capacity) - padding[:, None], 0)
        place = (jnp.arange(batch)[:, None], slots // PAGE_SIZE % count, slots % PAGE_SIZE)
        return self.key_pages[:, *place].swapaxes(0, 1), self.value_pages[:, *place].swapaxes(0, 1)

    def table(self) -> tuple[jax.Array, jax.Array]:
        """The page table of each sequence, [batch, pages] int32, and the number of tokens in its pages, [batch] int32."""
        batch, count = self.key_pages.shape[1:3]
        table = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)
        return table, jnp.minimum(self.slots + 1, count * PAGE_SIZE).astype(jnp.int32)


def _extended(pages: jax.Array, axis: int, count: int) -> jax.Array:
    """`count` pages on an axis: only those that a prompt fills are gathered."""
    return jnp.pad(pages, [(0, count - n if i == axis else 0) for i, n in enumerate(pages.shape)])


Pages = JointPages | SeparatePages


def fits(
    width: int | None,
    window: int | None = None,
    capacity: int | None = None,
    *,
    kv_heads: int | None = None,
    dtype: jnp.dtype | None = None,
) -> bool:
    """Whether a kernel supports a layer.

    Args:
        width: head dimension; None if it varies.
        window: of a sliding-window layer.
        capacity: of the cache, in tokens.
        kv_heads: heads of keys and values on one device; None: not known yet.
        dtype: of the cache.
    """
    if width is None or width % 128 or (dtype == FP8 and width != _JOINT_WIDTH):
        return False
    if width == _JOINT_WIDTH and kv_heads is not None and dtype is not None:
        return can_tile(kv_heads, dtype)
    if width == _JOINT_WIDTH or window is None or capacity is None:
        return True
    return window >= capacity or window % PAGE_SIZE == 0


def can_tile(kv_heads: int, dtype: jnp.dtype) -> bool:
    """Whether the ragged paged kernel can lay out a token's keys and values of so many heads, those of one device.

    The kernel packs them in 32-bit words, and takes 1, 2, 4 or a multiple of 8 of these: not the 10 heads of Phi-4, say.
    """
    words, rest = divmod(2 * kv_heads * dtype.itemsize, 4)
    return rest == 0 and (words in (1, 2, 4) or words % 8 == 0)


def after_prompt(
    key: jax.Array, value: jax.Array, padding: jax.Array, capacity: int, window: int | None
) -> dict[str, jax.Array]:
    """The pages after a prompt, by name; `pages_of` turns them into an object.

    Args:
        key: [batch, kv_heads, length, head_dim].
        value: as `key`.
        padding: [batch] int32, padding tokens before each prompt.
        capacity: capacity in tokens, padding included.
        window: number of tokens a query attends to; None: all.

    Returns:
        Arrays; entries beyond the prompt are undefined.
    """
    kind = JointPages if key.shape[3] == _JOINT_WIDTH else SeparatePages
    return arrays_of(kind.after_prompt(key, value, padding, capacity, window))


def pages_of(arrays: Mapping[str, jax.Array], slots: jax.Array) -> Pages:
    """The inverse of `arrays_of`, with the slots of a step, [batch]."""
    kind = JointPages if "pages" in arrays else SeparatePages
    return kind(**arrays, slots=slots)


def arrays_of(pages: Pages) -> dict[str, jax.Array]:
    """The arrays of pages that are kept between steps, by name."""
    return {f.name: getattr(pages, f.name) for f in dataclasses.fields(pages) if f.name != "slots"}


def heads_axis(name: str) -> int | None:
    """The heads axis of the array of that name; None if it is not a page array."""
    return {"pages": 3, "key_pages": 0, "value_pages": 0}.get(name)
