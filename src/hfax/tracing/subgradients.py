"""Lowerings with torch's derivatives where JAX's are NaN, or another choice at a kink.

`jnp.where` computes both of its branches, and the derivative of the one that is not taken may be infinite: 0 times infinity is NaN.
At a kink, torch and JAX choose differently among the slopes on both sides; padding and rectified values are exactly there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax.ops import ops_registry

from hfax.kernels.target import may_be_differentiated

_aten = torch.ops.aten


def _floating(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function of an array, or of a number's, in the dtype of a floating-point array."""

    def run(x: Any, *args: Any, **kwargs: Any) -> jax.Array:
        x = jnp.asarray(x)
        out = function(x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32), *args, **kwargs)
        return out.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else out

    return run


def _elu(x: jax.Array, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> jax.Array:
    negative = jnp.where(x > 0, 0, x)
    return jnp.where(x > 0, x * scale, jnp.expm1(negative * input_scale) * (alpha * scale))


def _celu(x: jax.Array, alpha: Any = 1.0) -> jax.Array:
    return _elu(x, alpha, 1.0, 1.0 / alpha)


def _selu(x: jax.Array) -> jax.Array:
    return _elu(x, 1.6732632423543772, 1.0507009873554805)


def _softplus(x: jax.Array, beta: Any = 1.0, threshold: Any = 20.0) -> jax.Array:
    is_linear = x * beta > threshold
    return jnp.where(is_linear, x, jnp.log1p(jnp.exp(jnp.where(is_linear, 0, x) * beta)) / beta)


def _mish(x: jax.Array) -> jax.Array:
    return x * jnp.tanh(_softplus(x))


def hardtanh(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """The value between two bounds, with a gradient of 0 at them."""
    if not may_be_differentiated():
        return jnp.clip(x, low, high)
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def _hardswish(x: jax.Array, inplace: bool = False) -> jax.Array:
    return jnp.where(x <= -3, jnp.zeros_like(x), jnp.where(x < 3, x * (x + 3) / 6, x))


def _hardsigmoid(x: jax.Array, inplace: bool = False) -> jax.Array:
    return jnp.where(x <= -3, jnp.zeros_like(x), jnp.where(x < 3, (x + 3) / 6, jnp.ones_like(x)))


def _leaky_relu(x: jax.Array, negative_slope: Any = 0.01, inplace: bool = False) -> jax.Array:
    return jnp.where(x > 0, x, x * negative_slope)


def _sinc(x: jax.Array) -> jax.Array:
    is_zero = x == 0
    angle = jnp.pi * jnp.where(is_zero, 1, x)
    return jnp.where(is_zero, 1.0, jnp.sin(angle) / angle)


def absolute(x: Any) -> jax.Array:
    """The absolute value, with a derivative of 0 at 0."""
    x = jnp.asarray(x)
    if not (may_be_differentiated() and jnp.issubdtype(x.dtype, jnp.floating)):
        return x if x.dtype == jnp.bool_ else jnp.abs(x)
    return jnp.where(x == 0, jnp.zeros_like(x), jnp.abs(x))  # also of -0.0


def _clamp(x: Any, min: Any = None, max: Any = None) -> jax.Array:
    """The gradient is that of the value where it is a bound."""
    x = jnp.asarray(x)
    dtype = jnp.result_type(x, *(b for b in (min, max) if b is not None))
    x = x.astype(dtype)
    if min is not None:
        x = jnp.where(x < min, jnp.asarray(min, dtype), x)
    if max is not None:
        x = jnp.where(x > max, jnp.asarray(max, dtype), x)
    return x


def root(x: jax.Array, power: float) -> jax.Array:
    """`x ** (1 / power)` of numbers that are not negative, with a derivative of 0 at 0, as norms have it."""
    if not may_be_differentiated():
        return jnp.sqrt(x) if power == 2 else x ** (1.0 / power)
    is_zero = x == 0
    inner = jnp.where(is_zero, jnp.ones_like(x), x)
    return jnp.where(is_zero, jnp.zeros_like(x), jnp.sqrt(inner) if power == 2 else inner ** (1.0 / power))


@jax.custom_jvp
def with_value(old: jax.Array, new: jax.Array) -> jax.Array:
    """`new`, with the gradient of `old`: what a tensor is after a write to it while gradients are off."""
    return new


@with_value.defjvp
def _with_value_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[1], tangents[0]


def _if_differentiated(op: Any, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A lowering for programs of which a gradient may be taken; others have torchax's, which is simpler."""

    def run(*args: Any, **kwargs: Any) -> jax.Array:
        lowering: Any = function if may_be_differentiated() else ops_registry.all_aten_ops[op].func
        return lowering(*args, **kwargs)

    return run


LOWERINGS: dict[Any, Callable[..., Any]] = {
    _aten.elu: _floating(_elu),
    _aten.celu: _floating(_celu),
    _aten.selu: _floating(_selu),
    _aten.softplus: _floating(_softplus),
    _aten.mish: _floating(_mish),
    _aten.log_sigmoid: _floating(jax.nn.log_sigmoid),
    _aten.hardswish: _floating(_hardswish),
    _aten.hardsigmoid: _floating(_hardsigmoid),
    _aten.sinc: _floating(_sinc),
    **{
        op: _if_differentiated(op, function)
        for op, function in {
            _aten.leaky_relu: _floating(_leaky_relu),
            _aten.abs: absolute,
            _aten.clamp.default: _clamp,
            _aten.clamp.Tensor: _clamp,
            _aten.clamp_min: lambda x, min: _clamp(x, min=min),
        }.items()
    },
}
"""torch operations, or their overloads, mapped to functions of arrays."""
