"""Rules of elementwise operations, products and sums for the beginnings of padded arrays, see `prefixes`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hfax.kernels.attention import OWN_MASK
from hfax.tracing.prefix_moves import broadcasted
from hfax.tracing.prefixes import (
    FINITE,
    LARGEST_MASK,
    Axis,
    Facts,
    Fill,
    Mask,
    Masked,
    Symbols,
    UnprovenError,
    Value,
    aligned,
    alike,
    by_group,
    join,
    joined,
    plain,
    take,
)

_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "abs": np.abs,
    "select_n": lambda which, *cases: np.choose(which.astype(np.int32), cases),
    "convert_element_type": lambda a: a, "stop_gradient": lambda a: a, "copy": lambda a: a, "copy_p": lambda a: a,
    "clamp": lambda low, a, high: np.clip(a, low, high),
}  # fmt: skip
"""Elementwise operations that numpy computes as XLA does."""
ELEMENTWISE = frozenset(_NUMPY) | {
    "div", "rem", "pow", "integer_pow", "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "erfc", "erf_inv",
    "sqrt", "rsqrt", "cbrt", "square", "sign", "floor", "ceil", "round", "sin", "cos", "tan", "asin", "acos", "atan", "atan2",
    "sinh", "cosh", "asinh", "acosh", "atanh", "is_finite", "reduce_precision", "nextafter", "shift_left", "clz", "real", "imag",
    "shift_right_logical", "shift_right_arithmetic", "population_count", "conj", "complex",
}  # fmt: skip
_SAME = ("stop_gradient", "copy", "copy_p")
_REDUCING: dict[str, Callable[..., Any]] = {
    "reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min, "reduce_prod": np.prod,
    "reduce_and": np.all, "reduce_or": np.any,
}  # fmt: skip
REDUCTIONS = frozenset(_REDUCING) | {"argmax", "argmin"}
_SELECTING = ("reduce_max", "reduce_min", "reduce_or", "reduce_and")


def computed(equation: Any, arrays: Sequence[np.ndarray]) -> np.ndarray | None:
    """The result of an operation on known arrays; None if it should stay a symbol."""
    name, shaped = equation.primitive.name, equation.outvars[0].aval
    if len(equation.outvars) != 1 or not hasattr(shaped.dtype, "kind") or "random" in name:
        return None
    if name in _NUMPY:
        with np.errstate(all="ignore"):
            result = _NUMPY[name](*arrays)
    elif name in _REDUCING:
        result = _REDUCING[name](arrays[0], axis=tuple(equation.params["axes"]))
    elif shaped.dtype.kind == "f" and name in ELEMENTWISE:  # its last bit may depend on the length
        return None
    else:
        result = _bound(equation, arrays)
    return np.broadcast_to(np.asarray(result).astype(shaped.dtype), shaped.shape)


def _bound(equation: Any, arrays: Sequence[np.ndarray]) -> Any:
    import jax

    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return equation.primitive.bind(*[jax.numpy.asarray(a) for a in arrays], **equation.params)


def elementwise(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """Any operation of `ELEMENTWISE`."""
    name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype
    dtypes = [v.dtype for v in values]
    shape = equation.outvars[0].aval.shape
    values = [_expanded(v, shape, symbols) if v.groups else v for v in values]
    shaped = [index for index, v in enumerate(values) if v.groups]
    made, groups = aligned([values[i] for i in shaped], symbols) if shaped else ([], ())
    operands = [made[shaped.index(i)] if i in shaped else v for i, v in enumerate(values)]

    def find(kept: tuple[int, ...]) -> Facts:
        facts = [v.at(kept) if v.groups else _spread(v.at(()), len(kept)) for v in operands]
        fills = tuple(_fill(equation, fills, dtypes) for fills in zip(*(f.fills for f in facts), strict=True))
        low, high = _bounds(name, facts)
        if (same := _simpler(name, facts, values, dtype)) is not None:
            return dataclasses.replace(same, fills=fills)
        if all(f.const is not None for f in facts):
            const = _scalar(equation, [f.const for f in facts], dtypes)
        else:
            const = _decided(name, facts)
        if const is not None:
            return Facts(symbols.of_const(const, dtype), fills, const, low, high)
        symbol = symbols.of(name, _key(equation.params), str(dtype), *(f.symbol for f in facts))
        return Facts(symbol, fills, None, low, high)

    return [Value(groups, dtype, find)]


def dot(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.dot_general: one of the operands must be 0 at padding that is summed over."""
    (left_in, right_in), batch = equation.params["dimension_numbers"]
    left, right = values
    for i, j in (*zip(left_in, right_in, strict=True), *zip(*batch, strict=True)):
        left, right = alike(left, i, right, j, symbols)
    shared = {i: tuple(join(p) for p in zip(left.groups[i], right.groups[j], strict=True))
              for i, j in (*zip(left_in, right_in, strict=True), *zip(*batch, strict=True))}  # fmt: skip
    left_free = [i for i in range(len(left.groups)) if i not in left_in and i not in batch[0]]
    right_free = [j for j in range(len(right.groups)) if j not in right_in and j not in batch[1]]
    groups = (
        *(shared[i] for i in batch[0]),
        *(left.groups[i] for i in left_free),
        *(right.groups[j] for j in right_free),
    )
    key = (repr(equation.params["dimension_numbers"]), str(equation.params["preferred_element_type"]))
    key = (*key, tuple(len(g) for g in left.groups), tuple(len(g) for g in right.groups))

    def find(kept: tuple[int, ...]) -> Facts:
        parts = by_group(kept, groups)
        lefts = dict(zip((*batch[0], *left_free), parts, strict=False))
        right_parts = (*parts[: len(batch[0])], *parts[len(groups) - len(right_free) :])
        rights = dict(zip((*batch[1], *right_free), right_parts, strict=True))
        for i, j in zip(left_in, right_in, strict=True):
            lefts[i] = rights[j] = tuple(a.kept for a in shared[i])
        a = left.at(joined([lefts[i] for i in range(len(left.groups))]))
        b = right.at(joined([rights[j] for j in range(len(right.groups))]))
        a_fills, b_fills = by_group(a.fills, left.groups), by_group(b.fills, right.groups)
        for i, j in zip(left_in, right_in, strict=True):
            for axis, x, y in zip(shared[i], a_fills[i], b_fills[j], strict=True):
                if axis.kept < axis.size and not (_is_zero(x) or _is_zero(y)):
                    raise UnprovenError("a product sums over padding")
        sizes = tuple(a.size for i in left_in for a in shared[i] if a.role is None)
        fills = joined(
            [
                *(
                    tuple(
                        0.0 if _is_zero(x) or _is_zero(y) else None for x, y in zip(a_fills[i], b_fills[j], strict=True)
                    )
                    for i, j in zip(*batch, strict=True)
                ),
                *(tuple(0.0 if _is_zero(x) else None for x in a_fills[i]) for i in left_free),
                *(tuple(0.0 if _is_zero(x) else None for x in b_fills[j]) for j in right_free),
            ]
        )
        return Facts(symbols.of("dot", key, sizes, a.symbol, b.symbol), fills)

    return [Value(groups, equation.outvars[0].aval.dtype, find)]


