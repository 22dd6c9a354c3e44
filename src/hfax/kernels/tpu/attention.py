"""Attention on TPU by JAX's Pallas kernels: splash attention for prompts, two paged attention kernels for decoding.

The kernels are functions of arrays on one device; under a mesh they run inside `jax.shard_map`, each device with its own heads.
`interpret` runs the same kernels on any platform, slowly, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as decode_pages
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ragged_paged_attention,
    ref_ragged_paged_attention,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.sharding import PartitionSpec as P

from hfax.kernels import precision
from hfax.kernels.cache_numbers import FP8
from hfax.kernels.paged import JointPages, SeparatePages
from hfax.kernels.tiles import LANES
from hfax.sharding.mesh import HEAD_AXES, TENSOR, batch_axes

_BLOCK = 512
_VMEM_BYTES = 64 << 20
_PAGES_AT_ONCE = 8


def can_splash(query: jax.Array, key: jax.Array, value: jax.Array) -> bool:
    """Whether splash attention supports these shapes, [batch, heads, length, head_dim]: multiples of 128."""
    same = query.shape[2] == key.shape[2] and value.shape[3] == key.shape[3] == query.shape[3]
    return same and query.shape[2] % LANES == 0 and query.shape[3] % LANES == 0


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    is_real: jax.Array,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    mesh: jax.sharding.Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal self-attention of a prompt, without materializing the score matrix.

    Args:
        query: [batch, heads, length, head_dim].
        key: [batch, kv_heads, length, head_dim].
        value: as `key`.
        is_real: [batch, length], nonzero for tokens that are not padding.
        scale: multiplies the scores.
        window: number of tokens each token attends to, itself included; None: all before it.
        softcap: as in `hfax.kernels.attention`.
        mesh: a mesh with the axes of `hfax.sharding.mesh`; None: one device.
        interpret: run the kernel in interpret mode.

    Returns:
        [batch, length, heads, head_dim]. Padding attends to padding; its rows are undefined.
    """

    def local(query: jax.Array, key: jax.Array, value: jax.Array, is_real: jax.Array) -> jax.Array:
        length = query.shape[2]
        shape = (length, length)
        one = splash_masks.CausalMask(shape) if window is None else splash_masks.LocalMask(shape, (window - 1, 0), 0)
        block = next(b for b in (_BLOCK, 256, LANES) if length % b == 0)
        options = {"scale": scale, "softcap": softcap, "block": block, "interpret": interpret}
        return _splash(query, key, value, is_real.astype(jnp.int32), one, **options)

    rows = _rows(mesh, query.shape[0])
    kv = P(rows, TENSOR, None, None)
    specs = (P(rows, HEAD_AXES, None, None), kv, kv, P(rows, None))
    return _on_devices(local, mesh, specs, P(rows, None, HEAD_AXES, None))(query, key, value, is_real)


def can_splash_segments(query: jax.Array, key: jax.Array, value: jax.Array) -> bool:
    """Whether `segment_attention` supports these shapes, [1, heads, tokens, head_dim]."""
    same = query.shape[2] == key.shape[2] and value.shape[3] == key.shape[3] == query.shape[3]
    return same and query.shape[0] == 1 and query.shape[2] >= LANES


