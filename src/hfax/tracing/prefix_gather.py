"""The rule of gathers for the beginnings of padded arrays, see `prefixes`: table look-ups, and reads of places in a sequence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hfax.tracing.prefixes import Axis, Facts, Symbols, UnprovenError, Value, by_group, join, joined


def gather(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.gather: an index into a padded axis must count along an axis of the result, or be known to be before the padding."""
    value, index = values
    params = equation.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    if any(len(g) > 1 for g in (*value.groups, *index.groups)):
        raise UnprovenError("merged axes are indexed")
    shape = [g[0].size for g in value.groups]
    indexed, collapsed = tuple(numbers.start_index_map), (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    parts = _components(index, len(indexed))
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    checked: list[tuple[int, int]] = []
    for component, dim in enumerate(indexed):
        if value.groups[dim][0].role is None:
            continue
        part = None if parts is None else parts[component]
        if sizes[dim] != 1 or part is None:
            raise UnprovenError("a padded axis is indexed by something unknown")
        if (along := _counts_along(part)) is not None and index.groups[along][0].size == shape[dim]:
            paired[dim] = along
        else:
            checked.append((dim, component))
    free = [d for d in range(len(shape)) if d not in collapsed]
    for d in free:
        if sizes[d] != shape[d] and value.groups[d][0].role is not None:
            raise UnprovenError("a part of a padded axis is read")
    by_index = {along: d for d, along in paired.items()}
    places = iter(range(len(index.groups) - 1))
    offsets = dict(zip(numbers.offset_dims, free, strict=True))
    sources: list[tuple[str, int]] = []
    groups: list[tuple[Axis, ...]] = []
    for out, n in enumerate(equation.outvars[0].aval.shape):
        if out in offsets:
            d = offsets[out]
            sources.append(("offset", d))
            groups.append(value.groups[d] if sizes[d] == shape[d] else (Axis(n),))
        else:
            along = next(places)
            sources.append(("index", along))
            pair = (index.groups[along][0], value.groups[by_index[along]][0]) if along in by_index else (index.groups[along][0],)
            groups.append((join(pair),))
    made = tuple(groups)
    key = (repr(numbers), repr(params["mode"]), tuple(sizes[d] for d in indexed), tuple(sorted(paired.items())))

    def find(kept: tuple[int, ...]) -> Facts:
        wanted = by_group(kept, made)
        of_index = [(a.kept,) for (a,) in index.groups]
        of_value = [(a.kept,) for (a,) in value.groups]
        cut = []
        for part, (kind, i) in zip(wanted, sources, strict=True):
            if kind == "index":
                of_index[i] = part
                if i in by_index:
                    of_value[by_index[i]] = part
            elif sizes[i] == shape[i]:
                of_value[i] = part
            else:
                cut.append((i, part))
        facts, places = value.at(joined(of_value)), index.at(joined(of_index))
        for dim, component in checked:
            assert parts is not None
            found = parts[component].at(joined([*of_index[:-1], *([(1,)] if len(parts[component].groups) == len(index.groups) else [])]))
            if not (found.low >= 0 and found.high < value.groups[dim][0].kept):
                raise UnprovenError("a place that may be padding is read")
        fills = []
        for kind, i in sources:
            d = by_index.get(i) if kind == "index" else i
            fills.append(facts.fills[d] if d is not None and not cut and not checked else None)
        if facts.const is not None and not cut:
            return dataclasses.replace(facts, fills=tuple(fills))
        known = tuple(sorted((d, a) for d, a in paired.items()))
        if not checked and len(paired) == len(indexed) and not cut and _is_identity(paired, sources, offsets, len(shape), parts):
            return dataclasses.replace(facts, fills=tuple(fills))
        symbol = symbols.of("gather", key, known, tuple(cut), facts.symbol, places.symbol)
        return Facts(symbol, tuple(fills), None, facts.low, facts.high)

    return [Value(made, value.dtype, find)]


def _is_identity(paired: Any, sources: Any, offsets: Any, rank: int, parts: Any) -> bool:
    """Whether the gather returns its operand."""
    dims = [paired_dim for kind, i in sources for paired_dim in ([d for d, a in paired.items() if a == i] if kind == "index" else [i])]
    return parts is not None and dims == list(range(rank))


def _components(index: Value, count: int) -> tuple[Value, ...] | None:
    """The index of each indexed axis; None if they cannot be told apart."""
    if index.parts is not None and len(index.parts) == count:
        return index.parts
    if index.known is not None:
        return tuple(_known_part(index, i) for i in range(count))
    return (index,) if count == 1 else None


def _known_part(index: Value, i: int) -> Value:
    from hfax.tracing.prefixes import known_value

    assert index.known is not None
    return known_value(index.known[..., i : i + 1], Symbols())


def _counts_along(part: Value) -> int | None:
    """The axis along which a known index is 0, 1, 2, …, equal along all others; None if there is none."""
    array = part.known
    if array is None or array.ndim < 2:
        return None
    for axis in range(array.ndim - 1):
        n = array.shape[axis]
        counted = np.arange(n).reshape([n if i == axis else 1 for i in range(array.ndim)])
        if n > 1 and bool((array == counted).all()):
            return axis
    return None

