"""Norms whose gradients are written out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Each row divided by the root of its mean square, times `weight`; in float32 between input and output.

    Its gradient keeps the input as it came, and sums over rows by a product with ones: XLA's CPU compiler is slow at sums over the
    first axis.

    Args:
        x: [rows, width].
        weight: [width].
        eps: added to the mean square.

    Returns:
        [rows, width] in the dtype of `x`.
    """
    return _forward(x, weight, eps)[0]


def _forward(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, Any]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype), (x, weight, scale)


def _backward(eps: float, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight, scale = kept
    # else XLA makes the float32 product in the forward pass, and keeps it until here
    x, gradient = jax.lax.optimization_barrier((x, gradient))
    gradient, normed = gradient.astype(jnp.float32), x.astype(jnp.float32) * scale
    inner = gradient * weight.astype(jnp.float32)
    for_x = scale * (inner - normed * jnp.mean(inner * normed, axis=-1, keepdims=True))
    for_weight = jnp.ones((1, x.shape[0]), jnp.float32) @ (gradient * normed)
    return for_x.astype(x.dtype), for_weight[0].astype(weight.dtype)


rms_norm.defvjp(_forward, _backward)
