"""A cache of keys and values in pages, as TPU's attention kernels for decoding read it.

A page holds `PAGE_SIZE` tokens of one sequence. A sequence's tokens stand from its first page on without the padding before its
prompt, at "slots". There are two formats, for the two kernels that ship with JAX:

- `JointPages`, heads 128 wide: keys and values of all heads in turns, [batch, pages, page_size, 2 * kv_heads, head_dim]. A layer
  with a window keeps as many pages as the window touches and uses them in a ring: logical page l is in place l modulo their number.
- `SeparatePages`, other multiples of 128: keys and values, each [kv_heads, batch, pages, page_size, head_dim]. The kernel knows no
  windows, so a layer with one keeps exactly its tokens, in a ring of slots; the window is a multiple of `PAGE_SIZE`.

Here are the functions of arrays; which layers keep pages is decided in `hfax.kv_cache`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

PAGE_SIZE = 128
_JOINT_WIDTH = 128
_MAX_WRITES = 64
"""Sequences whose tokens are written one by one; more would take long to compile, and are written by a loop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointPages:
    """One layer's pages in a decoding step.

    Args:
        pages: [batch, pages, page_size, 2 * kv_heads, head_dim].
        slots: [batch] int32, where each sequence's newest token stands.
    """

    pages: jax.Array
    slots: jax.Array

    @classmethod
    def after_prompt(
        cls, key: jax.Array, value: jax.Array, padding: jax.Array, capacity: int, window: int | None
    ) -> JointPages:
        """See `after_prompt`."""
        batch, heads, length, width = key.shape
        whole = -(-capacity // PAGE_SIZE)
        count = whole if window is None else min(whole, -(-window // PAGE_SIZE) + 1)
        places = jnp.arange(count)
        last = (length - padding[:, None] - 1) // PAGE_SIZE
        logical = last - (last - places) % count  # [batch, count]; a place that is not used yet is below 0
        logical = jnp.where(logical < 0, places, logical)
        slots = (logical[:, :, None] * PAGE_SIZE + jnp.arange(PAGE_SIZE)).reshape(batch, -1)
        tokens = jnp.clip(slots + padding[:, None], 0, length - 1)
        # heads behind tokens, as models compute them: no transposed copy is made
        both = jnp.stack([key.swapaxes(1, 2), value.swapaxes(1, 2)], axis=3).reshape(batch, length, 2 * heads, width)
        rows = both[jnp.arange(batch)[:, None], tokens]
        return cls(pages=rows.reshape(batch, count, PAGE_SIZE, 2 * heads, width), slots=length - padding - 1)

    def with_token(self, key: jax.Array, value: jax.Array) -> JointPages:
        """A token more, at `slots`; in place if the pages are donated."""
        batch, count = self.pages.shape[:2]
        both = jnp.stack([key[:, :, 0], value[:, :, 0]], axis=2).reshape(batch, -1, key.shape[3])
        at = self.pages.at[jnp.arange(batch), self.slots // PAGE_SIZE % count, self.slots % PAGE_SIZE]
        return dataclasses.replace(self, pages=at.set(both.astype(self.pages.dtype)))

    def read(self, padding: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        """See `read`."""
        batch, count = self.pages.shape[:2]
        slots = jnp.maximum(jnp.arange(capacity) - padding[:, None], 0)
        # [batch, capacity, 2 * kv_heads, head_dim]
        rows = self.pages[jnp.arange(batch)[:, None], slots // PAGE_SIZE % count, slots % PAGE_SIZE]
        return rows[:, :, 0::2].swapaxes(1, 2), rows[:, :, 1::2].swapaxes(1, 2)

    def table(self) -> tuple[jax.Array, jax.Array]:
        """The places of each sequence's pages in order, [batch, pages] int32, and how many tokens stand on them, [batch] int32."""
        batch, count = self.pages.shape[:2]
        first = jnp.maximum(self.slots // PAGE_SIZE - count + 1, 0)
        places = (first[:, None] + jnp.arange(count, dtype=jnp.int32)) % count
        table = jnp.arange(batch, dtype=jnp.int32)[:, None] * count + places
        return table.astype(jnp.int32), (self.slots + 1 - first * PAGE_SIZE).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeparatePages:
    """One layer's pages in a decoding step.

    Args:
        key_pages: [kv_heads, batch, pages, page_size, head_dim].
        value_pages: as `key_pages`.
        slots: [batch] int32, where each sequence's newest token stands, before it goes round the ring.
    """

    key_pages: jax.Array
    value_pages: jax.Array
    slots: jax.Array

    @classmethod
    def after_prompt(
        cls, key: jax.Array, value: jax.Array, padding: jax.Array, capacity: int, window: int | None
    ) -> SeparatePages:
        """See `after_prompt`."""
        batch, heads, length, width = key.shape
        count = -(-min(capacity, window or capacity) // PAGE_SIZE)
        newest = (length - padding - 1)[:, None]
        places = jnp.arange(count * PAGE_SIZE)
        slots = newest - (newest - places) % (count * PAGE_SIZE)  # [batch, places]; below 0: not used yet
        tokens = jnp.clip(slots + padding[:, None], 0, length - 1)

        def pages(array: jax.Array) -> jax.Array:
            rows = jax.vmap(lambda of_row, order: of_row[:, order], out_axes=1)(array, tokens)
            return rows.reshape(heads, batch, count, PAGE_SIZE, width)

        return cls(key_pages=pages(key), value_pages=pages(value), slots=length - padding - 1)

    def with_token(self, key: jax.Array, value: jax.Array) -> SeparatePages:
        """A token more, at `slots`; in place if the pages are donated."""
        batch, count = self.key_pages.shape[1:3]

        def written(pages: jax.Array, new: jax.Array) -> jax.Array:
            # row by row: XLA:TPU copies all pages to another layout for a scatter, and for a loop, too
            def write(row: int | jax.Array, pages: jax.Array) -> jax.Array:
                token = jax.lax.dynamic_index_in_dim(new, row, keepdims=False)[:, None, None].astype(pages.dtype)
                slot = jax.lax.dynamic_index_in_dim(self.slots, row, keepdims=False)
                place = (0, row, slot // PAGE_SIZE % count, slot % PAGE_SIZE, 0)
                return jax.lax.dynamic_update_slice(pages, token, place)

            if batch > _MAX_WRITES:
                return jax.lax.fori_loop(0, batch, write, pages)
            for row in range(batch):
                pages = write(row, pages)
            return pages

        return dataclasses.replace(
            self, key_pages=written(self.key_pages, key), value_pages=written(self.value_pages, value)
        )

    def read(self, padding: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        """See `read`."""
        batch, count = self.key_pages.shape[1:3]
        slots = jnp.maximum(jnp.arange(capacity) - padding[:, None], 0)
        place = (jnp.arange(batch)[:, None], slots // PAGE_SIZE % count, slots % PAGE_SIZE)
        return self.key_pages[:, *place].swapaxes(0, 1), self.value_pages[:, *place].swapaxes(0, 1)

    def table(self) -> tuple[jax.Array, jax.Array]:
        """The places of each sequence's pages, [batch, pages] int32, and how many tokens stand on them, [batch] int32."""
        batch, count = self.key_pages.shape[1:3]
        table = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)
        return table, jnp.minimum(self.slots + 1, count * PAGE_SIZE).astype(jnp.int32)


Pages = JointPages | SeparatePages


def fits(width: int | None, window: int | None = None, capacity: int | None = None) -> bool:
    """Whether a kernel takes heads of this width, and a layer with this window of a cache of this capacity."""
    if width is None or width % 128:
        return False
    if width == _JOINT_WIDTH or window is None or capacity is None:
        return True
    return window >= capacity or window % PAGE_SIZE == 0


def after_prompt(
    key: jax.Array, value: jax.Array, padding: jax.Array, capacity: int, window: int | None
) -> dict[str, jax.Array]:
    """The pages after a prompt, by name; `pages_of` makes them an object again.

    Args:
        key: [batch, kv_heads, length, head_dim].
        value: as `key`.
        padding: [batch] int32, tokens of padding before each prompt.
        capacity: tokens, padding included.
        window: how many tokens a query sees; None: all.

    Returns:
        Arrays whose places beyond the prompt hold anything.
    """
    kind = JointPages if key.shape[3] == _JOINT_WIDTH else SeparatePages
    return arrays_of(kind.after_prompt(key, value, padding, capacity, window))


def pages_of(arrays: Mapping[str, jax.Array], slots: jax.Array) -> Pages:
    """The inverse of `arrays_of`, with the slots of a step, [batch]."""
    kind = JointPages if "pages" in arrays else SeparatePages
    return kind(**arrays, slots=slots)


def arrays_of(pages: Pages) -> dict[str, jax.Array]:
    """What is kept of pages between steps, by name."""
    return {f.name: getattr(pages, f.name) for f in dataclasses.fields(pages) if f.name != "slots"}


def heads_axis(name: str) -> int | None:
    """Which axis of the array of that name goes over heads; None if it is none of pages."""
    return {"pages": 3, "key_pages": 0, "value_pages": 0}.get(name)
