"""A KV cache in pages on TPU, for `generate`: each sequence of a batch has pages of its own.

A page holds the keys and values of some consecutive tokens of one sequence, in the layout of the TPU kernels
(`hfax.kernels.tpu.pages`). The tokens of a sequence fill "slots" from its first page, without the padding before its prompt. A
sliding-window layer keeps the pages its window touches, as a ring: logical page l is at index l modulo their number.

This module has the array functions; `hfax.kv_cache` decides which layers use pages.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hfax.kernels import target
from hfax.kernels.cache_numbers import to_cache
from hfax.kernels.pool import has_tpu_kernels, on_devices
from hfax.kernels.rows import Rows, size_of_pages
from hfax.kernels.tiles import in_lanes
from hfax.sharding.mesh import HEAD_AXES, TENSOR, batch_axes, size_of

_PAGE_SIZE = 128
HEADS = 2
"""The axis of heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """The pages of one layer in a step of decoding, or of reading a few tokens.

    Args:
        pages: [batch, pages, kv_heads, page_size, width]: a token's key, its value, and zeros.
        slots: [batch] int32, slot of the newest token of each sequence.
        capacity: of the cache, in tokens.
        widths: the head dimensions of keys and of values.
        are_latents: the keys are latents and the values what follows them (`hfax.kernels.latents`): attention has both as keys, and
            the latents as values.
    """

    pages: jax.Array
    slots: jax.Array
    capacity: int
    widths: tuple[int, int]
    are_latents: bool = False

    def with_tokens(self, key: jax.Array, value: jax.Array) -> Pages:
        """The pages with the next tokens, [batch, kv_heads, tokens, head_dim], the last at `slots`; in place if they are donated.

        Raises:
            NotImplementedError: several tokens at once, where the pages are a ring.
        """
        batch, count, _, size, _ = self.pages.shape
        if key.shape[2] > 1 and not holds_all(self.pages, self.capacity):
            raise NotImplementedError("several tokens at once onto a window in pages")
        new = [to_cache(array, self.pages.dtype) for array in (key, value)]
        if has_tpu_kernels(key.dtype, self.pages.dtype):
            rows, heads = self._axes()
            of_pages, of_new = P(rows, None, heads, None, None), P(rows, heads, None, None)
            write = on_devices(self._write, (of_pages, of_new, of_new, P(rows)), of_pages)
            return dataclasses.replace(self, pages=write(self.pages, *new, self.slots))
        slots = self.slots[:, None] + jnp.arange(1 - key.shape[2], 1)
        both = jnp.concatenate(new, axis=3).swapaxes(1, 2)
        at = self.pages.at[jnp.arange(batch)[:, None], slots // size % count, :, slots % size, : both.shape[3]]
        return dataclasses.replace(self, pages=at.set(both))

    def read(self, padding: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The dense keys and values of `capacity` tokens, [batch, kv_heads, capacity, head_dim], after `padding` tokens."""
        batch, count, _, size, _ = self.pages.shape
        slots = jnp.maximum(jnp.arange(self.capacity) - padding[:, None], 0)
        # [batch, capacity, kv_heads, width]
        found = self.pages[jnp.arange(batch)[:, None], slots // size % count, :, slots % size].swapaxes(1, 2)
        of_key, of_value = self.widths
        return found[..., :of_key], found[..., of_key : of_key + of_value]

    def attend(
        self,
        query: jax.Array,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """Causal attention of each sequence's newest tokens to its pages, of which only those that are seen are read.

        Args:
            query: [batch, heads, tokens, head_dim]; for latents as wide as both.
            scale: multiplies the scores.
            softcap: as in `hfax.kernels.attention`.
            window: number of tokens each token attends to, itself included; None: all.
            sinks: [heads], as in `hfax.kernels.attention`.

        Returns:
            [batch, tokens, heads, value_dim]; for latents as wide as these.
        """
        rows, heads = self._axes()
        specs = (
            P(rows, HEAD_AXES, None, None),
            P(rows, None, heads, None, None),
            P(rows),
            None if sinks is None else P(HEAD_AXES),
        )
        local = functools.partial(self._attend, scale=scale, softcap=softcap, window=window)
        call = on_devices(local, specs, P(rows, None, HEAD_AXES, None))
        return call(query, self.pages, self.slots, sinks)

    def _axes(self) -> tuple[tuple[str, ...] | None, str | None]:
        """The axes of sequences and of heads: a single head is that of all devices."""
        mesh = target.mesh()
        rows = None if mesh is None else batch_axes(mesh, self.pages.shape[0])
        return rows, None if self.pages.shape[HEADS] == 1 else TENSOR

    def _tables(self, pages: jax.Array) -> jax.Array:
        """[batch, pages] int32: the page of each `page_size` tokens, for the sequences of one device."""
        batch, count, _, size, _ = pages.shape
        logical = np.arange(-(-self.capacity // size))
        return jnp.asarray(np.arange(batch)[:, None] * count + logical % count, jnp.int32)

    def _write(self, pages: jax.Array, key: jax.Array, value: jax.Array, slots: jax.Array) -> jax.Array:
        from hfax.kernels.tpu import pages_write as kernels  # Pallas for TPU takes a second to import

        new, (batch, count, _, size, _) = (_packed(key), _packed(value)), pages.shape
        if key.shape[2] == 1:
            page = jnp.arange(batch, dtype=jnp.int32) * count + slots // size % count
            return kernels.pages_write_newest(_flat(pages), *new, page, slots % size).reshape(pages.shape)
        rows = Rows(starts=_starts(batch, key.shape[2]), lengths=slots + 1, tables=self._tables(pages))
        return kernels.pages_write(_flat(pages), *new, rows).reshape(pages.shape)

    def _attend(
        self, query: jax.Array, pages: jax.Array, slots: jax.Array, sinks: jax.Array | None, **options: Any
    ) -> jax.Array:
        from hfax.kernels.tpu.pages import pages_attention  # Pallas for TPU takes a second to import
        from hfax.kernels.tpu.pages_decode import decode_attention

        flat, tables = _flat(pages), self._tables(pages)
        options |= (
            {"value_width": self.widths[0], "value_at": 0} if self.are_latents else {"value_width": self.widths[1]}
        )
        if query.shape[2] == 1:
            return decode_attention(query[:, :, 0], flat, slots + 1, tables, sinks, **options)[:, None]
        rows = Rows(starts=_starts(len(query), query.shape[2]), lengths=slots + 1, tables=tables)
        out = pages_attention(_packed(query), flat, rows, sinks, **options)
        return out.swapaxes(0, 1).reshape(len(query), -1, *out.shape[::2])


@dataclasses.dataclass(kw_only=True)
class PromptKeys:
    """What attention in a prompt says about its keys: whether attention in decoding can read pages in place of them.

    Args:
        reads: of each call of attention, whether it was causal attention of a kind that the kernel supports.
    """

    reads: list[bool] = dataclasses.field(default_factory=list)

    @property
    def can_be_read(self) -> bool:
        """Whether pages can replace the keys."""
        return bool(self.reads) and all(self.reads)


def are_kept(dtype: jnp.dtype, cache_dtype: jnp.dtype | None) -> bool:
    """Whether caches of the current trace's program are in pages.

    Args:
        dtype: of the model.
        cache_dtype: of the cache; None: the model's.
    """
    if (where := target.current()) is None or not where.pages:
        return False
    return where.platform != "tpu" or has_tpu_kernels(dtype, cache_dtype or dtype)


def can_attend(heads: int, kv_heads: int, *, scale: float) -> bool:
    """Whether the kernel supports these numbers of heads of queries and of keys, and the factor of scores."""
    shards, kv_shards = target.head_shards()
    return scale > 0 and heads % shards == 0 and (kv_heads == 1 or kv_heads % kv_shards == 0)


def after_prompt(key: jax.Array, value: jax.Array, padding: jax.Array, capacity: int, window: int | None) -> jax.Array:
    """The pages after a prompt, as in `Pages`.

    Args:
        key: [batch, kv_heads, length, head_dim].
        value: as `key`, perhaps of another head dimension.
        padding: [batch] int32, padding tokens before each prompt.
        capacity: capacity in tokens, padding included.
        window: number of tokens a query attends to; None: all.

    Returns:
        Pages; slots after the prompt are undefined.
    """
    batch, heads, length, _ = key.shape
    mesh = target.mesh()
    rows = 1 if mesh is None or (axes := batch_axes(mesh, batch)) is None else size_of(mesh, axes)
    size = size_of_pages(_PAGE_SIZE, batch // rows, capacity)
    whole = -(-capacity // size)
    count = whole if window is None else min(whole, -(-window // size) + 1)
    places = jnp.arange(min(count, -(-length // size)))
    last = (length - padding[:, None] - 1) // size
    logical = last - (last - places) % count  # [batch, places]; negative for unused entries
    logical = jnp.where(logical < 0, places, logical)
    slots = (logical[:, :, None] * size + jnp.arange(size)).reshape(batch, -1)
    tokens = jnp.clip(slots + padding[:, None], 0, length - 1)
    # heads after tokens, as models compute them: avoids a transposed copy
    both = jnp.concatenate([key, value], axis=3).swapaxes(1, 2)
    found = both[jnp.arange(batch)[:, None], tokens].reshape(batch, -1, size, heads, both.shape[3])
    further = (0, count - found.shape[1]), (0, in_lanes(both.shape[3]) - both.shape[3])
    return jnp.pad(found.swapaxes(2, 3), ((0, 0), further[0], (0, 0), (0, 0), further[1]))


def holds_all(pages: jax.Array, capacity: int) -> bool:
    """Whether pages, as in `Pages`, have a place for every token, not only for those of a window."""
    return pages.shape[1] * pages.shape[3] >= capacity


def grown(pages: jax.Array, capacity: int, new: int) -> jax.Array:
    """The pages of a cache that becomes larger: with places for `new` tokens if they have one for each of `capacity`."""
    more = -(-new // pages.shape[3]) - pages.shape[1]
    return jnp.pad(pages, ((0, 0), (0, more), *[(0, 0)] * 3)) if holds_all(pages, capacity) and more > 0 else pages


def _starts(batch: int, tokens: int) -> jax.Array:
    return jnp.arange(batch + 1, dtype=jnp.int32) * tokens


def _packed(new: jax.Array) -> jax.Array:
    """[batch, heads, tokens, width] as [heads, batch * tokens, width]."""
    return new.swapaxes(0, 1).reshape(new.shape[1], -1, new.shape[3])


def _flat(pages: jax.Array) -> jax.Array:
    """The pages of all sequences as one list."""
    return pages.reshape(-1, *pages.shape[2:])
