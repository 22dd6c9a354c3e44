"""Norms and rotary embeddings, with custom gradients if differentiated, and as a single call on CPU.

A row's numbers do not depend on how many rows there are: the engine packs prompts and steps of several sequences together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hfax.kernels import target
from hfax.kernels.cpu import calls, library

_DTYPES = {"float32", "bfloat16"}


def is_one_call(shape: Sequence[int], *, multiple: int) -> bool:
    """Whether the program runs on CPU with kernels, and the row width is a multiple of `multiple`."""
    return math.prod(shape) > 0 and shape[-1] % multiple == 0 and library.may_be_called()


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMS norm of each row, times `weight`; computed in float32.

    Args:
        x: [rows, width].
        weight: [width].
        eps: added to the mean square.

    Returns:
        [rows, width] in the dtype of `x`.
    """
    if {str(x.dtype), str(weight.dtype)} <= _DTYPES and is_one_call(x.shape, multiple=16):
        target.choose("norm: C++ kernel")
        return calls.rms_norm(x, weight, eps)
    out: Any = _rms_norm(x, weight, eps)
    return out


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding: rotates each pair of values half a head apart by its angle.

    Args:
        x: [batch, heads, length, head_dim], or heads after length.
        cos: [1 | batch, 1, length, head_dim], with as many axes as `x`.
        sin: shaped like `cos`.

    Returns:
        The rotated array, shaped like `x`. The C++ kernel rounds after each step, like torch; plain JAX rounds once, at the end.
    """
    is_same = str(x.dtype) in _DTYPES and x.dtype == cos.dtype == sin.dtype
    is_by_head = x.ndim == 4 and cos.shape == (cos.shape[0], 1, *x.shape[2:]) and cos.shape[0] in (1, x.shape[0])
    if is_same and is_by_head and cos.shape == sin.shape and is_one_call(x.shape, multiple=2):
        target.choose("rotary embedding: C++ kernel")
        return calls.rotate(x, cos[:, 0], sin[:, 0])
    half = x.shape[-1] // 2
    cos, sin = cos.astype(jnp.float32), sin.astype(jnp.float32)
    sin = jnp.concatenate((-sin[..., :half], sin[..., half:]), axis=-1)
    wide = x.astype(jnp.float32)
    rolled: Any = rolled_by(wide, (half,), (-1,))
    return (wide * cos + rolled * sin).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def rolled_by(x: jax.Array, shifts: tuple[int, ...], dims: tuple[int, ...]) -> jax.Array:
    """`jnp.roll` with a roll as gradient, where JAX's own pads and adds."""
    return jnp.roll(x, shifts, dims)


def _rolled_back(shifts: tuple[int, ...], dims: tuple[int, ...], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jnp.roll(gradient, tuple(-shift for shift in shifts), dims),)


rolled_by.defvjp(lambda x, shifts, dims: (rolled_by(x, shifts, dims), None), _rolled_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`rms_norm` in plain JAX.

    Its gradient keeps the input in its own dtype, and sums over rows by a product with ones: XLA's CPU compiler is slow at sums
    over the first axis.
    """
    return _forward(x, weight, eps)[0]


def _forward(x: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, Any]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype), (x, weight, scale)


def _backward(eps: float, kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight, scale = kept
    # otherwise XLA computes the float32 product in the forward pass, and keeps it until here
    x, gradient = jax.lax.optimization_barrier((x, gradient))
    gradient, normed = gradient.astype(jnp.float32), x.astype(jnp.float32) * scale
    inner = gradient * weight.astype(jnp.float32)
    for_x = scale * (inner - normed * jnp.mean(inner * normed, axis=-1, keepdims=True))
    for_weight = jnp.ones((1, x.shape[0]), jnp.float32) @ (gradient * normed)
    return for_x.astype(x.dtype), for_weight[0].astype(weight.dtype)


_rms_norm.defvjp(_forward, _backward)
