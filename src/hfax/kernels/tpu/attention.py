"""Attention of prompts on TPU by JAX's Pallas kernel, splash attention.

The kernel is a function of arrays on one device; under a mesh it runs inside `jax.shard_map`, each device with its own heads.
`interpret` runs the same kernel on any platform, slowly, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_masks
from jax.sharding import PartitionSpec as P

from hfax.kernels import precision
from hfax.kernels.tiles import LANES
from hfax.sharding.mesh import HEAD_AXES, TENSOR, batch_axes

_BLOCK = 512


def can_splash(query: jax.Array, key: jax.Array) -> bool:
    """Whether splash attention supports these shapes, [batch, heads, length, head_dim]: those of a prompt of 128 tokens or more."""
    return query.shape[2] == key.shape[2] >= LANES


def splash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    is_real: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    mesh: jax.sharding.Mesh | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Causal self-attention of a prompt, without materializing the score matrix; its length is padded to a multiple of 128.

    Args:
        query: [batch, heads, length, head_dim].
        key: [batch, kv_heads, length, head_dim].
        value: as `key`, perhaps of another head dimension.
        is_real: [batch, length], nonzero for tokens that are not padding.
        sinks: [heads], as in `hfax.kernels.attention`.
        scale: multiplies the scores.
        window: number of tokens each token attends to, itself included; None: all before it.
        softcap: as in `hfax.kernels.attention`.
        mesh: a mesh with the axes of `hfax.sharding.mesh`; None: one device.
        interpret: run the kernel in interpret mode.

    Returns:
        [batch, length, heads, value_dim]. Padding attends to padding; its rows are undefined.
    """
    tokens = query.shape[2]
    length = -(-tokens // LANES) * LANES
    shape = (length, length)
    one = splash_masks.CausalMask(shape) if window is None else splash_masks.LocalMask(shape, (window - 1, 0), 0)
    block = next(b for b in (_BLOCK, 256, LANES) if length % b == 0)
    options = {"scale": scale, "softcap": softcap, "block": block, "interpret": interpret}

    def local(query: jax.Array, key: jax.Array, value: jax.Array, is_real: jax.Array, sinks: Any) -> jax.Array:
        return _splash(query, key, value, is_real, one, sinks, **options)

    rows = _rows(mesh, query.shape[0])
    heads, kv = P(rows, HEAD_AXES, None, None), P(rows, TENSOR, None, None)
    specs = heads, kv, kv, P(rows, None), None if sinks is None else P(HEAD_AXES)
    call = _on_devices(local, mesh, specs, P(rows, None, HEAD_AXES, None))
    padded = [_padded(array, 2, length) for array in (query, key, value)]
    return call(*padded, _padded(is_real.astype(jnp.int32), 1, length), sinks)[:, :tokens]


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
    """Attention of packed tokens, each to those of its own segment; their number is padded to a multiple of 128.

    Args:
        query: [1, heads, tokens, head_dim].
        key: [1, kv_heads, tokens, head_dim].
        value: as `key`, perhaps of another head dimension.
        segments: [tokens] int, number of each token's segment, from 0. The tokens of a segment follow each other.
        scale: multiplies the scores.
        longest: tokens that a segment has at most; blocks that are farther apart are not multiplied.
        softcap: as in `hfax.kernels.attention`.
        mesh: as for `splash_attention`.
        interpret: run the kernel in interpret mode.

    Returns:
        [1, tokens, heads, value_dim].
    """
    tokens = query.shape[2]
    block = LANES if longest <= LANES else min(_BLOCK, -(-tokens // LANES) * LANES)
    length, near = -(-tokens // block) * block, longest - 1
    shape = (length, length)
    one = splash_masks.FullMask(shape) if longest >= tokens else splash_masks.LocalMask(shape, (near, near), 0)
    options = {"scale": scale, "softcap": softcap, "block": block, "interpret": interpret}

    def local(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array) -> jax.Array:
        return _splash(query, key, value, segments, one, **options)

    heads, kv = P(None, HEAD_AXES, None, None), P(None, TENSOR, None, None)
    call = _on_devices(local, mesh, (heads, kv, kv, P(None, None)), P(None, None, HEAD_AXES, None))
    ids = jnp.pad(segments.astype(jnp.int32), (0, length - tokens), constant_values=-1)[None]
    return call(*(_padded(array, 2, length) for array in (query, key, value)), ids)[:, :tokens]


def _splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array,
    mask: splash_masks.Mask,
    sinks: jax.Array | None = None,
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
    out: Any = jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=splash.SegmentIds(q=s, kv=s), sinks=sinks))(
        scaled, key, value, segments
    )
    return out.swapaxes(1, 2).astype(query.dtype)


def _padded(array: jax.Array, axis: int, length: int) -> jax.Array:
    """The array with zeros up to a length on an axis."""
    return jnp.pad(array, [(0, length - size if i == axis else 0) for i, size in enumerate(array.shape)])


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
