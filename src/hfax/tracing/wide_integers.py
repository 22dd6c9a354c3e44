"""64-bit integers in programs that otherwise compute in 32 bits.

torch integers have 64 bits, JAX integers 32 unless a process enables x64. Ids, positions, counts and flags fit; hashes do not:
Blt's polynomial hash over bytes silently overflowed. This module decides which calls of a trace may need more than 32 bits: those
with a constant that does not fit, those with a 64-bit tensor, and products, powers and shifts, unless bounds of the operands show
that they fit. Only such a call runs with JAX's 64-bit types; its result stays 64-bit until it is known to fit (a remainder, a
position, a float). Sums and differences of 32-bit integers are assumed to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfax.errors import UnsupportedModelError, running_line
from hfax.tracing import bounds
from hfax.tracing.trace_tensor import TraceTensor

_PRODUCTS = frozenset({"mul", "multiply"})
_GROWING = frozenset(
    {"pow", "float_power", "square", "prod", "cumprod", "__lshift__", "bitwise_left_shift", "ldexp", "tensordot"}
) | {
    *("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "einsum", "kron", "linear"),
    *("addmm", "baddbmm", "addbmm", "addmv", "addr", "addcmul"),
}
"""Operations with results far larger than their operands; sums are excluded."""
_POSITIONS = frozenset({"argmax", "argmin", "argsort", "nonzero", "count_nonzero", "searchsorted", "bucketize"})


def is_wide(value: Any) -> bool:
    """Whether a value is a tensor of a trace that holds 64-bit integers."""
    return isinstance(value, TraceTensor) and value.is_wide


def needs_64_bits(name: str, tensors: list[Any], args: Sequence[Any]) -> bool:
    """Whether a call needs 64-bit types for correct integer results.

    Args:
        name: name of the operation, such as "mul".
        tensors: all tensors among its arguments.
        args: its positional arguments.
    """
    if any(is_wide(t) for t in tensors):
        return True
    if any(type(a) is int and not bounds.fit((a, a)) for a in args):
        return True
    if any(t.is_floating_point() or t.is_complex() for t in tensors) or all(
        bounds.constant(t) is not None for t in tensors
    ):
        return False
    if any(_has_large(t) for t in tensors):
        return True
    name = name.rstrip("_") if not name.startswith("__") else name
    if name in _PRODUCTS:
        return not bounds.fit(bounds.product(*args[:2]))
    return name in _GROWING and not any(type(a) is float for a in args)


def settled(name: str, result: Any) -> Any:
    """Narrow the result of a call with 64-bit types: floats, and integers known to fit, go back to 32 bits.

    Args:
        name: name of the operation.
        result: tensors of the trace, modified in place.
    """
    second = isinstance(result, (tuple, list)) and len(result) == 2 and name not in ("split", "chunk", "unbind")
    for number, tensor in enumerate(_trace_tensors(result)):
        array = tensor.array
        if array is None or tensor.has_shared_storage:
            continue
        if array.dtype in (jnp.float64, jnp.complex128):
            tensor.narrow_to(jnp.float32 if array.dtype == jnp.float64 else jnp.complex64)
        elif array.dtype == jnp.int64 and (
            name in _POSITIONS or (second and number == 1) or None not in bounds.known(tensor)
        ):
            tensor.narrow_to(jnp.int32)
    return result


def widened(arrays: Any) -> Any:
    """Widen the 32-bit integer arrays in a nested value to 64 bits."""
    return jax.tree.map(
        lambda a: a.astype(jnp.int64) if isinstance(a, jax.Array) and a.dtype == jnp.int32 else a, arrays
    )


def _position_of(best: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`torch.argmax` or `argmin`: the first index of the best value. JAX lowers its own after 64-bit mode has been left."""

    def position(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
        flat = x.reshape(-1) if dim is None or not x.ndim else x
        axis = 0 if dim is None or not x.ndim else dim % x.ndim
        places = jax.lax.broadcasted_iota(jnp.int32, flat.shape, axis)
        is_best = flat == best(flat, axis=axis, keepdims=True)
        found = jnp.min(jnp.where(is_best, places, jnp.int32(flat.shape[axis])), axis=axis)
        if dim is None or not x.ndim:
            return found.reshape((1,) * x.ndim if keepdim else ())
        return jnp.expand_dims(found, axis) if keepdim else found

    return position


def _best_of(value: Callable[..., jax.Array], position: Callable[..., jax.Array]) -> Callable[..., Any]:
    def best(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None or not x.ndim:
            return value(x) if dim is None else (x, position(x, dim, keepdim))
        return value(x, axis=dim, keepdims=keepdim), position(x, dim, keepdim)

    return best


_argmax, _argmin = _position_of(jnp.max), _position_of(jnp.min)
LOWERINGS: dict[str, Callable[..., Any]] = {
    "argmax": _argmax,
    "argmin": _argmin,
    "max": _best_of(jnp.max, _argmax),
    "min": _best_of(jnp.min, _argmin),
}
"""Operations with a different lowering within `in_64_bits`."""


def refusal(name: str, reason: str) -> UnsupportedModelError:
    """The error for a call that needs 64-bit integers where they are not possible."""
    return UnsupportedModelError(
        f"{running_line()}: {name} needs 64-bit integers.",
        f"Programs compute in 32 bits, which would overflow, and 64 bits are not possible here: {reason}",
        "Register a patch for that function (hfax.register_patch), or compute its result beforehand and pass it to the model.",
    )


def _has_large(tensor: Any) -> bool:
    host = bounds.constant(tensor)
    return host is not None and host.dtype == torch.int64 and not bounds.fit(bounds.of(tensor))


def _trace_tensors(value: Any) -> Iterator[TraceTensor]:
    if isinstance(value, TraceTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _trace_tensors(item)
