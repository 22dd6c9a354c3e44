"""Attention and its masks as JAX computes them: grouped-query, no repeated heads, masks built from positions.

The functions take and return `jax.Array`s; the backend registers them with transformers' attention and mask interfaces. They do
not know models.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hfax.patches.patch import OpPatch, Patch

_MASKED = -1e30
"""Stands for minus infinity in scores: exp() of it is 0, and a row with nothing to see stays finite."""


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    *,
    scale: float,
    softcap: float | None = None,
    position_bias: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim]; `heads` is a multiple of `kv_heads`, and consecutive heads share a key head.
        value: [batch, kv_heads, keys, value_dim].
        mask: [batch | 1, heads | 1, queries, keys]; bool (True: attend) or additive float; None to attend everywhere.
        scale: multiplies the scores.
        softcap: scores become `softcap * tanh(scores / softcap)`, as in Gemma 2.
        position_bias: added to the scores, shaped as `mask`.
        sinks: [heads], one extra logit a head that takes probability and has no value, as in gpt-oss.

    Returns:
        The output, [batch, queries, heads, value_dim], and the probabilities, [batch, heads, queries, keys] (which XLA drops
        where nobody reads them), both in the query's dtype. Rows that may attend to nothing are 0, as in torch.
    """
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
            scores = jnp.where(mask, scores, _MASKED)
        else:
            scores = scores + mask.astype(jnp.float32)
    probabilities = _softmax(scores, sinks, kv_heads, groups)
    if seen is not None:
        probabilities = jnp.where(seen, probabilities, 0.0)
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


def causal_positions(num_queries: int, num_keys: int, *, align_end: bool = True) -> jax.Array:
    """[1, 1, queries, keys] bool: each query sees the keys up to its own position.

    `align_end`: the last query stands at the last key, as after a cache; else the first query at the first key, as torch has it.
    """
    rows = jnp.arange(num_queries)[:, None] + (num_keys - num_queries if align_end else 0)
    return (jnp.arange(num_keys)[None, :] <= rows)[None, None]


def key_padding(padding_mask: jax.Array, positions: jax.Array) -> jax.Array:
    """Which keys are real tokens.

    Args:
        padding_mask: [batch, length], nonzero for tokens.
        positions: [keys], the position of each key in the sequence; below zero for a slot that holds nothing.

    Returns:
        [batch, 1, 1, keys] bool; positions past the mask's end are False.
    """
    length = padding_mask.shape[-1]
    inside = (positions >= 0) & (positions < length)
    picked = jnp.take(padding_mask != 0, jnp.clip(positions, 0, length - 1), axis=1)
    return (picked & inside)[:, None, None, :]


def scaled_dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """`torch.nn.functional.scaled_dot_product_attention`, [..., heads, length, dim]; a row that may see nothing is 0."""
    lead = query.shape[:-3] if query.ndim >= 3 else ()
    four: list[jax.Array] = [a.reshape(-1, *((1,) * (3 - a.ndim) + a.shape)[-3:]) for a in (query, key, value)]
    mask = attn_mask
    if mask is None and is_causal:
        mask = causal_positions(query.shape[-2], key.shape[-2], align_end=False)
    if mask is not None and mask.ndim > 4:
        mask = mask.reshape(-1, *mask.shape[-3:])
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    out, _ = attention(four[0], four[1], four[2], mask, scale=factor)
    out = out.swapaxes(1, 2)
    return out.reshape(*lead, *out.shape[1:]) if query.ndim >= 3 else out.reshape(out.shape[-2:])


PATCHES: list[Patch] = [
    OpPatch(
        name="scaled-dot-product-attention",
        why="torchax gives NaN for a row that may attend to nothing, and repeats the heads of grouped queries",
        ops=("torch.nn.functional.scaled_dot_product_attention", "aten.scaled_dot_product_attention"),
        lower=scaled_dot_product_attention,
    ),
]