def reduce(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """Any operation of `REDUCTIONS`: padding that it reads must not change the result."""
    (value,), name = values, equation.primitive.name
    reduced = equation.params["axes"]
    if name.startswith("arg") and len(value.groups[reduced[0]]) > 1:
        raise UnprovenError(f"{name} counts merged axes")
    groups = tuple(g for i, g in enumerate(value.groups) if i not in reduced)

    dtype = equation.outvars[0].aval.dtype
    sizes = tuple(a.size for i in reduced for a in value.groups[i] if a.role is None)

    def find(kept: tuple[int, ...]) -> Facts:
        rest = iter(by_group(kept, groups))
        inner = [tuple(a.kept for a in g) if i in reduced else next(rest) for i, g in enumerate(value.groups)]
        facts = value.at(joined(inner))
        given = by_group(facts.fills, value.groups)
        for i in reduced:
            for axis, fill in zip(value.groups[i], given[i], strict=True):
                if axis.kept < axis.size and not _is_neutral(name, fill, facts):
                    raise UnprovenError(f"{name} reads padding")
        fills = tuple(_reduced_fill(name, f) for i, g in enumerate(given) if i not in reduced for f in g)
        if name in _SELECTING and facts.const is not None:
            return Facts(symbols.of_const(facts.const, dtype), fills, facts.const, facts.low, facts.high)
        low, high = (facts.low, facts.high) if name in _SELECTING else (-FINITE, FINITE)
        if name.startswith("arg"):
            low, high = 0.0, float(value.groups[reduced[0]][0].kept - 1)
        key = (tuple(reduced), tuple(len(g) for g in value.groups), sizes)
        return Facts(symbols.of(name, key, facts.symbol), fills, None, low, high)

    return [Value(groups, dtype, find)]


def largest(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.top_k: on the last axis."""
    (value,), count = values, equation.params["k"]
    if equation.params.get("axis", len(value.groups) - 1) % len(value.groups) != len(value.groups) - 1:
        raise UnprovenError("top_k of another axis than the last")
    last = value.axes[-1]
    if len(value.groups[-1]) > 1 or last.role is not None:
        raise UnprovenError("top_k reads padding")

    def make(index: int, dtype: Any) -> Value:
        def find(kept: tuple[int, ...]) -> Facts:
            facts = value.at((*kept[:-1], last.size))
            low, high = (facts.low, facts.high) if index == 0 else (0.0, float(last.size - 1))
            found = Facts(
                symbols.of("top_k", index, count, last.size, facts.symbol), (None,) * len(kept), None, low, high
            )
            return take(found, kept, [*(Axis(n) for n in kept[:-1]), Axis(count)], symbols)

        return Value((*value.groups[:-1], (Axis(count),)), dtype, find)

    return [make(index, variable.aval.dtype) for index, variable in enumerate(equation.outvars)]


def rows_by_expert(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """`hfax.kernels.experts`: each row is multiplied by the matrix of its expert, whatever rows there are besides."""
    rows, experts = alike(values[0], 0, values[1], 0, symbols)
    weights = values[2:]
    if any(v.is_padded for v in weights) or any(a.role is not None for a in rows.groups[1]):
        raise UnprovenError("experts sum over padding")
    width = tuple(a.size for a in rows.groups[1])
    shaped = equation.outvars[0].aval
    groups = (tuple(join(p) for p in zip(rows.groups[0], experts.groups[0], strict=True)), (Axis(shaped.shape[1]),))

    def find(kept: tuple[int, ...]) -> Facts:
        own = kept[:-1]
        read = rows.at((*own, *width)).symbol, experts.at(own).symbol, *(v.at().symbol for v in weights)
        found = Facts(symbols.of("rows_by_expert", len(own), read), (None,) * len(kept))
        return take(found, kept, [*(Axis(n) for n in own), Axis(shaped.shape[1])], symbols)

    return [Value(groups, shaped.dtype, find)]


def convolve(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.conv_general_dilated: it may read zeros after the end, be they the convolution's own or padding."""
    params, (value, kernel) = equation.params, values
    spec, out_spec = params["dimension_numbers"].lhs_spec, params["dimension_numbers"].out_spec
    if kernel.is_padded or any(len(g) > 1 for g in value.groups) or params["batch_group_count"] != 1:
        raise UnprovenError("a convolution reads merged axes")
    if value.groups[spec[1]][0].role is not None:
        raise UnprovenError("a convolution sums over padding")
    shape = equation.outvars[0].aval.shape
    groups: list[tuple[Axis, ...]] = [(Axis(n),) for n in shape]
    groups[out_spec[0]] = value.groups[spec[0]]
    ends: dict[int, int] = {}
    for place, (_low, high) in enumerate(params["padding"]):
        dim = spec[2 + place]
        (axis,) = value.groups[dim]
        if axis.role is None:
            continue
        if params["window_strides"][place] != 1 or params["lhs_dilation"][place] != 1:
            raise UnprovenError("a convolution has strides over a padded axis")
        size = shape[out_spec[2 + place]]
        groups[out_spec[2 + place]] = (Axis(size, axis.role, axis.kept + size - axis.size),)
        ends[dim] = high
    made = tuple(groups)
    rows = out_spec[0]
    names = ("padding", "window_strides", "lhs_dilation", "rhs_dilation", "dimension_numbers", "feature_group_count")
    key = repr([params[n] for n in names])

    def find(kept: tuple[int, ...]) -> Facts:
        facts = value.at(tuple(kept[rows] if d == spec[0] else a.kept for d, (a,) in enumerate(value.groups)))
        for dim, high in ends.items():
            (axis,) = value.groups[dim]
            if high > 0 and axis.kept < axis.size and not _is_zero(facts.fills[dim]):
                raise UnprovenError("a convolution reads padding")
        sizes = tuple(a.size for (a,) in value.groups if a.role is None)
        whole = Facts(symbols.of("convolve", key, sizes, facts.symbol, kernel.at().symbol), (None,) * len(kept))
        return take(
            whole,
            kept,
            [Axis(n if d == rows else a.kept) for d, (n, (a,)) in enumerate(zip(kept, made, strict=True))],
            symbols,
        )

    return [Value(made, equation.outvars[0].aval.dtype, find)]


def _expanded(value: Value, shape: Sequence[int], symbols: Symbols) -> Value:
    """The operand in the shape of the result."""
    sizes = tuple(math.prod(a.size for a in g) for g in value.groups)
    return value if sizes == tuple(shape) else broadcasted(value, shape, range(len(shape)), symbols)


def _key(params: dict[str, Any]) -> str:
    return repr({n: v for n, v in params.items() if n not in ("sharding", "out_sharding")})


def _spread(facts: Facts, count: int) -> Facts:
    """A scalar's facts, for every axis of the arrays that it meets."""
    return dataclasses.replace(facts, fills=(facts.const,) * count)


def _scalar(equation: Any, values: Sequence[Any], dtypes: Sequence[Any]) -> Any:
    """The operation on single values."""
    name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype
    arrays = [np.asarray(v, d) for v, d in zip(values, dtypes, strict=True)]
    if name in _NUMPY:
        with np.errstate(all="ignore"):
            result = np.asarray(_NUMPY[name](*arrays)).astype(dtype)
    else:
        result = np.asarray(_bound(equation, arrays))
    value = result.item() if result.dtype.kind in "biuf" or result.dtype.name == "bfloat16" else None
    return None if isinstance(value, float) and math.isnan(value) else value


def _simpler(name: str, facts: Sequence[Facts], values: Sequence[Value], dtype: Any) -> Facts | None:
    """The operand that the result equals."""
    if name in _SAME or (name == "convert_element_type" and values[0].dtype == dtype):
        return facts[0]
    if name == "select_n":
        if facts[0].const is not None:
            return facts[1 + int(facts[0].const)]
        return facts[1] if len({f.symbol for f in facts[1:]}) == 1 else None
    if len(facts) != 2:
        return None
    a, b = facts
    neutral = _NEUTRAL.get(name)
    if neutral is None:
        return None
    if b.const is not None and b.const == neutral:
        return a
    return b if name not in ("sub", "div") and a.const is not None and a.const == neutral else None


_NEUTRAL: dict[str, Any] = {
    "add": 0, "sub": 0, "mul": 1, "div": 1, "and": True, "or": False, "max": -math.inf, "min": math.inf,
}  # fmt: skip


def _decided(name: str, facts: Sequence[Facts]) -> Any:
    """The value that a result must have, by a zero, a truth value or the operands' bounds; None if it is open."""
    consts = [f.const for f in facts]
    if name in ("mul", "and") and any(_is_zero(c) for c in consts):
        return False if name == "and" else 0
    if name == "or" and any(c is True for c in consts):
        return True
    if name in ("gt", "ge", "lt", "le"):
        small, large = facts if name in ("lt", "le") else reversed(facts)
        if small.high < large.low or (name in ("le", "ge") and small.high <= large.low):
            return True
        if small.low > large.high or (name in ("lt", "gt") and small.low >= large.high):
            return False
    return None


def _bounds(name: str, facts: Sequence[Facts]) -> tuple[float, float]:
    if name in _SAME or name == "convert_element_type":
        return facts[0].low, facts[0].high
    if name == "select_n":
        return min(f.low for f in facts[1:]), max(f.high for f in facts[1:])
    if name in ("eq", "ne", "lt", "le", "gt", "ge", "not", "and", "or", "is_finite"):
        return 0.0, 1.0
    if name.startswith("log") or any(math.isinf(f.low) or math.isinf(f.high) for f in facts):
        return -math.inf, math.inf
    if name == "mul" and all(f.low >= 0 for f in facts):
        return 0.0, FINITE
    if name == "add":
        return max(sum(f.low for f in facts), -FINITE), min(sum(f.high for f in facts), FINITE)
    return -FINITE, FINITE


def _fill(equation: Any, fills: Sequence[Fill], dtypes: Sequence[Any]) -> Fill:
    """The padding of an elementwise result."""
    value = _plain_fill(equation, [plain(f) for f in fills], dtypes)
    if not any(isinstance(f, Mask) for f in fills):
        return value
    name = equation.primitive.name
    if (bound := _mask_bound(value)) is not None and _shows_some(name, fills):
        return Masked(bound, is_seen=True)
    firsts = [f.first if isinstance(f, Mask) else f for f in fills]
    if value is None or isinstance(value, Masked) or any(f is None or isinstance(f, Masked) for f in firsts):
        return value
    first = _scalar(equation, firsts, dtypes)
    return value if first is None or first == value else Mask(value, first)


def _shows_some(name: str, fills: Sequence[Fill]) -> bool:
    """Whether a mask leaves some score as it is, in each row."""
    if name == "select_n" and isinstance(mask := fills[0], Mask):
        return any(v is not None and fills[1 + int(v)] is None for v in (mask.first, mask.some))
    masks = [f for f in fills if isinstance(f, Mask)]
    return name == "add" and len(masks) == 1 and 0 in (masks[0].first, masks[0].some)


def _plain_fill(equation: Any, fills: Sequence[Any], dtypes: Sequence[Any]) -> Any:
    name = equation.primitive.name
    if name == "select_n":
        if fills[0] is not None and not isinstance(fills[0], Masked):
            return fills[1 + int(fills[0])]
        return fills[1] if all(f == fills[1] for f in fills[1:]) else None
    if all(f is not None and not isinstance(f, Masked) for f in fills):
        return _scalar(equation, fills, dtypes)
    if name in _SAME or name == "convert_element_type":
        return fills[0]
    if name == "or" and any(f is True for f in fills):
        return True
    if name in ("mul", "and") and any(_is_zero(f) for f in fills):
        return False if any(f is False for f in fills) else 0
    if name == "div" and _is_zero(fills[0]):
        return 0
    return _masked(name, fills)


def _masked(name: str, fills: Sequence[Any]) -> Any:
    """The padding where an operand is a masked score and others may be anything."""
    bounds = [_mask_bound(f) for f in fills]
    if name in ("exp", "exp2", "logistic") and bounds[0] is not None:
        return 0.0
    if len(fills) != 2:
        return None
    (a, b), (first, second) = bounds, fills
    is_seen = any(_is_seen(f) for f in fills)
    if name == "add" and (a is not None or b is not None):
        return Masked(max(x for x in bounds if x is not None) / 2, is_seen)
    if name == "sub" and a is not None:
        return Masked(a / 2, is_seen)
    if name in ("mul", "div") and a is not None and isinstance(second, (int, float)) and second > 0:
        return Masked(a * second if name == "mul" else a / second, is_seen)
    if name == "mul" and b is not None and isinstance(first, (int, float)) and first > 0:
        return Masked(b * first, is_seen)
    return None


def _is_seen(fill: Any) -> bool:
    """Whether a query's padded scores are beside one that is not masked; hfax's own attention gives 0 where there is none."""
    return fill.is_seen if isinstance(fill, Masked) else fill == float(np.float32(OWN_MASK))


def _mask_bound(fill: Any) -> float | None:
    """The bound of a masked score, or of a constant that masks; None for others."""
    if isinstance(fill, Masked):
        return fill.bound if fill.bound <= LARGEST_MASK / 64 else None
    is_mask = isinstance(fill, (int, float)) and not isinstance(fill, bool) and -math.inf < fill <= LARGEST_MASK
    return float(fill) if is_mask else None


def _is_zero(fill: Any) -> bool:
    fill = plain(fill)
    return fill is not None and not isinstance(fill, Masked) and fill == 0


def _is_neutral(name: str, fill: Fill, facts: Facts) -> bool:
    """Whether padding of this value leaves a reduction as it is."""
    if (name, facts.const) in (("reduce_or", True), ("reduce_and", False)):
        return True
    fill = plain(fill)
    if fill is None:
        return False
    if name in ("reduce_max", "argmax"):
        return _is_seen(fill) if isinstance(fill, Masked) else fill <= facts.low or _is_seen(fill)
    if isinstance(fill, Masked):
        return False
    if name in ("reduce_min", "argmin"):
        return fill >= facts.high
    return fill == {"reduce_sum": 0, "reduce_or": False, "reduce_and": True, "reduce_prod": 1}[name]


def _reduced_fill(name: str, fill: Fill) -> Fill:
    fill = plain(fill)
    if _is_zero(fill) and name in ("reduce_sum", *_SELECTING):
        return fill
    return fill if name in _SELECTING else None
