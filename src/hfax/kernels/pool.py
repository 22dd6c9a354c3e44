"""A pool of pages of keys and values shared by many sequences, for continuous batching.

The tokens of a step are packed sequence by sequence: [1, heads, tokens, head_dim]. `Rows` maps tokens to sequences and holds the
page table of each sequence. Two formats:

- `SplitPool`, everywhere: separate keys and values, [pages, kv_heads, page_size, head_dim]. On CPU a C++ kernel writes and reads
  it, on GPU a Triton kernel reads it; elsewhere a scatter, and a loop over pages up to the longest sequence.
- `JointPool`, on TPU: keys and values of a token beside each other, [pages, kv_heads, page_size, width], written and read by
  Pallas kernels (`hfax.kernels.tpu.pages`).

Page 0 is a dummy page to which padding is written. `hfax.engine` assigns pages to sequences.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hfax.kernels import online_softmax, target
from hfax.kernels.cache_numbers import FP8, to_cache
from hfax.kernels.cpu import calls, library
from hfax.kernels.online_softmax import OnlineSoftmax
from hfax.kernels.rows import Rows
from hfax.kernels.tiles import in_lanes, rows_of
from hfax.sharding.mesh import HEAD_AXES, TENSOR, size_of

_KERNEL_PAGE = 64
"""Maximum page size of the C++ kernel, in tokens."""
_PAGES = P(None, TENSOR, None, None)


@dataclasses.dataclass(kw_only=True)
class SplitPool:
    """The pages of one layer in one step.

    Args:
        key_pages: [pages, kv_heads, page_size, head_dim].
        value_pages: [pages, kv_heads, page_size, value_dim].
        rows: the rows of the step.
        is_read: whether attention read the pool; a model that computes attention itself does not.
    """

    key_pages: jax.Array
    value_pages: jax.Array
    rows: Rows
    is_read: bool = False

    def with_rows(self, key: jax.Array, value: jax.Array) -> SplitPool:
        """The pool with the keys and values of the step, [1, kv_heads, tokens, head_dim]; in place if the pages are donated."""
        written = [_written(p, new[0], self.rows) for p, new in ((self.key_pages, key), (self.value_pages, value))]
        return SplitPool(key_pages=written[0], value_pages=written[1], rows=self.rows)

    def attend(
        self,
        query: jax.Array,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """The pool's implementation of `attend`."""
        options = {"scale": scale, "softcap": softcap, "window": window, "sinks": sinks}
        if _has_kernel(self.key_pages) and calls.can_attend(query.dtype, self.key_pages.dtype):
            target.choose("attention: C++ kernel, reads live pages of the pool")
            rows = self.rows
            out = calls.pages_attention(
                query[0], self.key_pages, self.value_pages, rows.starts, rows.lengths, rows.tables, **options
            )
            return out[None]
        if (on_gpu := _on_gpu(query[0], self.key_pages, self.value_pages, self.rows, **options)) is not None:
            return on_gpu[None]
        target.choose("attention: live pages of the pool, gathered one after the other")
        return _attend_by_pages(query[0], self.key_pages, self.value_pages, self.rows, **options)[None]


