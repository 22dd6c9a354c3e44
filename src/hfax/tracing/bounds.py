"""Bounds of whole numbers in a trace: what is known of operands decides what is known of results.

Bounds are those of torch's 64-bit results. They let products of sizes stay in 32 bits (`hfax.tracing.wide_integers`); an
accelerator computes 64-bit integers by many operations of 32 bits each.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

from hfax.tracing.trace_tensor import TraceTensor

_LOW, _HIGH = -(1 << 31), (1 << 31) - 1
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
Bounds = tuple[int, int]
_SMALL = {
    torch.bool: (0, 1),
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.int16: (-(1 << 15), (1 << 15) - 1),
}
_KEPT = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t"),
        *("select", "slice", "narrow", "unfold", "flip", "repeat", "clone", "contiguous", "__getitem__"),
        *("index_select", "gather", "amax", "amin"),
    }
)
"""Operations whose (first) result has numbers of their first operand and no others."""


def of(value: Any) -> Bounds:
    """Bounds of a whole number or of a tensor's numbers; those of its dtype for a traced tensor of which nothing is known."""
    if isinstance(value, (int, float)):
        return int(value), int(value)
    if (host := constant(value)) is not None:
        return (int(host.min()), int(host.max())) if host.numel() else (0, 0)
    low, high = known(value)
    lowest, highest = (_LOWEST, _HIGHEST) if getattr(value, "is_wide", False) else (_LOW, _HIGH)
    return (lowest if low is None else low), (highest if high is None else high)


def known(tensor: Any) -> tuple[int | None, int | None]:
    """The known bounds of a traced tensor."""
    low, high = _SMALL.get(tensor.dtype, (None, None))
    known_low, known_high = getattr(tensor, "at_least", None), getattr(tensor, "at_most", None)
    return (low if known_low is None else known_low), (high if known_high is None else known_high)


def fit(bounds: Bounds) -> bool:
    """Whether numbers within the bounds have 32 bits."""
    return bounds[0] >= _LOW and bounds[1] <= _HIGH


def constant(value: Any) -> torch.Tensor | None:
    """The value of a constant tensor."""
    if isinstance(value, TraceTensor):
        return value.host
    return value if type(value) in (torch.Tensor, torch.nn.Parameter) else None


