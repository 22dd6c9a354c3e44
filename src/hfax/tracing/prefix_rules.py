"""Reads a traced program for the beginnings of its padded arrays, operation by operation, see `prefixes`.

An operation without a rule may read unpadded arrays only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Literal

from hfax.kernels.experts import ROWS_BY_EXPERT
from hfax.tracing import prefix_arithmetic, prefix_moves
from hfax.tracing.prefix_gather import gather
from hfax.tracing.prefixes import Facts, Symbols, UnprovenError, Value, cut_from_whole, flexible, known_value

Rule = Callable[[Any, list[Value], Symbols], list[Value]]
_CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}  # fmt: skip
_RULES: dict[str, Rule] = {
    "broadcast_in_dim": prefix_moves.broadcast,
    "transpose": prefix_moves.transpose,
    "reshape": prefix_moves.reshape,
    "squeeze": prefix_moves.reshape,
    "expand_dims": prefix_moves.reshape,
    "concatenate": prefix_moves.concatenate,
    "stack": prefix_moves.stack,
    "dynamic_update_slice": prefix_moves.update,
    "slice": prefix_moves.slice_,
    "split": prefix_moves.split_,
    "tile": prefix_moves.tile,
    "pad": prefix_moves.pad,
    "gather": gather,
    "dot_general": prefix_arithmetic.dot,
    "conv_general_dilated": prefix_arithmetic.convolve,
    "top_k": prefix_arithmetic.largest,
    "optimization_barrier": lambda equation, values, symbols: list(values),
    **dict.fromkeys(prefix_arithmetic.ELEMENTWISE, prefix_arithmetic.elementwise),
    **dict.fromkeys(prefix_arithmetic.REDUCTIONS, prefix_arithmetic.reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), prefix_moves.cumulative),
}


_FUNCTIONS: dict[str, Rule] = {ROWS_BY_EXPERT: prefix_arithmetic.rows_by_expert}
"""Of hfax's own functions that are one operation, by their names in traces."""


@dataclasses.dataclass(frozen=True)
class Broken:
    """An array that may depend on padding, and where in the program that begins."""

    why: str


def read_program(closed: Any, inputs: Sequence[Value | Broken], symbols: Symbols) -> list[Value | Broken]:
    """The outputs of a `ClosedJaxpr`.

    Args:
        closed: the program.
        inputs: of it.
        symbols: shared with the program to compare with.
    """
    seen: dict[Any, Value | Broken] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    for variable, array in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        seen[variable] = known_value(np.asarray(array), symbols)

    def look_up(atom: Any) -> Value | Broken:
        if isinstance(atom, Literal):
            shaped: Any = atom.aval
            return known_value(np.asarray(atom.val, shaped.dtype), symbols)
        return seen[atom]

    for equation in closed.jaxpr.eqns:
        outputs = _read(equation, [look_up(atom) for atom in equation.invars], symbols)
        seen.update(zip(equation.outvars, outputs, strict=True))
    return [look_up(atom) for atom in closed.jaxpr.outvars]


def _read(equation: Any, inputs: list[Value | Broken], symbols: Symbols) -> Sequence[Value | Broken]:
    name, params = equation.primitive.name, equation.params
    if name in _CALLS and params.get("name") not in _FUNCTIONS:
        inner = next(v for n in ("jaxpr", "call_jaxpr", "fun_jaxpr") if (v := params.get(n)) is not None)
        return read_program(inner if hasattr(inner, "consts") else ClosedJaxpr(inner, ()), inputs, symbols)
    if (broken := next((v for v in inputs if isinstance(v, Broken)), None)) is not None:
        return [broken] * len(equation.outvars)
    values = [v for v in inputs if isinstance(v, Value)]
    try:
        return [_named(value, equation) for value in _apply(equation, values, symbols)]
    except UnprovenError as error:
        return [Broken(f"{error} ({_place(equation)})")] * len(equation.outvars)


def _apply(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    arrays = [v.known for v in values if v.known is not None]
    if len(arrays) == len(values) and (array := prefix_arithmetic.computed(equation, arrays)) is not None:
        return [known_value(array, symbols)]
    name = equation.primitive.name
    if (rule := _FUNCTIONS.get(equation.params["name"]) if name in _CALLS else _RULES.get(name)) is not None:
        return rule(equation, values, symbols)
    if any(v.is_padded for v in values):
        raise UnprovenError(f"hfax does not know what {equation.primitive.name} reads")
    return _unpadded(equation, values, symbols)


def _unpadded(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """Any operation over unpadded arrays."""
    key = (equation.primitive.name, repr(equation.params), tuple(tuple(a.size for a in v.axes) for v in values))

    def make(index: int, shaped: Any) -> Value:
        def whole() -> Facts:
            read = tuple(v.at().symbol for v in values)
            return Facts(symbols.of(index, key, read), (None,) * len(shaped.shape))

        return cut_from_whole(flexible(shaped.shape), shaped.dtype, whole, symbols)

    return [make(index, variable.aval) for index, variable in enumerate(equation.outvars)]


def _named(value: Value, equation: Any) -> Value:
    """The value; its errors name the line of the operation that first meets the padding."""
    return value.with_place(lambda: _place(equation))


def _place(equation: Any) -> str:
    """The line of modelling code, else of any code, that an operation comes from."""
    frames = list(source_info_util.user_frames(equation.source_info.traceback))
    own = [
        f
        for f in frames
        if "/hfax/" not in f.file_name and "torchax" not in f.file_name and "/torch/" not in f.file_name
    ]
    frame = next(iter(own or frames), None)
    return "unknown line" if frame is None else f"{frame.file_name}:{frame.start_line} in {frame.function_name}"