@dataclasses.dataclass(kw_only=True)
class JointPool:
    """The pages of one layer in one step, in the layout of the TPU kernels.

    Args:
        pages: [pages, kv_heads, page_size, width]: a token's key, its value, and zeros.
        rows: the rows of the step.
        value_width: the head dimension of values; known once the step is written.
        is_read: as in `SplitPool`.
    """

    pages: jax.Array
    rows: Rows
    value_width: int = 0
    is_read: bool = False

    def with_rows(self, key: jax.Array, value: jax.Array) -> JointPool:
        """The pool with the keys and values of the step, as in `SplitPool`."""
        heads, count = key.shape[1:3]
        new = [to_cache(array[0], self.pages.dtype) for array in (key, value)]
        if self._has_kernels(heads, target.head_shards()[1], key.dtype):
            from hfax.kernels.tpu.pages_write import pages_write  # Pallas for TPU takes a second to import

            kv = P(TENSOR, None, None)
            call = on_devices(pages_write, (_PAGES, kv, kv, P()), _PAGES)
            written = call(self.pages, *new, self.rows)
        else:
            page, offset = _places(self.rows, count, self.pages.shape[2])
            both = jnp.concatenate(new, axis=2).swapaxes(0, 1)
            written = self.pages.at[page, :, offset, : both.shape[2]].set(both)
        return JointPool(pages=written, rows=self.rows, value_width=value.shape[3])

    def attend(
        self,
        query: jax.Array,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
        sinks: jax.Array | None,
    ) -> jax.Array:
        """The pool's implementation of `attend`."""
        options = {"scale": scale, "softcap": softcap, "window": window}
        if scale > 0 and self._has_kernels(query.shape[1], target.head_shards()[0], query.dtype):
            from hfax.kernels.tpu import pages as kernels  # Pallas for TPU takes a second to import

            target.choose("attention: Pallas kernel, reads live pages of the pool")
            options |= {"value_width": self.value_width, "is_batch_invariant": target.is_batch_invariant()}
            heads = P(HEAD_AXES, None, None)
            specs = (heads, _PAGES, P(), None if sinks is None else P(HEAD_AXES))
            call = on_devices(functools.partial(kernels.pages_attention, **options), specs, heads)
            return call(query[0], self.pages, self.rows, sinks).swapaxes(0, 1)[None]
        target.choose("attention: live pages of the pool, gathered one after the other")
        width = query.shape[3]
        keys, values = self.pages[..., :width], self.pages[..., width : width + self.value_width]
        return _attend_by_pages(query[0], keys, values, self.rows, sinks=sinks, **options)[None]

    def _has_kernels(self, heads: int, shards: int, dtype: jnp.dtype) -> bool:
        is_split = heads % shards == 0 and self.pages.shape[1] % target.head_shards()[1] == 0
        return is_split and has_tpu_kernels(dtype, self.pages.dtype)


Pool = SplitPool | JointPool


