"""Lowerings in plain JAX of torch operations for which torchax's values or dtypes differ from torch's.

`LOWERINGS` is added to the environment's table before any patch. Each docstring states the difference; the comparison with torch
that found them is in docs/lowerings.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax.ops import mappings, ops_registry

from hfax.tracing import subgradients

_aten = torch.ops.aten


_FEW_PLACES, _SHORT_AXIS = 64, 4096


def _is_whole(value: Any) -> bool:
    """Whether a Python value or an array is integer or bool."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return jnp.issubdtype(value.dtype, jnp.integer) or value.dtype == jnp.bool_
    return isinstance(value, int)


def _is_truth(value: Any) -> bool:
    return value.dtype == jnp.bool_ if isinstance(value, (jax.Array, np.ndarray)) else isinstance(value, bool)


def _of_one_dtype(*values: Any) -> list[jax.Array]:
    dtype = jnp.result_type(*values)
    return [jnp.asarray(v, dtype) for v in values]


def _float_dtype(array: Any) -> Any:
    """torch's result dtype of a floating-point function: the dtype of a float input, else the default dtype."""
    return array.dtype if jnp.issubdtype(array.dtype, jnp.inexact) else jnp.float32


def _torchax(op: Any) -> Callable[..., Any]:
    """torchax's lowering of an operation."""
    return ops_registry.all_aten_ops[op].func


def _add(input: Any, other: Any, *, alpha: Any = 1) -> jax.Array:
    """The sum of two bools is a bool, not 2."""
    if _is_truth(input) and _is_truth(other):
        return jnp.logical_or(input, jnp.logical_and(other, bool(alpha)))
    return _torchax(_aten.add.Tensor)(input, other, alpha=alpha)


def _div(input: Any, other: Any, rounding_mode: str | None = None) -> jax.Array:
    """Integer division with rounding is never computed in float32, which is inexact above 2^24."""
    if rounding_mode and _is_whole(input) and _is_whole(other):
        if rounding_mode == "floor":
            return jnp.floor_divide(input, other)
        return jax.lax.div(*jnp.broadcast_arrays(*_of_one_dtype(input, other)))
    return _torchax(_aten.div)(input, other, rounding_mode=rounding_mode or "")


def _fmod(input: Any, other: Any) -> jax.Array:
    """The exact remainder; a quotient rounded to bfloat16 would change it."""
    return jnp.fmod(*_of_one_dtype(input, other))


def _pow(input: Any, exponent: Any) -> jax.Array:
    """Powers of integers are integers, never computed in float32."""
    if not (_is_whole(input) and _is_whole(exponent)):
        return _torchax(_aten.pow)(input, exponent)
    base, exponent = _of_one_dtype(input, exponent)
    if base.dtype == jnp.bool_:
        base, exponent = base.astype(jnp.int32), exponent.astype(jnp.int32)
    power = jnp.power(base, jnp.maximum(exponent, 0))
    of_negative = jnp.where(base == 1, 1, jnp.where(base == -1, 1 - 2 * (exponent % 2), 0)).astype(power.dtype)
    return jnp.where(exponent >= 0, power, of_negative)


def _hardtanh(input: jax.Array, min_val: float = -1.0, max_val: float = 1.0) -> jax.Array:
    """Integers stay integers."""
    return subgradients.hardtanh(input, jnp.asarray(min_val, input.dtype), jnp.asarray(max_val, input.dtype))


