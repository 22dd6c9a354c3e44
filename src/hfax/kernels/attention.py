"""Grouped-query attention without repeated heads, and masks built from positions.

`attention` selects an implementation: the full score matrix at once; blocks of queries and keys with online softmax, for long
prompts with large score matrices; on CPU a C++ kernel that reads only visible keys. The functions take and return `jax.Array`s;
the backend registers them with transformers' attention interface. They do not know models.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from hfax.kernels import online_softmax, precision, target
from hfax.kernels.cpu import calls, library
from hfax.kernels.online_softmax import OnlineSoftmax
from hfax.kernels.paged import Pages, can_attend
from hfax.kernels.pool import has_tpu_kernels
from hfax.sharding.mesh import HEAD_AXES, TENSOR, batch_axes

OWN_MASK = -1e30
"""Replaces minus infinity in scores: its exp() is 0, and fully masked rows stay finite."""
_MAX_SCORES_BYTES = 64 << 20
"""Maximum size of a full score matrix; larger ones are computed in blocks."""
_MAX_MASK_BYTES = 64 << 20
"""Maximum size of a mask for the C++ kernel."""
_QUERY_BLOCK, _KEY_BLOCK = 256, 512
_KERNEL_QUERIES = 16
"""Maximum number of queries for the kernels of decoding steps, on CPU and GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causal:
    """A causal mask: every token attends to itself and earlier tokens.

    Args:
        window: maximum number of tokens, itself included; None: all.
        is_real: [batch, length], 0 for padding, which is masked; None: no padding.
    """

    window: int | None
    is_real: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segments:
    """A mask of packed tokens: each attends to those of its own segment.

    Args:
        ids: [tokens] int, number of each token's segment. The tokens of a segment follow each other.
        longest: tokens that a segment has at most.
    """

    ids: jax.Array
    longest: int

    def ranges(self) -> tuple[jax.Array, jax.Array]:
        """Each token's first key and the one after its last, [tokens] int32 each."""
        count = self.ids.shape[0]
        place, is_new = jnp.arange(count, dtype=jnp.int32), self.ids[1:] != self.ids[:-1]
        starts = jnp.where(jnp.concatenate([jnp.ones(1, jnp.bool_), is_new]), place, 0)
        ends = jnp.where(jnp.concatenate([is_new, jnp.ones(1, jnp.bool_)]), place + 1, count)
        return jax.lax.cummax(starts), jax.lax.cummin(ends, reverse=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys each query attends to.

    Args:
        array: [batch | 1, heads | 1, queries, keys]; bool (True: attend) or additive float.
        block: the mask by blocks: maps array indices of queries, [n], and of keys, [m], to [batch | 1, 1, n, m] bool; None if
            only the array is known. If blocks are used, the array is never computed.
        causal: structural description of the mask, if kernels support it directly.
        segments: likewise for the mask of packed tokens, one row of [batch].
        seen: the same as bool, if the array is not and was made from it.
    """

    array: jax.Array
    block: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    causal: Causal | None = None
    segments: Segments | None = None
    seen: jax.Array | None = None

    @property
    def truth(self) -> jax.Array | None:
        """The mask as bool; None if only numbers are known."""
        return self.array if self.array.dtype == jnp.bool_ else self.seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropout:
    """Dropout on attention probabilities.

    Args:
        rate: dropout rate; the rest is scaled up.
        key: a PRNG key.
    """

    rate: float
    key: jax.Array


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | Mask | None,
    *,
    scale: float,
    softcap: float | None = None,
    position_bias: jax.Array | None = None,
    sinks: jax.Array | None = None,
    pages: Pages | None = None,
    held: tuple[jax.Array, jax.Array] | None = None,
    dropout: Dropout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim]; `heads` is a multiple of `kv_heads`, and consecutive heads share a key head.
        value: [batch, kv_heads, keys, value_dim].
        mask: [batch | 1, heads | 1, queries, keys]; bool (True: attend) or additive float; or a `Mask`; None to attend everywhere.
        scale: multiplies the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`, as in Gemma 2.
        position_bias: added to the scores, shaped as `mask`.
        sinks: [heads], one extra logit per head that takes probability but has no value, as in gpt-oss.
        pages: the paged cache equivalent to `key` and `value`, if there is one.
        held: the cache's own numbers that `key` and `value` were converted from, if it is of another dtype; kernels that take
            them read half as much.
        dropout: dropout on the probabilities, in train mode.

    Returns:
        The output, [batch, queries, heads, value_dim], and the probabilities, [batch, heads, queries, keys] (which XLA removes
        if unused), both in the dtype of the query. Fully masked rows are 0, as in torch.
    """
    given = mask if isinstance(mask, Mask) or mask is None else Mask(array=mask)
    array = None if given is None else given.array
    with precision.of_products(query.dtype):
        out, probabilities = _all_at_once(
            query,
            key,
            value,
            array,
            scale=scale,
            softcap=softcap,
            position_bias=position_bias,
            sinks=sinks,
            dropout=dropout,
        )
    if position_bias is not None or dropout is not None:
        return out, probabilities
    if sinks is None and _fits_prompt_kernel(query, key, value, array):
        target.choose("attention: C++ kernel, prompts")
        seen = jnp.ones((), jnp.bool_) if array is None else array
        seen = jnp.broadcast_to(seen, (*(seen.shape[:2] or (1, 1)), query.shape[2], key.shape[2]))
        by_token = target.is_differentiated()
        return calls.prompt_attention(query, key, value, seen, scale, softcap, by_token), probabilities
    if given is None:
        return out, probabilities
    if target.is_for("tpu"):
        on_tpu = _on_tpu(query, key, value, given, pages, scale=scale, softcap=softcap, sinks=sinks)
        if on_tpu is not None:
            return on_tpu, probabilities
    on_gpu = _on_gpu(query, key, value, given, scale=scale, softcap=softcap, sinks=sinks, held=held)
    if on_gpu is not None:
        return on_gpu, probabilities
    if _has_kernel(query, *(held or (key, value)), given.array):
        target.choose("attention: C++ kernel, reads the keys that are seen")
        seen = jnp.broadcast_to(given.array, (*given.array.shape[:2], query.shape[2], key.shape[2]))
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
        out = calls.decode_attention(query, *(held or (key, value)), seen, **options)
    elif (
        given.block is not None
        and 4 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] > _MAX_SCORES_BYTES
    ):
        target.choose("attention: blocks of queries and keys")
        with precision.of_products(query.dtype):
            out = _in_blocks(query, key, value, given.block, scale=scale, softcap=softcap, sinks=sinks)
    return out, probabilities


