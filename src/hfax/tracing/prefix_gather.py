"""The rule of gathers for the beginnings of padded arrays, see `prefixes`: table look-ups, and reads of places in a sequence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hfax.tracing.prefixes import (
    Axis,
    Facts,
    Fill,
    Groups,
    Symbols,
    UnprovenError,
    Value,
    alike,
    by_group,
    join,
    joined,
    known_value,
)


def gather(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.gather: an index into a padded axis must count along an axis of the result, or be known to be before the padding."""
    (value, index), params = values, equation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    shape = [math.prod(a.size for a in g) for g in value.groups]
    paired, checked = _indexed_axes(value, index, numbers, sizes, shape, symbols)
    for dim, along in paired.items():
        value, index = alike(value, dim, index, along, symbols)
    sources = _sources(numbers, len(equation.outvars[0].aval.shape), len(shape))
    by_index = {along: dim for dim, along in paired.items()}
    groups = _groups(value, index, sources, by_index, sizes, shape)
    fixed = tuple(None if any(a.role for a in g) else n for g, n in zip(value.groups, sizes, strict=True))
    key = (repr(numbers), repr(params["mode"]), fixed, tuple(sorted(paired.items())))
    key = (*key, tuple(len(g) for g in value.groups), tuple(len(g) for g in index.groups))
    cut = [i for kind, i in sources if kind == "offset" and sizes[i] != shape[i]]

    def find(kept: tuple[int, ...]) -> Facts:
        of_index = [tuple(a.kept for a in g) for g in index.groups]
        of_value = [tuple(a.kept for a in g) for g in value.groups]
        for part, (kind, i) in zip(by_group(kept, groups), sources, strict=True):
            if kind == "index":
                of_index[i] = part
            dim = by_index.get(i) if kind == "index" else i
            if dim is not None and dim not in cut:
                of_value[dim] = part
        for dim, part in checked.items():
            found = part.at()
            if not (found.low >= 0 and found.high < value.groups[dim][0].kept):
                raise UnprovenError("a place that may be padding is read")
        facts, places = value.at(joined(of_value)), index.at(joined(of_index))
        given, fills = by_group(facts.fills, value.groups), []
        for group, (kind, i) in zip(groups, sources, strict=True):
            dim = by_index.get(i) if kind == "index" else i
            is_same = dim is not None and not cut and not checked and len(given[dim]) == len(group)
            unknown: tuple[Fill, ...] = (None,) * len(group)
            fills.append(given[dim] if is_same and dim is not None else unknown)
        if facts.const is not None:
            return dataclasses.replace(facts, fills=joined(fills))
        lengths = tuple(n for i in cut for n in by_group(kept, groups)[sources.index(("offset", i))])
        symbol = symbols.of("gather", key, lengths, facts.symbol, places.symbol)
        return Facts(symbol, joined(fills), None, facts.low, facts.high)

    return [Value(groups, value.dtype, find)]


def _indexed_axes(
    value: Value, index: Value, numbers: Any, sizes: Sequence[int], shape: Sequence[int], symbols: Symbols
) -> tuple[dict[int, int], dict[int, Value]]:
    """Axes of the operand that go along with axes of the index, and padded ones that are indexed otherwise, with their index."""
    indexed = tuple(numbers.start_index_map)
    parts = _components(index, len(indexed), symbols)
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    checked: dict[int, Value] = {}
    for component, dim in enumerate(indexed):
        if all(axis.role is None for axis in value.groups[dim]):
            continue
        if parts is None or sizes[dim] != 1:
            raise UnprovenError("a padded axis is indexed by something unknown")
        if (along := _counts_along(parts[component], shape[dim])) is not None:
            paired[dim] = along
        elif len(value.groups[dim]) == 1:
            checked[dim] = parts[component]
        else:
            raise UnprovenError("merged axes are indexed")
    return paired, checked


def _sources(numbers: Any, rank: int, operand_rank: int) -> list[tuple[str, int]]:
    """For each axis of the result, the axis of the index or of the operand ("offset") that it is."""
    hidden = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    offsets = dict(zip(numbers.offset_dims, (d for d in range(operand_rank) if d not in hidden), strict=True))
    along = iter(range(rank))
    return [("offset", offsets[out]) if out in offsets else ("index", next(along)) for out in range(rank)]


def _groups(
    value: Value,
    index: Value,
    sources: list[tuple[str, int]],
    by_index: dict[int, int],
    sizes: Sequence[int],
    shape: Sequence[int],
) -> Groups:
    found: list[tuple[Axis, ...]] = []
    for kind, i in sources:
        if kind == "index":
            pair = [index.groups[i], *([value.groups[by_index[i]]] if i in by_index else [])]
            found.append(tuple(join(axes) for axes in zip(*pair, strict=True)))
        elif sizes[i] == shape[i]:
            found.append(value.groups[i])
        elif any(axis.role is not None for axis in value.groups[i]):
            raise UnprovenError("a part of a padded axis is read")
        else:
            found.append((Axis(sizes[i]),))
    return tuple(found)


def _components(index: Value, count: int, symbols: Symbols) -> tuple[Value, ...] | None:
    """The index of each indexed axis; None if they cannot be told apart."""
    if index.known is not None:
        return tuple(known_value(index.known[..., i : i + 1], symbols) for i in range(count))
    if index.parts is not None and len(index.parts) == count:
        return index.parts
    return (index,) if count == 1 else None


def _counts_along(part: Value, size: int) -> int | None:
    """The axis of this size along which a known index is 0, 1, 2, …, equal along all others; None if there is none."""
    array = part.known
    for axis in range(0 if array is None else array.ndim - 1):
        assert array is not None
        counted = np.arange(size).reshape([-1 if i == axis else 1 for i in range(array.ndim)])
        if array.shape[axis] == size and bool((array == counted).all()):
            return axis
    return None
