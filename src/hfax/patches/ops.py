"""Lowerings of single torch operations that are faster, or more exact, than torchax's own. Plain JAX; no torch here."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from hfax.patches.patch import OpPatch, Patch

_MAX_FUSED_WIDTH = 2048
"""XLA's CPU compiler fuses a weight's conversion to float32 into a vector-matrix product only for vectors under 16 KB."""


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias` with float32 accumulation.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features].

    Returns:
        [..., out_features] in the promoted dtype of `x` and `weight`.
    """
    dtype = jnp.result_type(x, weight)
    if dtype == jnp.bfloat16 and math.prod(x.shape[:-1]) == 1:
        out = _vector_times_matrix(x.reshape(-1), weight).reshape(*x.shape[:-1], -1)
    else:
        out = jax.lax.dot_general(
            x.astype(dtype),
            weight.astype(dtype),
            (((x.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype,
        )
        if bias is not None:
            return (out + bias.astype(out.dtype)).astype(dtype)
    out = out.astype(dtype)
    return out if bias is None else out + bias.astype(dtype)


def _vector_times_matrix(x: jax.Array, weight: jax.Array) -> jax.Array:
    """bf16 `weight @ x` in float32, written so that on CPU the weight is read once as bf16 and never stored as float32.

    The form matters: `x @ weight.T` with a float32 vector fuses, `weight @ x` does not; the caller rounds the result before it
    is added to anything, else XLA fuses the addition instead (docs/performance.md).
    """
    width = x.shape[0]
    x = x.astype(jnp.float32)
    if width <= _MAX_FUSED_WIDTH * 2 - 1:
        return x @ weight.astype(jnp.float32).T
    parts = [
        x[i : i + _MAX_FUSED_WIDTH] @ weight[:, i : i + _MAX_FUSED_WIDTH].astype(jnp.float32).T
        for i in range(0, width, _MAX_FUSED_WIDTH)
    ]
    return sum(parts[1:], parts[0])


PATCHES: list[Patch] = [
    OpPatch(
        name="linear",
        why="torchax multiplies bfloat16 in bfloat16: on CPU 15 times slower for one row, and rounded after every addend",
        ops=("torch.nn.functional.linear", "aten.linear"),
        lower=linear,
    ),
]