def _on_tpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    pages: Pages | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array | None:
    """By a Pallas kernel; None if none supports these shapes."""
    from hfax.kernels.tpu import attention as kernels  # Pallas for TPU takes a second to import

    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    if pages is not None:
        fits = can_attend(query.shape[1], key.shape[1], scale=scale) and has_tpu_kernels(query.dtype, pages.pages.dtype)
        if mask.causal is None or not fits:
            return None
        target.choose("attention: Pallas kernel, reads live pages of the cache")
        return pages.attend(query, window=mask.causal.window, sinks=sinks, **options)
    shards, kv_shards = target.head_shards()
    if query.shape[1] % shards or key.shape[1] % kv_shards or not kernels.can_splash(query, key):
        return None
    options["mesh"] = target.mesh()
    if (segments := mask.segments) is not None and query.shape[0] == 1 and sinks is None:
        target.choose("attention: splash kernel (Pallas), packed images")
        return kernels.segment_attention(query, key, value, segments.ids, longest=segments.longest, **options)
    if (causal := mask.causal) is None:
        return None
    target.choose("attention: splash kernel (Pallas)")
    is_real = jnp.ones((query.shape[0], query.shape[2]), jnp.int32) if causal.is_real is None else causal.is_real
    return kernels.splash_attention(query, key, value, is_real, sinks, window=causal.window, **options)


def _on_gpu(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
    held: tuple[jax.Array, jax.Array] | None,
) -> jax.Array | None:
    """By cuDNN or a Triton kernel; None if none supports these shapes, or the program is not for an NVIDIA GPU."""
    if (gpu := target.nvidia_gpu()) is None:
        return None
    from hfax.kernels.gpu import cudnn, flash, ranges

    is_described, is_plain, causal = target.is_described(gpu), softcap is None and sinks is None, mask.causal
    if causal is not None and not is_described and is_plain and cudnn.fits(query, key, value):
        target.choose("attention: cuDNN, prompts")
        return cudnn.prompt_attention(query, key, value, causal.is_real, scale=scale, window=causal.window)
    shards, kv_shards = target.head_shards()
    if target.is_differentiated() or query.shape[1] % shards or key.shape[1] % kv_shards:
        return None
    options: dict[str, Any] = {"scale": scale, "softcap": softcap}
    if mask.segments is not None and query.shape[2] == key.shape[2] and ranges.fits(query, key, value):
        if not is_described and not ranges.works(query.dtype, key.dtype):
            return None
        target.choose("attention: Triton kernel, packed images")
        is_local = mask.segments.longest < key.shape[2]
        call = functools.partial(ranges.segment_attention, is_local=is_local, **options)
        return _by_heads(call, query, key, value, jnp.stack(mask.segments.ranges())[None], sinks)
    if causal is not None and flash.fits(query, key, value) and (is_described or flash.works()):
        target.choose("attention: Triton kernel, prompts")
        call = functools.partial(flash.flash_attention, window=causal.window, **options)
        return _by_heads(call, query, key, value, causal.is_real, sinks)
    key, value = held or (key, value)
    if (seen := mask.truth) is None or not _is_step(query, key, seen) or not ranges.fits(query, key, value):
        return None
    if is_described or ranges.works(query.dtype, key.dtype):
        target.choose("attention: Triton kernel, reads the keys that are seen")
        seen = jnp.broadcast_to(seen, (query.shape[0], *seen.shape[1:]))
        call = functools.partial(ranges.cache_attention, is_contiguous=causal is not None, **options)
        return _by_heads(call, query, key, value, seen, sinks)
    return None


