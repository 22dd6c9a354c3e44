"""Matrix products of activations and weights.

`linear` matches torch's, with float32 accumulation. On CPU, where few rows are bound by reading the weight once, it uses the C++
kernels (several rows, packed weights) or a form that XLA compiles efficiently (a single row).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from hfax.kernels import target
from hfax.kernels.cpu import calls, library

_MAX_FUSED_WIDTH = 2048
"""XLA's CPU compiler fuses a weight's conversion to float32 into a vector-matrix product only for vectors under 16 KB."""
_KERNEL_FLOAT32_ROWS = range(1, 17)
"""Row counts for which the C++ kernel is faster than XLA's float32 product on CPU (docs/performance.md). For bfloat16 it always is:
XLA converts the weight to float32 first."""


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias` with float32 accumulation.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], or [in_features], which drops the last axis of the result.
        bias: [out_features].

    Returns:
        [..., out_features] in the promoted dtype of `x` and `weight`.
    """
    dtype = jnp.result_type(x, weight)
    if weight.ndim == 1:
        return jnp.matmul(x, weight, preferred_element_type=dtype) if bias is None else jnp.matmul(x, weight) + bias
    rows = math.prod(x.shape[:-1])
    if target.is_differentiated() and dtype in (jnp.bfloat16, jnp.float16):
        whose = "C++ kernel" if dtype == jnp.bfloat16 and library.has_matmul() else "XLA's matrix products"
        target.choose(f"linear: {whose}, float32 accumulation, gradients in the weight's dtype")
        out = _with_gradients(x.reshape(rows, -1).astype(dtype), weight.astype(dtype)).reshape(*x.shape[:-1], -1)
        return out if bias is None else out + bias.astype(dtype)
    if has_kernel(rows, x, weight):
        most = "any number of" if _is_unbounded(dtype) else f"up to {_KERNEL_FLOAT32_ROWS[-1]}"
        target.choose(f"linear: C++ kernel ({weight.dtype}, {most} rows)")
        out_dtype = dtype if bias is None else jnp.dtype(jnp.float32)
        out = calls.linear(x.reshape(rows, -1), weight, out_dtype).reshape(*x.shape[:-1], -1)
        return out if bias is None else (out + bias.astype(jnp.float32)).astype(dtype)
    where = target.current()
    is_cpu = (jax.default_backend() if where is None else where.platform) == "cpu"
    if dtype == jnp.bfloat16 and rows == 1 and is_cpu:
        target.choose("linear: vector times matrix, converted as it is read")
        out = _vector_times_matrix(x.reshape(-1), weight).reshape(*x.shape[:-1], -1)
    else:
        target.choose("linear: XLA's matrix product, float32 accumulation")
        out = jax.lax.dot_general(
            x.astype(dtype),
            weight.astype(dtype),
            (((x.ndim - 1,), (1,)), ((), ())),
            preferred_element_type=target.product_dtype(dtype, is_added=bias is not None, is_forward=True),
        )
        if bias is not None:
            return (out + bias.astype(out.dtype)).astype(dtype)
    out = out.astype(dtype)
    return out if bias is None else out + bias.astype(dtype)


def has_kernel(rows: int, x: jax.Array, weight: jax.Array) -> bool:
    """Whether the program runs on CPU with kernels, and they are faster for this product or its rows may not depend on others."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float32) or not library.may_be_called():
        return False
    return rows in _KERNEL_FLOAT32_ROWS or _is_unbounded(x.dtype)


def _is_unbounded(dtype: jnp.dtype) -> bool:
    """Whether the kernel is used for any number of rows."""
    return dtype == jnp.bfloat16 or target.is_batch_invariant()


@jax.custom_vjp
def _with_gradients(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` in half precision, [rows, in] and [out, in], with gradients computed in half precision too.

    JAX's gradients multiply float32 cotangents by half-precision weights, which is slow on every platform.
    """
    return _product(x, weight, 1, 1)


def _forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, weight, 1, 1), (x, weight)


def _backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    return _product(gradient, weight, 1, 0), _product(gradient, x, 0, 0)


_with_gradients.defvjp(_forward, _backward)


def _product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """The product summed over one axis of each in float32, in the dtype of `a`.

    XLA's CPU compiler has fast bfloat16 products only if neither matrix is transposed, and only with float32 results.
    """
    if a.dtype == jnp.bfloat16 and library.has_matmul():
        if a_axis == b_axis == 1:
            return calls.linear(a, b, a.dtype)
        return calls.matmul(a, b, turn_a=a_axis == 0, turn_b=b_axis == 0, out_dtype=a.dtype)
    out_dtype = target.product_dtype(a.dtype)
    out = jax.lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=out_dtype)
    return out.astype(a.dtype)


def _vector_times_matrix(x: jax.Array, weight: jax.Array) -> jax.Array:
    """bf16 `weight @ x` in float32, written so that on CPU the weight is read once as bf16 and never stored as float32.

    The form matters: `x @ weight.T` with a float32 vector fuses, `weight @ x` does not; the caller rounds the result before adding
    to it, otherwise XLA fuses the addition instead (docs/log/xla.md).
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
