"""64-bit integers in programs that otherwise compute in 32 bits.

torch integers have 64 bits, JAX integers 32 unless a process enables x64. Ids, positions, counts and flags fit; hashes do not:
Blt's polynomial hash over bytes silently overflowed. This module decides which calls of a trace may need more than 32 bits: those
with a constant that does not fit, those with a 64-bit tensor, and products, powers and shifts, unless bounds of the operands show
that they fit. Only such a call runs with JAX's 64-bit types; its result stays 64-bit until it is known to fit (a remainder, a
position, a float). Sums and differences of 32-bit integers are assumed to fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfax.errors import UnsupportedModelError, running_line
from hfax.tracing.trace_tensor import TraceTensor

_LOW, _HIGH = -(1 << 31), (1 << 31) - 1
_SMALL = {
    torch.bool: (0, 1),
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.int16: (-(1 << 15), (1 << 15) - 1),
}
_PRODUCTS = frozenset({"mul", "multiply"})
_GROWING = frozenset(
    {"pow", "float_power", "square", "prod", "cumprod", "__lshift__", "bitwise_left_shift", "ldexp", "tensordot"}
) | {
    *("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "einsum", "kron", "linear"),
    *("addmm", "baddbmm", "addbmm", "addmv", "addr", "addcmul"),
}
"""Operations with results far larger than their operands; sums are excluded."""
_REMAINDERS = frozenset({"remainder", "fmod", "__mod__"})
_POSITIONS = frozenset({"argmax", "argmin", "argsort", "nonzero", "count_nonzero", "searchsorted", "bucketize"})


def is_wide(value: Any) -> bool:
    """Whether a value is a tensor of a trace that holds 64-bit integers."""
    return isinstance(value, TraceTensor) and value.is_wide


def needs_64_bits(name: str, tensors: list[Any], args: Iterable[Any]) -> bool:
    """Whether a call needs 64-bit types for correct integer results.

    Args:
        name: name of the operation, such as "mul".
        tensors: all tensors among its arguments.
        args: its positional arguments.
    """
    if any(is_wide(t) for t in tensors):
        return True
    if any(type(a) is int and not _LOW <= a <= _HIGH for a in args):
        return True
    if any(t.is_floating_point() or t.is_complex() for t in tensors) or all(_host(t) is not None for t in tensors):
        return False
    if any(_has_large(t) for t in tensors):
        return True
    name = name.rstrip("_") if not name.startswith("__") else name
    if name in _PRODUCTS:
        return not _fits(*_product([limits(a) for a in args]))
    return name in _GROWING and not any(type(a) is float for a in args)


def limits(value: Any) -> tuple[int, int]:
    """Integer bounds of a number or of a tensor's values; the 32-bit range for a traced tensor with unknown bounds."""
    if isinstance(value, (int, float)):
        return int(value), int(value)
    if (host := _host(value)) is not None:
        return (int(host.min()), int(host.max())) if host.numel() else (0, 0)
    low, high = known_limits(value)
    return (_LOW if low is None else low), (_HIGH if high is None else high)


def known_limits(tensor: Any) -> tuple[int | None, int | None]:
    """The known bounds of a traced tensor."""
    low, high = _SMALL.get(tensor.dtype, (None, None))
    known_low, known_high = getattr(tensor, "at_least", None), getattr(tensor, "at_most", None)
    return (low if known_low is None else known_low), (high if known_high is None else known_high)


def settled(name: str, args: Any, result: Any) -> Any:
    """Narrow the result of a call with 64-bit types: floats, and integers known to fit, go back to 32 bits.

    Args:
        name: name of the operation.
        args: its positional arguments.
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
            name in _POSITIONS or (second and number == 1) or _is_bounded(name.rstrip("_"), args)
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


def _is_bounded(name: str, args: Any) -> bool:
    if name in _REMAINDERS:
        low, high = limits(args[1])
        return _fits(low, high)
    if name in ("bitwise_and", "__and__"):
        return any(_is_number(a) and limits(a)[0] >= 0 and limits(a)[1] <= _HIGH for a in args[:2])
    return name == "clamp" and len(args) == 3 and all(_is_number(a) and _fits(*limits(a)) for a in args[1:])


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or _host(value) is not None


def _product(factors: list[tuple[int, int]]) -> tuple[int, int]:
    corners = [a * b for a, b in itertools.product(*factors[:2])] if len(factors) > 1 else [_LOW - 1]
    return min(corners), max(corners)


def _fits(low: int, high: int) -> bool:
    return low >= _LOW and high <= _HIGH


def _has_large(tensor: Any) -> bool:
    host = _host(tensor)
    return host is not None and host.dtype == torch.int64 and not _fits(*limits(tensor))


def _host(tensor: Any) -> torch.Tensor | None:
    """The value of a constant."""
    if isinstance(tensor, TraceTensor):
        return tensor.host
    return tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None


def _trace_tensors(value: Any) -> Iterator[TraceTensor]:
    if isinstance(value, TraceTensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _trace_tensors(item)