def _is_step(query: jax.Array, key: jax.Array, seen: jax.Array) -> bool:
    """Whether a few queries attend to a cache, by a mask that all heads share."""
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    shapes = (batch, 1, queries, keys), (1, 1, queries, keys)
    return queries <= _KERNEL_QUERIES and queries < keys and seen.shape in shapes


def _by_heads(
    call: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    by_row: jax.Array | None,
    by_head: jax.Array | None = None,
) -> jax.Array:
    """The call's result, [batch, queries, heads, head_dim]; under a mesh each device computes its own rows and heads.

    Args:
        call: a kernel for one device.
        query: as in `attention`.
        key: as in `attention`.
        value: as in `attention`.
        by_row: its fourth argument, [batch, ...].
        by_head: its fifth argument, [heads].
    """
    rest = (by_row,) if by_head is None else (by_row, by_head)
    if (mesh := target.mesh()) is None:
        return call(query, key, value, *rest)
    rows = batch_axes(mesh, query.shape[0])
    of_key = P(rows, TENSOR, None, None)
    specs = (P(rows, HEAD_AXES, None, None), of_key, of_key, P(rows), P(HEAD_AXES))[: 3 + len(rest)]
    out = P(rows, None, HEAD_AXES, None)
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(query, key, value, *rest)


