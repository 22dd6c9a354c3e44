"""Rules of torch for 0-d operands: they take the dtype of the others, and what is known about their values is kept.

A traced scalar that is another one plus a number, or is compared with a number, is a length in most models; ranges between such
scalars then have a known size, and the comparison a known result.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from hfax.tracing.trace_tensor import TraceTensor

_ARITHMETIC = (
    "add sub mul div rsub true_divide floor_divide pow maximum minimum fmod remainder lerp addcmul addcdiv atan2 hypot"
)
SCALAR_AWARE = frozenset([*_ARITHMETIC.split(), "where", "masked_fill", "clamp", "clamp_min", "clamp_max"])
"""Operations in which torch promotes a 0-d operand to the dtype of the others."""
COMPARISONS = frozenset({"eq", "ne", "gt", "ge", "lt", "le"})


def note_sum(result: Any, name: str, args: Any) -> None:
    """Track offsets between traced scalars, so that ranges between them have a known length."""
    if not isinstance(result, TraceTensor) or result.host is not None or result.ndim or len(args) < 2:
        return
    one, other = args[0], args[1]
    if name == "add" and not isinstance(one, TraceTensor):
        one, other = other, one
    number = other.host if isinstance(other, TraceTensor) else other
    if isinstance(number, torch.Tensor) and number.ndim == 0 and not number.is_floating_point():
        number = int(number)
    if isinstance(one, TraceTensor) and one.host is None and type(number) is int:
        if name == "rsub":
            result.is_difference(number, one)
        else:
            result.is_sum(one, number if name == "add" else -number)


def known_comparison(name: str, args: Any) -> bool | None:
    """The result of comparing a traced scalar with a number, if what is known about the scalar decides it."""
    one, other = args[:2]
    if isinstance(one, TraceTensor) and one.host is None and one.ndim == 0 and type(other) is int:
        return one.compare(name, other)
    return None


def match_scalars(arrays: Any) -> Any:
    """torch's promotion: 0-d arrays take the dtype of the others if they are of the same or a lower kind."""
    wide = [a.dtype for a in arrays if isinstance(a, jax.Array) and a.ndim]
    if not wide:
        return arrays
    target = jnp.result_type(*wide)

    def fit(value: Any) -> Any:
        if isinstance(value, (jax.Array, np.ndarray)) and not value.ndim and value.dtype != target:
            return value.astype(target) if _kind(value.dtype) <= _kind(target) else value
        return value

    return tuple(fit(a) for a in arrays)


def _kind(dtype: Any) -> int:
    if dtype == jnp.bool_:
        return 0
    return 1 if jnp.issubdtype(dtype, jnp.integer) else 2 if jnp.issubdtype(dtype, jnp.floating) else 3