def pool_shapes(
    num_pages: int,
    page_size: int,
    key: tuple[int, ...],
    value: tuple[int, ...],
    dtype: jnp.dtype,
    *,
    is_for_tpu: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's pool arrays by name.

    Args:
        num_pages: with the dummy page.
        page_size: tokens of a page.
        key: shape of its keys, [batch, kv_heads, length, head_dim].
        value: shape of its values.
        dtype: of the arrays.
        is_for_tpu: the platform is TPU.
    """
    if is_for_tpu and page_size % rows_of(dtype) == 0:
        return {"pages": (num_pages, key[1], page_size, in_lanes(key[3] + value[3]))}
    return {
        "key_pages": (num_pages, key[1], page_size, key[3]),
        "value_pages": (num_pages, value[1], page_size, value[3]),
    }


def pool_spec(mesh: jax.sharding.Mesh, shape: tuple[int, ...]) -> P:
    """Sharding of a pool array over a mesh: by heads, if they divide."""
    return P() if shape[1] % size_of(mesh, TENSOR) else _PAGES


def pool_of(arrays: Mapping[str, jax.Array], rows: Rows) -> Pool:
    """The inverse of `arrays_of`."""
    if "pages" in arrays:
        return JointPool(pages=arrays["pages"], rows=rows)
    return SplitPool(key_pages=arrays["key_pages"], value_pages=arrays["value_pages"], rows=rows)


def arrays_of(pool: Pool) -> dict[str, jax.Array]:
    """The arrays of a pool that are kept between steps, by name."""
    if isinstance(pool, JointPool):
        return {"pages": pool.pages}
    return {"key_pages": pool.key_pages, "value_pages": pool.value_pages}


def attend(
    query: jax.Array,
    pool: Pool,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of each token to its own sequence.

    Args:
        query: [1, heads, tokens, head_dim].
        pool: the layer's pool, including the keys and values of the step.
        scale: multiplies the scores.
        softcap: as in `hfax.kernels.attention`.
        window: number of tokens each token attends to, itself included; None: all.
        sinks: [heads], as in `hfax.kernels.attention`.

    Returns:
        [1, tokens, heads, value_dim] in the dtype of the query; padding rows are undefined.
    """
    pool.is_read = True
    return pool.attend(query, scale=scale, softcap=softcap, window=window, sinks=sinks)


def _has_kernel(pages: jax.Array) -> bool:
    fits = pages.dtype in (jnp.bfloat16, jnp.float32, FP8) and pages.shape[2] <= _KERNEL_PAGE
    return fits and library.may_be_called()


def _on_gpu(
    query: jax.Array, keys: jax.Array, values: jax.Array, rows: Rows, *, sinks: jax.Array | None, **options: Any
) -> jax.Array | None:
    """`_attend_by_pages` by a Triton kernel; None if it does not support these, or the program is not for an NVIDIA GPU."""
    shards, kv_shards = target.head_shards()
    if (gpu := target.nvidia_gpu()) is None or query.shape[0] % shards or keys.shape[1] % kv_shards:
        return None
    from hfax.kernels.gpu import ranges

    if not ranges.fits(query, keys, values) or not (target.is_described(gpu) or ranges.works(query.dtype, keys.dtype)):
        return None
    target.choose("attention: Triton kernel, reads live pages of the pool")
    specs = (P(HEAD_AXES, None, None), _PAGES, _PAGES, P(), None if sinks is None else P(HEAD_AXES))
    call = on_devices(functools.partial(ranges.pages_attention, **options), specs, P(None, HEAD_AXES, None))
    return call(query, keys, values, rows, sinks)


def has_tpu_kernels(dtype: jnp.dtype, cache_dtype: jnp.dtype) -> bool:
    """Whether the current trace's program is for a TPU whose kernels support pages.

    Args:
        dtype: of the queries, or of the keys and values that are written, which may be rounded to float8 already.
        cache_dtype: of the pages.
    """
    dtype = jnp.dtype(jnp.bfloat16) if dtype == FP8 else dtype
    if (device := target.tpu()) is None or dtype not in (jnp.bfloat16, jnp.float32) or cache_dtype not in (dtype, FP8):
        return False
    from hfax.kernels.tpu import pages as kernels  # Pallas for TPU takes a second to import

    return target.is_described(device) or kernels.works(dtype, cache_dtype)


def on_devices(function: Callable[..., jax.Array], in_specs: Any, out_specs: P) -> Callable[..., jax.Array]:
    """The function of one device's arrays as one of those of all devices of the program."""
    if (mesh := target.mesh()) is None:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _places(rows: Rows, count: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Page and slot of each token of the step: [count] int32 each; page 0 for padding."""
    positions = rows.positions(count)
    index = jnp.clip(positions // page_size, 0, rows.tables.shape[1] - 1)
    page = jnp.where(positions < 0, 0, rows.tables[rows.sequences(count), index])
    return page, jnp.maximum(positions, 0) % page_size


def _written(pages: jax.Array, new: jax.Array, rows: Rows) -> jax.Array:
    """`pages` with `new`, [kv_heads, tokens, width], written."""
    new = to_cache(new, pages.dtype)
    if _has_kernel(pages):
        return calls.pages_write(pages, new, rows.starts, rows.lengths, rows.tables)
    page, offset = _places(rows, new.shape[1], pages.shape[2])
    written = pages.at[page, :, offset].set(new.swapaxes(0, 1))
    if (mesh := target.mesh()) is None:
        return written
    return jax.lax.with_sharding_constraint(written, NamedSharding(mesh, pool_spec(mesh, written.shape)))


def _attend_by_pages(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rows: Rows,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """[heads, tokens, head_dim] to [tokens, heads, value_dim]: online softmax over pages, up to the last one that is needed."""
    heads, count, width = query.shape
    _, kv_heads, page_size, value_width = values.shape
    groups = heads // kv_heads
    grouped = query.reshape(kv_heads, groups, count, width)
    positions, tables = rows.positions(count), rows.tables[rows.sequences(count)]
    first = jnp.zeros_like(positions) if window is None else jnp.maximum(positions - window + 1, 0)
    logits = None if sinks is None else sinks.reshape(kv_heads, groups, 1, 1)

    def visit(index: jax.Array, state: OnlineSoftmax) -> OnlineSoftmax:
        page = jax.lax.dynamic_index_in_dim(tables, index, axis=1, keepdims=False)
        key, value = (
            pages[page].astype(query.dtype) for pages in (keys, values)
        )  # [tokens, kv_heads, page_size, width]
        scores = jnp.einsum("kgtd,tksd->kgts", grouped, key, preferred_element_type=jnp.float32) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        column = index * page_size + jnp.arange(page_size)
        seen = (column >= first[:, None]) & (column <= positions[:, None])

        def weighted(share: jax.Array) -> jax.Array:
            return jnp.einsum("kgts,tksd->kgtd", share.astype(value.dtype), value, preferred_element_type=jnp.float32)

        return online_softmax.add(state, scores, seen, weighted)

    begin = jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, first).min() // page_size
    state = online_softmax.start((kv_heads, groups, count), value_width, logits)
    state = jax.lax.fori_loop(begin, positions.max() // page_size + 1, visit, state)
    return online_softmax.finish(state).astype(query.dtype).reshape(heads, count, value_width).swapaxes(0, 1)