def _fits_prompt_kernel(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> bool:
    """Whether `calls.prompt_attention` supports these, and the mask is small enough to materialize."""
    if not (query.dtype == key.dtype == value.dtype == jnp.bfloat16) or query.shape[2] <= _KERNEL_QUERIES:
        return False
    if mask is not None and (mask.dtype != jnp.bool_ or mask.ndim != 4 or mask.shape[3] != key.shape[2]):
        return False
    batch, heads = (1, 1) if mask is None else mask.shape[:2]
    is_small = batch * heads * query.shape[2] * key.shape[2] <= _MAX_MASK_BYTES
    return query.shape[0] == key.shape[0] == value.shape[0] and is_small and library.has_matmul()


def _has_kernel(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> bool:
    if mask.dtype != jnp.bool_ or mask.ndim != 4:
        return False
    if key.dtype != value.dtype or not calls.can_attend(query.dtype, key.dtype):
        return False
    # one kernel call per batch row
    same_batch = query.shape[0] == key.shape[0] == value.shape[0]
    return (
        same_batch and query.shape[2] <= _KERNEL_QUERIES and mask.shape[3] == key.shape[2] and library.may_be_called()
    )


def _in_blocks(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    block_mask: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    scale: float,
    softcap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """The output of `attention` by online softmax over blocks of keys; fully masked blocks are skipped.

    Besides inputs and output, no array is larger than [batch, heads, query block, key block].
    """
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_keys, width = key.shape[1], key.shape[2], value.shape[-1]
    groups = heads // kv_heads
    size, step = min(_QUERY_BLOCK, num_queries), min(_KEY_BLOCK, num_keys)
    query = _padded(query, size)
    key, value = _padded(key, step), _padded(value, step)
    num_blocks = query.shape[2] // size
    blocks = query.reshape(batch, kv_heads, groups, num_blocks, size, query.shape[3])

    def one(block: jax.Array) -> jax.Array:
        grouped = jax.lax.dynamic_index_in_dim(blocks, block, axis=3, keepdims=False)
        rows = block * size + jnp.arange(size)

        def visit(state: OnlineSoftmax, begin: jax.Array, seen: jax.Array) -> OnlineSoftmax:
            part = jax.lax.dynamic_slice_in_dim(key, begin, step, axis=2)
            scores = jnp.einsum("bkgqd,bksd->bkgqs", grouped, part, preferred_element_type=jnp.float32) * scale
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)

            def weighted(share: jax.Array) -> jax.Array:
                part = jax.lax.dynamic_slice_in_dim(value, begin, step, axis=2)
                return jnp.einsum(
                    "bkgqs,bksd->bkgqd", share.astype(value.dtype), part, preferred_element_type=jnp.float32
                )

            return online_softmax.add(state, scores, seen[:, :, None], weighted)

        def next_keys(index: jax.Array, state: OnlineSoftmax) -> OnlineSoftmax:
            columns = index * step + jnp.arange(step)
            seen = block_mask(jnp.minimum(rows, num_queries - 1), jnp.minimum(columns, num_keys - 1))
            seen = seen & (columns < num_keys)
            return jax.lax.cond(seen.any(), lambda s: visit(s, index * step, seen), lambda s: s, state)

        logits = None if sinks is None else sinks.reshape(1, kv_heads, groups, 1, 1)
        state = online_softmax.start((batch, kv_heads, groups, size), width, logits)
        state = jax.lax.fori_loop(0, key.shape[2] // step, next_keys, state)
        return online_softmax.finish(state).astype(query.dtype)

    if target.is_differentiated():  # otherwise every block of keys would be kept for the gradient
        one = jax.checkpoint(one)
    out = jax.lax.map(one, jnp.arange(num_blocks))  # [blocks, batch, kv_heads, groups, size, width]
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, num_blocks * size, heads, width)
    return out[:, :num_queries]


def _padded(array: jax.Array, multiple: int) -> jax.Array:
    """Pad axis 2 with zeros at the end, up to a multiple."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, -array.shape[2] % multiple), (0, 0)))


def _all_at_once(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    scale: float,
    softcap: float | None,
    position_bias: jax.Array | None,
    sinks: jax.Array | None,
    dropout: Dropout | None,
) -> tuple[jax.Array, jax.Array]:
    """`attention` with the full score matrix."""
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    grouped = query.reshape(query.shape[0], kv_heads, groups, num_queries, query.shape[3])
    scores = jnp.einsum("bkgqd,bksd->bkgqs", grouped, key, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + _grouped(position_bias, kv_heads, num_queries, num_keys).astype(jnp.float32)
    seen = None
    if mask is not None:
        mask = _grouped(mask, kv_heads, num_queries, num_keys)
        if mask.dtype == jnp.bool_:
            seen = mask.any(axis=-1, keepdims=True)
            scores = jnp.where(mask, scores, OWN_MASK)
        else:
            scores = scores + mask.astype(jnp.float32)
            seen = (scores > -jnp.inf).any(axis=-1, keepdims=True)
            scores = jnp.where(seen, scores, 0.0)
    probabilities = _softmax(scores, sinks, kv_heads, groups)
    if seen is not None:
        probabilities = jnp.where(seen, probabilities, 0.0)
    if dropout is not None:
        keep = jax.random.bernoulli(dropout.key, 1 - dropout.rate, probabilities.shape)
        probabilities = jnp.where(keep, probabilities / (1 - dropout.rate), 0.0)
    probabilities = probabilities.astype(value.dtype)
    out = jnp.einsum("bkgqs,bksd->bkgqd", probabilities, value, preferred_element_type=jnp.float32)
    batch = max(batch, key.shape[0])
    out = out.astype(query.dtype).reshape(batch, heads, num_queries, value.shape[-1]).swapaxes(1, 2)
    return out, probabilities.astype(query.dtype).reshape(batch, heads, num_queries, num_keys)


def _softmax(scores: jax.Array, sinks: jax.Array | None, kv_heads: int, groups: int) -> jax.Array:
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    extra = sinks.astype(jnp.float32).reshape(1, kv_heads, groups, 1, 1)
    top = jnp.maximum(scores.max(axis=-1, keepdims=True), extra)
    weights = jnp.exp(scores - top)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(extra - top))


def _grouped(mask: jax.Array, kv_heads: int, num_queries: int, num_keys: int) -> jax.Array:
    """A mask over [batch, heads | 1, queries | 1, keys] as one over [batch, kv_heads | 1, groups | 1, queries, keys]."""
    if mask.ndim < 4:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = mask[..., :num_keys]
    if mask.shape[1] == 1:
        return mask[:, :, None]
    return mask.reshape(mask.shape[0], kv_heads, mask.shape[1] // kv_heads, *mask.shape[2:])


def causal_positions(num_queries: int, num_keys: int) -> jax.Array:
    """[1, 1, queries, keys] bool: each query attends to the keys up to its own position, the first query to the first key.

    This matches `is_causal` of torch's `scaled_dot_product_attention`, also with more keys than queries.
    """
    return (jnp.arange(num_keys)[None, :] <= jnp.arange(num_queries)[:, None])[None, None]


def causal_mask(num_queries: int, num_keys: int) -> Mask:
    """`causal_positions` with its blocks."""
    block = lambda rows, columns: (columns[None, :] <= rows[:, None])[None, None]  # noqa: E731
    causal = Causal(window=None, is_real=None) if num_queries == num_keys else None
    return Mask(array=causal_positions(num_queries, num_keys), block=block, causal=causal)
