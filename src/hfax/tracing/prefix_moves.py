"""Rules of operations that move numbers (slices, gathers, reshapes, …) for the beginnings of padded arrays, see `prefixes`."""

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
    aligned,
    by_group,
    joined,
    known_value,
    plain,
    take,
)


def broadcast(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.broadcast_in_dim."""
    return [broadcasted(values[0], equation.params["shape"], equation.params["broadcast_dimensions"], symbols)]


def broadcasted(value: Value, shape: Sequence[int], places: Sequence[int], symbols: Symbols) -> Value:
    """The array with further axes, and with axes of length 1 repeated; new ones are not padded and fit any."""
    sources: list[int | None] = [None] * len(shape)
    for index, place in enumerate(places):
        if math.prod(a.size for a in value.groups[index]) == shape[place]:
            sources[place] = index
    groups = tuple(
        (Axis(n),) if source is None else value.groups[source] for n, source in zip(shape, sources, strict=True)
    )
    layout = (tuple(places), tuple(sources), tuple(len(g) for g in value.groups))

    def find(kept: tuple[int, ...]) -> Facts:
        parts, inner = by_group(kept, groups), [tuple(a.kept for a in g) for g in value.groups]
        for place, source in enumerate(sources):
            if source is not None:
                inner[source] = parts[place]
        facts = value.at(joined(inner))
        given = by_group(facts.fills, value.groups)
        fills = joined([(facts.const,) if s is None else given[s] for s in sources])
        if facts.const is not None:
            return dataclasses.replace(facts, fills=fills)
        symbol = symbols.of("broadcast", layout, facts.symbol)
        return Facts(symbol, fills, None, facts.low, facts.high)

    return Value(groups, value.dtype, find)


def transpose(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.transpose."""
    (value,), order = values, equation.params["permutation"]
    groups = tuple(value.groups[i] for i in order)

    def find(kept: tuple[int, ...]) -> Facts:
        parts = dict(zip(order, by_group(kept, groups), strict=True))
        facts = value.at(joined([parts[i] for i in range(len(order))]))
        given = by_group(facts.fills, value.groups)
        fills = joined([given[i] for i in order])
        if facts.const is not None:
            return dataclasses.replace(facts, fills=fills)
        places = by_group(tuple(range(len(facts.fills))), value.groups)
        symbol = symbols.of("transpose", joined([places[i] for i in order]), facts.symbol)
        return Facts(symbol, fills, None, facts.low, facts.high)

    return [Value(groups, value.dtype, find)]


def reshape(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.reshape: axes may be merged; only unpadded ones may be divided."""
    value = values[0]
    groups, sources, plan = _regrouped(value.axes, equation.outvars[0].aval.shape)
    axes = tuple(a for g in groups for a in g)

    def find(kept: tuple[int, ...]) -> Facts:
        inner = list(value.kept)
        for n, source in zip(kept, sources, strict=True):
            if source is not None:
                inner[source] = n
        facts = value.at(tuple(inner))
        fills = tuple(facts.const if s is None else facts.fills[s] for s in sources)
        if facts.const is None and plan is not None:
            facts = dataclasses.replace(facts, symbol=symbols.of("reshape", plan, facts.symbol))
        facts = dataclasses.replace(facts, fills=fills)
        whole = [n if s is not None else a.size for a, n, s in zip(axes, kept, sources, strict=True)]
        if tuple(whole) == kept:
            return facts
        return take(facts, kept, [Axis(n) for n in whole], symbols)

    return [Value(groups, value.dtype, find)]


def _regrouped(axes: Sequence[Axis], shape: Sequence[int]) -> tuple[Groups, list[int | None], Any]:
    """The axes of a reshaped array.

    Returns:
        For each axis of the result, those that it is made of; for each of these, the axis of the operand that it is, or None if it
        is a part of one, or a merger; and what the reshape does besides merging, None for nothing.
    """
    rest = [(axis, index, "axis") for index, axis in enumerate(axes) if axis.size != 1 or axis.role is not None]
    dropped = len(axes) - len(rest)
    groups: list[list[tuple[Axis, int, Any]]] = []
    for n in shape:
        group: list[tuple[Axis, int, Any]] = []
        if n == 1 and not (rest and rest[0][0].size == 1):
            group.append((Axis(1), -1, "one"))
        else:
            size = 1
            while size < n or not group:
                axis, index, kind = rest.pop(0)
                if axis.size > (need := n // size):
                    if axis.role is not None or axis.size % need:
                        raise UnprovenError("a reshape divides a padded axis")
                    rest.insert(0, (Axis(axis.size // need), index, "part"))
                    axis, kind = Axis(need), "part"
                group.append((axis, index, kind))
                size *= axis.size
            if size != n:
                raise UnprovenError("a reshape divides a padded axis")
        groups.append(group)
    if rest and groups:
        groups[-1] += rest
    elif rest:
        raise UnprovenError("a reshape drops a padded axis")
    plan = [[(kind, index, axis.size if axis.role is None else None) for axis, index, kind in g] for g in groups]
    order = [index for g in groups for _, index, kind in g if kind == "axis"]
    is_plain = not dropped and len(order) == len(axes)
    made: list[list[tuple[Axis, int | None]]] = []
    for group in groups:
        merged: list[tuple[Axis, int | None]] = []
        for axis, index, kind in group:
            if merged and axis.role is None and merged[-1][0].role is None:
                merged[-1], is_plain = (Axis(merged[-1][0].size * axis.size), None), False
            else:
                merged.append((axis, index if kind == "axis" else None))
        made.append(merged)
    found = tuple(tuple(axis for axis, _ in g) for g in made)
    sources = [source for g in made for _, source in g]
    key = (
        None
        if is_plain
        else repr([[x if x[0] != "axis" or axes[x[1]].role is None else x[:2] for x in g] for g in plan])
    )
    return found, sources, _without_sizes(plan, axes) if key is not None else None


def _without_sizes(plan: Any, axes: Sequence[Axis]) -> str:
    """The plan as text; the sizes of whole axes are left out, which their lengths tell."""
    return repr([[x[:2] if x[0] == "axis" else x for x in group] for group in plan])


def slice_(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.slice."""
    params, value = equation.params, values[0]
    strides = params["strides"] or (1,) * len(value.groups)
    return [sliced(value, params["start_indices"], params["limit_indices"], strides, symbols)]


def sliced(value: Value, starts: Any, limits: Any, strides: Any, symbols: Symbols) -> Value:
    """The part of an array between two places on each axis."""
    groups, cuts = list(value.groups), {}
    for i, (start, limit, stride) in enumerate(zip(starts, limits, strides, strict=True)):
        size = math.prod(a.size for a in value.groups[i])
        if (start, limit, stride) == (0, size, 1):
            continue
        if len(value.groups[i]) > 1:
            raise UnprovenError("a part of merged axes is read")
        (axis,) = value.groups[i]
        if axis.role is None:
            groups[i] = (Axis(-(-(limit - start) // stride)),)
        elif 2 * (limit - start) > size:
            if stride != 1 or (kept := axis.kept - start - (size - limit)) < 1:
                raise UnprovenError("every other place of a padded axis is read")
            groups[i] = (Axis(limit - start, axis.role, kept),)
        elif limit > axis.kept:
            raise UnprovenError("a place at the end is read, which padding moves")
        else:
            groups[i] = (Axis(-(-(limit - start) // stride)),)
        cuts[i] = (start, limit, stride)
    made = tuple(groups)

    def find(kept: tuple[int, ...]) -> Facts:
        parts, inner = by_group(kept, made), []
        for i, group in enumerate(value.groups):
            if i not in cuts:
                inner.append(parts[i])
            elif group[0].role is not None:
                inner.append((group[0].kept,))
            else:
                start, _, stride = cuts[i]
                inner.append((min(start + stride * (parts[i][0] - 1) + 1, group[0].size),))
        facts = value.at(joined(inner))
        fills = [list(f) for f in by_group(facts.fills, value.groups)]
        done = []
        for i, (start, limit, stride) in cuts.items():
            axis = value.groups[i][0]
            if axis.role is not None:
                fills[i] = [plain(fills[i][0]) if limit == axis.size else None]
            if axis.role is not None or start or stride > 1:
                done.append((i, start, stride, parts[i][0]))
        fills = joined(fills)
        if facts.const is not None or not done:
            return dataclasses.replace(facts, fills=fills)
        symbol = symbols.of("slice", tuple(done), tuple(len(g) for g in made), facts.symbol)
        return Facts(symbol, fills, None, facts.low, facts.high)

    return Value(made, value.dtype, find)


def split_(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.split."""
    value, at = values[0], equation.params["axis"]
    shape = [math.prod(a.size for a in g) for g in value.groups]
    found, start = [], 0
    for size in equation.params["sizes"]:
        starts, limits = [0] * len(shape), list(shape)
        starts[at], limits[at] = start, start + size
        found.append(sliced(value, starts, limits, [1] * len(shape), symbols))
        start += size
    return found


def concatenate(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.concatenate: padding may be at the end of the last array only."""
    return _concatenated(equation.params["dimension"], values, symbols)


def stack(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.stack: a concatenation along a new axis."""
    axis = equation.params["axis"]
    return _concatenated(axis, [_with_axis(value, axis, symbols) for value in values], symbols)


def _with_axis(value: Value, at: int, symbols: Symbols) -> Value:
    """The value with a new axis of length 1."""
    if value.known is not None:
        return known_value(np.expand_dims(value.known, at), symbols)
    place = sum(len(group) for group in value.groups[:at])

    def find(kept: tuple[int, ...]) -> Facts:
        facts = value.at((*kept[:place], *kept[place + 1 :]))
        fills = (*facts.fills[:place], facts.const, *facts.fills[place:])
        symbol = facts.symbol if facts.const is not None else symbols.of("axis", place, facts.symbol)
        return dataclasses.replace(facts, symbol=symbol, fills=fills)

    return Value((*value.groups[:at], (Axis(1),), *value.groups[at:]), value.dtype, find)


def _concatenated(at: int, values: list[Value], symbols: Symbols) -> list[Value]:
    made, groups = aligned(values, symbols, apart=at)
    if any(len(v.groups[at]) > 1 for v in made):
        raise UnprovenError("merged axes are concatenated")
    ends = [v.groups[at][0] for v in made]
    if any(axis.role is not None for axis in ends[:-1]):
        raise UnprovenError("something is appended to a padded axis")
    total, last = sum(a.size for a in ends), ends[-1]
    axis = Axis(total, last.role, total - last.size + last.kept if last.role is not None else -1)
    groups = (*groups[:at], (axis,), *groups[at + 1 :])
    sizes = tuple(a.size for a in (ends if last.role is None else ends[:-1]))
    whole_axes = [a for g in groups for a in g]
    place = sum(len(g) for g in groups[:at])

    def facts_of(value: Value, kept: tuple[int, ...], n: int) -> Facts:
        return value.at((*kept[:place], n, *kept[place + 1 :]))

    def find(kept: tuple[int, ...]) -> Facts:
        if kept[place] <= ends[0].size and ends[0].role is None:
            return dataclasses.replace(facts_of(made[0], kept, kept[place]), fills=(None,) * len(kept))
        facts = [facts_of(v, kept, a.kept) for v, a in zip(made, ends, strict=True)]
        fills: list[Fill] = [
            f[0] if all(x == f[0] for x in f) else None for f in zip(*(f.fills for f in facts), strict=True)
        ]
        fills[place] = plain(facts[-1].fills[place]) if last.role is not None else None
        low, high = min(f.low for f in facts), max(f.high for f in facts)
        if facts[0].const is not None and all(f.const == facts[0].const for f in facts):
            return dataclasses.replace(facts[0], fills=tuple(fills))
        symbol = symbols.of("concatenate", at, tuple(len(g) for g in groups), sizes, tuple(f.symbol for f in facts))
        whole = Facts(symbol, tuple(fills), None, low, high)
        if kept[place] == axis.kept:
            return whole
        wanted = [
            Axis(a.size) if i == place else Axis(n) for i, (a, n) in enumerate(zip(whole_axes, kept, strict=True))
        ]
        return take(whole, kept, wanted, symbols)

    is_list = at == len(groups) - 1 and all(a == Axis(1) for a in ends)
    return [Value(groups, values[0].dtype, find, parts=tuple(made) if is_list else None)]


def update(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.dynamic_update_slice at a known place: axes are written whole, but for one without padding."""
    base, new, *starts = values
    shapes = [variable.aval.shape for variable in equation.invars[:2]]
    partly = [i for i, (whole, part) in enumerate(zip(*shapes, strict=True)) if whole != part]
    if not partly:
        return [new]
    at, written_at = partly[0], starts[partly[0]].known
    if len(partly) > 1 or written_at is None:
        raise UnprovenError("an array is written in part")
    if any(len(v.groups[at]) > 1 or v.groups[at][0].role is not None for v in (base, new)):
        raise UnprovenError("a padded axis is written in part")
    made, groups = aligned([base, new], symbols, apart=at)
    place, size = sum(len(g) for g in groups[:at]), base.groups[at][0].size
    start = max(0, min(int(written_at), size - new.groups[at][0].size))

    def find(kept: tuple[int, ...]) -> Facts:
        facts = [v.at((*kept[:place], v.groups[at][0].size, *kept[place + 1 :])) for v in made]
        fills = [a if a == b else None for a, b in zip(*(f.fills for f in facts), strict=True)]
        fills[place] = None
        symbol = symbols.of("update", at, start, tuple(len(g) for g in groups), *(f.symbol for f in facts))
        low, high = min(f.low for f in facts), max(f.high for f in facts)
        wanted = [Axis(size) if i == place else Axis(n) for i, n in enumerate(kept)]
        return take(Facts(symbol, tuple(fills), None, low, high), kept, wanted, symbols)

    return [Value(groups, base.dtype, find)]


def tile(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.tile: a repeated axis is merged with a new one before it, which fits any."""
    value, counts = values[0], equation.params["reps"]
    repeated = {i for i, n in enumerate(counts) if n > 1}
    groups = tuple(((Axis(counts[i]), *g) if i in repeated else g) for i, g in enumerate(value.groups))

    def find(kept: tuple[int, ...]) -> Facts:
        parts = by_group(kept, groups)
        facts = value.at(joined([part[1:] if i in repeated else part for i, part in enumerate(parts)]))
        given = by_group(facts.fills, value.groups)
        fills = joined([(facts.const, *f) if i in repeated else f for i, f in enumerate(given)])
        if facts.const is not None:
            return dataclasses.replace(facts, fills=fills)
        return Facts(symbols.of("tile", tuple(sorted(repeated)), facts.symbol), fills, None, facts.low, facts.high)

    return [Value(groups, value.dtype, find)]


def pad(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.pad: after the end of a padded axis only where its padding has the same value."""
    value, filler = values
    groups, sides = list(value.groups), {}
    for i, (low, high, inner) in enumerate(equation.params["padding_config"]):
        if not (low or high or inner):
            continue
        if len(value.groups[i]) > 1 or (value.groups[i][0].role is not None and (inner or low < 0)):
            raise UnprovenError("merged axes are padded")
        axis = value.groups[i][0]
        size = axis.size + low + high + inner * (axis.size - 1)
        groups[i] = (Axis(size, axis.role, axis.kept + low + high if axis.role is not None else -1),)
        sides[i] = (low, high, inner)
    made = tuple(groups)
    axes = [a for g in made for a in g]

    def find(kept: tuple[int, ...]) -> Facts:
        const = filler.at(()).const
        parts = by_group(kept, made)
        inner = [tuple(a.kept for a in g) if i in sides else parts[i] for i, g in enumerate(value.groups)]
        facts = value.at(joined(inner))
        fills = [list(f) for f in by_group(facts.fills, value.groups)]
        for i, (_, high, _) in sides.items():
            (axis,) = value.groups[i]
            fills[i] = [plain(fills[i][0])]
            is_same = fills[i][0] is not None and fills[i][0] == const
            if axis.kept < axis.size and high > 0 and not is_same:
                raise UnprovenError("something is appended to a padded axis")
            if high < 0:
                fills[i] = [None]
        fills = joined(fills)
        if facts.const is not None and facts.const == const:
            return dataclasses.replace(facts, fills=fills)
        whole = Facts(symbols.of("pad", tuple(sides.items()), filler.at(()).symbol, facts.symbol), fills)
        wanted = [
            Axis(a.kept) if _group_of(i, made) in sides else Axis(n)
            for i, (a, n) in enumerate(zip(axes, kept, strict=True))
        ]
        return take(whole, kept, wanted, symbols)

    return [Value(made, value.dtype, find)]


def _group_of(index: int, groups: Groups) -> int:
    return [i for i, g in enumerate(groups) for _ in g][index]


def cumulative(equation: Any, values: list[Value], symbols: Symbols) -> list[Value]:
    """lax.cumsum and its kin: what stands at the end does not reach what is before."""
    value, at, name = values[0], equation.params["axis"], equation.primitive.name
    if len(value.groups[at]) > 1 or (equation.params["reverse"] and value.groups[at][0].role is not None):
        raise UnprovenError(f"{name} reads padding")
    place = sum(len(g) for g in value.groups[:at])

    def find(kept: tuple[int, ...]) -> Facts:
        inner = kept
        if equation.params["reverse"]:
            inner = (*kept[:place], value.axes[place].size, *kept[place + 1 :])
        facts = value.at(inner)
        fills = tuple(
            0 if plain(f) == 0 and i != place and name == "cumsum" else None for i, f in enumerate(facts.fills)
        )
        found = Facts(symbols.of(name, at, equation.params["reverse"], facts.symbol), fills)
        found = dataclasses.replace(found, low=0.0 if facts.low >= 0 and name == "cumsum" else -math.inf)
        return take(found, kept, [Axis(n) for n in inner], symbols)

    return [Value(value.groups, equation.outvars[0].aval.dtype, find)]