def segment_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array,
    *,
    scale: float,
    longest: int,
    softcap: float | None,
    mesh: jax.sharding.Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention of packed tokens, each to those of its own segment; lengths and head dimensions are padded to multiples of 128.

    Args:
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: as `key`.
        segments: [tokens] int, number of each token's segment, from 0. The tokens of a segment follow each other.
        scale: multiplies the scores.
        longest: tokens that a segment has at most; blocks that are farther apart are not multiplied.
        softcap: as in `hfax.kernels.attention`.
        mesh: as for `splash_attention`.
        interpret: run the kernel in interpret mode.

    Returns:
        [1, tokens, heads, head_dim].
    """
    tokens, width = query.shape[2:]
    block = LANES if longest <= LANES else min(_BLOCK, -(-tokens // LANES) * LANES)
    padded = [(0, 0), (0, 0), (0, -tokens % block), (0, -width % LANES)]
    whole, near = tokens + padded[2][1], longest - 1
    shape = (whole, whole)
    one = splash_masks.FullMask(shape) if longest >= tokens else splash_masks.LocalMask(shape, (near, near), 0)
    options = {"scale": scale, "softcap": softcap, "block": block, "interpret": interpret}

    def local(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
        return _splash(query, key, value, segments, one, **options)

    heads, kv = P(None, HEAD_AXES, None, None), P(None, TENSOR, None, None)
    call = _on_devices(local, mesh, (heads, kv, kv, P(None, None)), P(None, None, HEAD_AXES, None))
    ids = jnp.pad(segments.astype(jnp.int32), padded[2], constant_values=-1)[None]
    return call(*(jnp.pad(array, padded) for array in (query, key, value)), ids)[:, :tokens, :, :width]


def _splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array,
    mask: splash_masks.Mask,
    *,
    scale: float,
    softcap: float | None,
    block: int,
    interpret: bool,
) -> jax.Array:
    """Splash attention on one device under a mask of all heads, within segments, [batch, length] int32."""
    kernel = splash.make_splash_mha(
        splash_masks.MultiHeadMask([mask] * query.shape[1]),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        block_sizes=_block_sizes(block),
        interpret=interpret,
    )
    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    out: Any = jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=splash.SegmentIds(q=s, kv=s)))(
        scaled, key, value, segments
    )
    return out.swapaxes(1, 2).astype(query.dtype)


def ragged_attention(
    query: jax.Array,
    pages: JointPages,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    mesh: jax.sharding.Mesh | None = None,
    is_reference: bool = False,
) -> jax.Array:
    """Attention of one token per sequence to the pages of its sequence; only pages with tokens are read.

    Args:
        query: [batch, heads, 1, head_dim].
        pages: the layer's pages, including the key and value of the current token.
        scale: multiplies the scores.
        window: as in `splash_attention`.
        softcap: as in `splash_attention`.
        mesh: as in `splash_attention`.
        is_reference: use the kernel's plain JAX reference; the kernel itself has no interpret mode (JAX 0.10).

    Returns:
        [batch, 1, heads, head_dim].
    """

    def local(query: jax.Array, pages: jax.Array, lengths: jax.Array, table: jax.Array) -> jax.Array:
        batch = query.shape[0]
        starts, count = jnp.arange(batch + 1, dtype=jnp.int32), jnp.array([batch], jnp.int32)
        # pages of all sequences form one list
        flat = query[:, :, 0], pages.reshape(-1, *pages.shape[2:]), lengths, table, starts, count
        options = {"sm_scale": scale, "sliding_window": window, "soft_cap": softcap}
        if pages.dtype == FP8:
            options |= {"k_scale": 1.0, "v_scale": 1.0}  # makes the kernel convert them to the dtype of the query
        if is_reference:
            return ref_ragged_paged_attention(*flat, **options)[:, None]
        # pass sizes explicitly: the kernel would query the default device, which may not be the compilation target
        sizes = {"num_kv_pages_per_block": min(_PAGES_AT_ONCE, table.shape[1]), "num_queries_per_block": min(32, batch)}
        return ragged_paged_attention(*flat, **options, **sizes, vmem_limit_bytes=_VMEM_BYTES)[:, None]

    table, lengths = pages.table()
    specs = (P(None, HEAD_AXES, None, None), P(None, None, None, TENSOR, None), P(None), P(None, None))
    return _on_devices(local, mesh, specs, P(None, None, HEAD_AXES, None))(query, pages.pages, lengths, table)


def paged_attention(
    query: jax.Array,
    pages: SeparatePages,
    *,
    scale: float,
    softcap: float | None,
    mesh: jax.sharding.Mesh | None = None,
) -> jax.Array:
    """Like `ragged_attention`, for head dimensions of any multiple of 128; for windows, the pages hold only the window.

    Returns:
        [batch, 1, heads, head_dim].
    """
    count = pages.key_pages.shape[2]

    def local(query: jax.Array, keys: jax.Array, values: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        scaled = (query[:, :, 0].astype(jnp.float32) * scale).astype(query.dtype)
        together = next(n for n in range(min(count, _PAGES_AT_ONCE), 0, -1) if count % n == 0)
        out = decode_pages(
            scaled, keys, values, lengths, table, attn_logits_soft_cap=softcap, pages_per_compute_block=together
        )
        return out[:, None].astype(query.dtype)

    kv = P(TENSOR, None, None, None)
    specs = (P(None, HEAD_AXES, None, None), kv, kv, P(None, None), P(None))
    flat = [a.reshape(a.shape[0], -1, *a.shape[3:]) for a in (pages.key_pages, pages.value_pages)]
    return _on_devices(local, mesh, specs, P(None, None, HEAD_AXES, None))(query, *flat, *pages.table())


def _block_sizes(block: int) -> splash.BlockSizes:
    """Block sizes of the forward and backward passes."""
    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )


def _rows(mesh: jax.sharding.Mesh | None, count: int) -> tuple[str, ...] | None:
    return None if mesh is None else batch_axes(mesh, count)


def _on_devices(
    function: Callable[..., jax.Array], mesh: jax.sharding.Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., jax.Array]:
    """The function of a query and other arrays, a kernel for one device, as a function of those of all devices.

    Its gradient is a rule of its own since the precision of a kernel's products is that of the moment when it is traced.
    """
    if mesh is not None:
        function = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @jax.custom_vjp
    def run(query: jax.Array, *rest: Any) -> jax.Array:
        with precision.of_kernel(query):
            return function(query, *rest)

    def forward(query: jax.Array, *rest: Any) -> tuple[jax.Array, Any]:
        with precision.of_kernel(query):
            return jax.vjp(function, query, *rest)

    def backward(transposed: Any, gradient: jax.Array) -> Any:
        with precision.of_kernel(gradient):
            return transposed(gradient)

    run.defvjp(forward, backward)
    return run