def _vector_norm(
    input: jax.Array, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> jax.Array:
    """Computes in float32 for 16-bit floats; with `dtype` or order 0 the result is floating-point."""
    out_dtype = mappings.t2j_dtype(dtype) if dtype is not None else _float_dtype(input)
    if jnp.issubdtype(input.dtype, jnp.complexfloating):
        out_dtype = jnp.zeros((), out_dtype).real.dtype
    size = subgradients.absolute(input.astype(jnp.promote_types(input.dtype, jnp.float32)))
    size = size.astype(jnp.promote_types(size.dtype, out_dtype))
    axes = None if dim is None or dim == [] or dim == () else dim if isinstance(dim, int) else tuple(dim)
    add = functools.partial(jnp.sum, axis=axes, keepdims=keepdim)
    if ord == 0:
        out = add((size != 0).astype(size.dtype))
    elif ord in (float("inf"), float("-inf")):
        out = (jnp.max if ord > 0 else jnp.min)(size, axis=axes, keepdims=keepdim)
    elif ord == 2:
        out = subgradients.root(add(size * size), 2)
    elif ord == 1:
        out = add(size)
    else:
        out = subgradients.root(add(size**ord), ord)
    return out.astype(out_dtype)


def _reduced(op: Any, input: Any, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> jax.Array:
    """The input is converted to `dtype` before it is summed or multiplied.

    Without a `dtype`, 8-bit and 16-bit integers become signed 32-bit ones, which stand for torch's 64-bit ones.
    """
    target = None if dtype is None else mappings.t2j_dtype(dtype)
    if target is not None:
        input = jnp.asarray(input, target)
    elif _is_whole(input) and jnp.asarray(input).dtype.itemsize < 4:
        input = jnp.asarray(input, jnp.int32)
    out = _torchax(op)(input, *args, **options)
    return out if target is None else out.astype(target)


def _any(input: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    """Of bytes, the result is a byte."""
    out = _torchax(_aten.any)(input, *args, **kwargs)
    return out.astype(jnp.uint8) if input.dtype == jnp.uint8 else out


def _trilinear(*operands: Any, **options: Any) -> jax.Array:
    """Sums stay in the operands' dtype."""
    return _torchax(_aten._trilinear)(*operands, **options).astype(jnp.result_type(*operands[:3]))


def _cholesky_inverse(input: jax.Array, upper: bool = False) -> jax.Array:
    """Reads the upper factor if `upper`."""
    return _torchax(_aten.cholesky_inverse)(jnp.swapaxes(input, -1, -2) if upper else input)


def _unravel_index(indices: jax.Array, shape: Any) -> tuple[jax.Array, ...]:
    """Indices have at least 32 bits: a byte cannot hold a coordinate above 255."""
    return jnp.unravel_index(indices.astype(jnp.promote_types(indices.dtype, jnp.int32)), shape)


def _sort(input: jax.Array, dim: int = -1, descending: bool = False, stable: bool = False) -> tuple[Any, Any]:
    """The sort is stable, as in torch on CPU, also when descending."""
    if not input.ndim:
        return input, jnp.zeros((), jnp.int32)
    order = jnp.argsort(input, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(input, order, axis=dim), order


def _topk(
    input: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, jax.Array]:
    """XLA's, which is sorted; torchax sorts twice more."""
    if not input.ndim:
        return input, jnp.zeros((), jnp.int32)
    reverse = (lambda array: array) if largest else jnp.invert if _is_whole(input) else jnp.negative
    values, order = jax.lax.top_k(reverse(jnp.moveaxis(input, dim, -1)), k)
    return jnp.moveaxis(reverse(values), -1, dim), jnp.moveaxis(order, -1, dim)


def _gather(input: jax.Array, dim: int, index: jax.Array, sparse_grad: bool = False) -> jax.Array:
    """Along one axis, where a place of the others reads its own. Of torchax's places, on all axes, that cannot be proved."""
    if not input.ndim or not index.size or not _is_along(input, dim, index):
        return _torchax(_aten.gather)(input, dim, index)
    return jnp.take_along_axis(input, index, axis=dim, mode="clip")


def _is_along(input: jax.Array, dim: int, index: jax.Array) -> bool:
    """Whether an index has the same axes as an array, but for the one that is indexed."""
    axes = zip(input.shape, index.shape, strict=True)
    return all(n == m for i, (n, m) in enumerate(axes) if i != dim % input.ndim)


def _scatter_value(input: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    """One value at few places of a short axis, such as a token's groups of experts, is a comparison: TPUs are slow at scatters."""
    is_short = input.ndim and index.shape[dim] <= _FEW_PLACES and input.shape[dim] <= _SHORT_AXIS
    if not is_short or not _is_along(input, dim, index):
        return _torchax(_aten.scatter.value)(input, dim, index, value)
    places = jnp.moveaxis(index, dim, -1)[..., None] == jnp.arange(input.shape[dim], dtype=index.dtype)
    return jnp.where(jnp.moveaxis(places.any(axis=-2), -1, dim), jnp.asarray(value, input.dtype), input)


def _scatter_reduce(
    input: jax.Array, dim: int, index: jax.Array, src: Any, reduce: str, *, include_self: bool = True
) -> jax.Array:
    """Integers and bools have no infinity: a maximum starts from their lowest value."""
    lower = _torchax(_aten.scatter_reduce)
    if not _is_whole(input) or not isinstance(src, jax.Array):
        return lower(input, dim, index, src, reduce, include_self=include_self)
    wide, src = (
        input.astype(jnp.promote_types(input.dtype, jnp.int32)),
        src.astype(jnp.promote_types(src.dtype, jnp.int32)),
    )
    if not include_self and reduce in ("amax", "amin"):
        limits = jnp.iinfo(wide.dtype)
        worst = jnp.full_like(src, limits.min if reduce == "amax" else limits.max)
        wide = lower(wide, dim, index, worst, None)
        include_self = True
    return lower(wide, dim, index, src, reduce, include_self=include_self).astype(input.dtype)


def _in_its_dtype(op: Any, input: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
    """Compute in the dtype of the float input, where torchax always returns float32."""
    dtype = _float_dtype(input)
    return _torchax(op)(input.astype(jnp.float32), *args, **kwargs).astype(dtype)


def _batch_norm(op: Any, input: jax.Array, *args: Any, **kwargs: Any) -> tuple[jax.Array, ...]:
    """The result has the input's dtype, beside weights and statistics of float32, too; half precision is computed in float32."""
    return tuple(a.astype(input.dtype) for a in _torchax(op)(input.astype(jnp.float32), *args, **kwargs))


def _of_triangle(input: jax.Array, is_lower: bool) -> jax.Array:
    """The Hermitian matrix with the given triangle."""
    triangle = jnp.tril(input, -1) if is_lower else jnp.triu(input, 1)
    diagonal = jnp.where(jnp.eye(input.shape[-1], dtype=bool), input, 0)
    return triangle + jnp.swapaxes(triangle, -1, -2).conj() + diagonal


def _eigh(input: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    """Reads one triangle; JAX averages both."""
    values, vectors = jnp.linalg.eigh(_of_triangle(input, UPLO.upper() == "L"), symmetrize_input=False)
    return values, vectors


def _pinv(input: jax.Array, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> jax.Array:
    """Supports `atol` and `hermitian`."""
    if hermitian:
        values, vectors = _eigh(input)
        left, right = vectors, jnp.swapaxes(vectors, -1, -2).conj()
    else:
        u, values, vh = jnp.linalg.svd(input, full_matrices=False)
        left, right = jnp.swapaxes(vh, -1, -2).conj(), jnp.swapaxes(u, -1, -2).conj()
    size = jnp.abs(values)
    largest = jnp.max(size, axis=-1, initial=0, keepdims=True)
    rtol = jnp.finfo(size.dtype).eps * max(input.shape[-2:]) if rtol is None else jnp.asarray(rtol)[..., None]
    cut = jnp.maximum(0 if atol is None else jnp.asarray(atol)[..., None], rtol * largest)
    inverse = jnp.where(size > cut, 1 / jnp.where(size > cut, values, 1), 0)
    return (left * inverse[..., None, :]) @ right


def _of_floats(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A special function, with integers converted to floats."""
    wide = (
        a.astype(jnp.float32) if isinstance(a, jax.Array) and _is_whole(a) else float(a) if isinstance(a, int) else a
        for a in args
    )
    return _torchax(op)(*wide, **kwargs)


_SPECIAL = (
    _aten.special_bessel_j0,
    _aten.special_bessel_y0,
    _aten.special_chebyshev_polynomial_u,
    _aten.special_hermite_polynomial_h,
)
_BATCH_NORMS = (
    _aten.native_batch_norm,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit_no_training,
)
LOWERINGS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: _add,
    _aten.add.Scalar: _add,
    _aten.div: _div,
    _aten.fmod: _fmod,
    _aten.pow: _pow,
    _aten.hardtanh: _hardtanh,
    _aten.linalg_vector_norm: _vector_norm,
    _aten.gather: _gather,
    _aten.sort: _sort,
    _aten.topk: _topk,
    _aten.scatter.value: _scatter_value,
    _aten.scatter_reduce: _scatter_reduce,
    _aten._linalg_eigh: _eigh,
    _aten.linalg_pinv.atol_rtol_tensor: _pinv,
    **{op: functools.partial(_in_its_dtype, op) for op in (_aten.lgamma, _aten.digamma, _aten.mvlgamma, _aten.logit)},
    **{op: functools.partial(_batch_norm, op) for op in _BATCH_NORMS},
    **{op: functools.partial(_reduced, op) for op in (_aten.sum, _aten.mean, _aten.cumsum, _aten.cumprod, _aten.prod)},
    _aten.any: _any,
    _aten.cholesky_inverse: _cholesky_inverse,
    _aten._trilinear: _trilinear,
    torch.unravel_index: _unravel_index,
    **{op: functools.partial(_of_floats, op) for op in _SPECIAL},
    **subgradients.LOWERINGS,
}
"""torch operations, or their overloads, mapped to functions of arrays."""


def _positive_alone(*args: Any, **kwargs: Any) -> str:
    return "JAX's function is another for negative numbers"


def _reflected_grid(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> str:
    return "of three axes, with places reflected at the border" if padding_mode == 2 else ""


def _complex_numbers(*args: Any, **kwargs: Any) -> str:
    values = [*args, *kwargs.values()]
    return "of complex numbers" if any(v.is_complex() for v in values if isinstance(v, torch.Tensor)) else ""


def _small_integers(equation: str, *operands: Any) -> str:
    flat = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    is_small = any(t.dtype in (torch.uint8, torch.int8, torch.int16) for t in flat if isinstance(t, torch.Tensor))
    return "of integers of 8 or 16 bits, of which torch adds some in 64 bits" if is_small else ""


def _bytes_of_an_image(input: Any, *args: Any, mode: str = "nearest", **kwargs: Any) -> str:
    is_rounded = input.dtype == torch.uint8 and not mode.startswith("nearest")
    return "of bytes, which torch rounds in an order of its own" if is_rounded else ""


REFUSED: dict[str, Callable[..., str]] = {
    **dict.fromkeys(
        (
            *("logaddexp", "logcumsumexp", "put", "rms_norm", "_fused_rms_norm", "_linalg_eigh", "linalg_lu_solve"),
            *("linalg_ldl_factor_ex", "cholesky_solve", "cholesky_inverse", "linalg_lstsq"),
        ),
        _complex_numbers,
    ),
    "einsum": _small_integers,
    "interpolate": _bytes_of_an_image,
    "polygamma": _positive_alone,
    "special_zeta": _positive_alone,
    "grid_sampler_3d": _reflected_grid,
}
"""Names of operations with lowerings that are wrong for some arguments, mapped to a function that returns why ("" if correct)."""