def note(result: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Record the bounds of a call's result, where those of its operands decide them.

    Those of a scalar decide branches and checks of modelling code; of its operations only the largest and the smallest number have
    bounds here, and sums in `hfax.tracing.scalars`.

    Args:
        result: of the call; of several, the first.
        name: name of the operation, such as "mul".
        args: its positional arguments.
        kwargs: its other arguments.
    """
    result = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(result, TraceTensor) or result.dtype not in (torch.int32, torch.int64) or result.host is not None:
        return
    if not result.ndim and not result.is_wide and name not in ("max", "min"):
        return
    if (rule := _kept if name in _KEPT else _RULES.get(name)) is None:
        return
    try:
        given = _signature(rule).bind(result, *args, **kwargs)
    except TypeError:  # an argument that is rarely given, such as `out`
        return
    if (found := rule(*given.args, **given.kwargs)) is None:
        return
    low, high = found
    result.at_least, result.at_most = (low if low >= _LOW else None), (high if high <= _HIGH else None)


def product(one: Any, other: Any) -> Bounds:
    """Bounds of a product of whole numbers."""
    corners = [a * b for a, b in itertools.product(of(one), of(other))]
    return min(corners), max(corners)


@functools.lru_cache(maxsize=64)
def _signature(rule: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(rule)


def _kept(result: TraceTensor, x: Any, *_: Any, **__: Any) -> Bounds:
    return of(x)


def _added(result: TraceTensor, x: Any, other: Any, *, alpha: int = 1) -> Bounds:
    (low, high), (other_low, other_high) = of(x), product(other, alpha)
    return low + other_low, high + other_high


def _subtracted(result: TraceTensor, x: Any, other: Any, *, alpha: int = 1) -> Bounds:
    return _added(result, x, other, alpha=-alpha)


def _multiplied(result: TraceTensor, x: Any, other: Any) -> Bounds:
    return product(x, other)


def _divided(result: TraceTensor, x: Any, other: Any, *, rounding_mode: str = "floor") -> Bounds:
    (low, high), (other_low, _) = of(x), of(other)
    largest = max(-low, high)
    return (0, high) if low >= 0 and other_low >= 0 else (-largest, largest)


def _remainder(result: TraceTensor, x: Any, other: Any) -> Bounds:
    (low, high), (other_low, other_high) = of(x), of(other)
    largest = max(-other_low, other_high, 1) - 1
    return (0 if other_low >= 0 else -largest), (min(high, largest) if low >= 0 and other_low >= 0 else largest)


def _remainder_to_zero(result: TraceTensor, x: Any, other: Any) -> Bounds:
    low, high = of(other)
    largest = max(-low, high, 1) - 1
    return -largest, largest


def _clamped(result: TraceTensor, x: Any, min: Any = None, max: Any = None) -> Bounds:
    found = of(x)
    if min is not None:
        found = _larger(found, of(min))
    return found if max is None else _smaller(found, of(max))


def _larger(one: Bounds, other: Bounds) -> Bounds:
    return max(one[0], other[0]), max(one[1], other[1])


def _smaller(one: Bounds, other: Bounds) -> Bounds:
    return min(one[0], other[0]), min(one[1], other[1])


def _largest(result: TraceTensor, x: Any, other: Any = None, *_: Any, **__: Any) -> Bounds:
    return _larger(of(x), of(other)) if isinstance(other, torch.Tensor) else of(x)


def _smallest(result: TraceTensor, x: Any, other: Any = None, *_: Any, **__: Any) -> Bounds:
    return _smaller(of(x), of(other)) if isinstance(other, torch.Tensor) else of(x)


def _bits_of_both(result: TraceTensor, x: Any, other: Any) -> Bounds | None:
    highest = [high for low, high in (of(x), of(other)) if low >= 0]
    return (0, min(highest)) if highest else None


def _chosen(result: TraceTensor, condition: Any, x: Any, other: Any) -> Bounds:
    (low, high), (other_low, other_high) = of(x), of(other)
    return min(low, other_low), max(high, other_high)


def _joined(result: TraceTensor, tensors: Any, *_: Any, **__: Any) -> Bounds:
    lows, highs = zip(*(of(t) for t in tensors), strict=True)
    return min(lows), max(highs)


def _summed(result: TraceTensor, x: Any, *_: Any, **__: Any) -> Bounds:
    return _total(x, x.numel() // max(result.numel(), 1))


def _summed_up(result: TraceTensor, x: Any, dim: int, **_: Any) -> Bounds:
    return _total(x, x.shape[dim] if x.ndim else 1)


def _total(x: Any, count: int) -> Bounds:
    low, high = of(x)
    return min(low * count, low, 0), max(high * count, high, 0)


_RULES: dict[str, Callable[..., Bounds | None]] = {
    "add": _added,
    "sub": _subtracted,
    "mul": _multiplied,
    "floor_divide": _divided,
    "div": _divided,
    "remainder": _remainder,
    "fmod": _remainder_to_zero,
    "clamp": _clamped,
    "clamp_min": _clamped,
    "clamp_max": lambda result, x, max: _clamped(result, x, max=max),
    "max": _largest,
    "maximum": _largest,
    "min": _smallest,
    "minimum": _smallest,
    "bitwise_and": _bits_of_both,
    "where": _chosen,
    "cat": _joined,
    "stack": _joined,
    "sum": _summed,
    "cumsum": _summed_up,
}
"""Bounds of the result by the operation's name, of the result and the operation's arguments."""
