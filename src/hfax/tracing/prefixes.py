"""What is known about an array of a padded program: that it begins with the array that the program without padding has.

A program is read with symbols in place of numbers: two programs that give an output the same symbol compute the same numbers. Some
axes of the arrays are padded at the end; a symbol stands for the part before the padding, and `Fill` is what is known of the
padding itself. `prefix_rules` has the rules of the operations, and `padding_proof` compares two programs. This module does not know
models.

Two assumptions, as in the modelling code itself: weights and what is computed from them are finite (so that 0 times padding is 0),
and scores are small beside the value that stands for a masked one (-10000 or less, not infinite).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np


class UnprovenError(Exception):
    """It cannot be shown that an array does not depend on padding; the text says where it may."""

    has_place = False

    def at(self, place: Callable[[], str]) -> UnprovenError:
        """The error with the place where it arose, unless it has one."""
        if self.has_place:
            return self
        error = UnprovenError(f"{self} ({place()})")
        error.has_place = True
        return error


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of an array, or one of those that a reshape merged into an axis.

    Args:
        size: length in the program, with padding.
        role: name of the padded size ("rows", "length", …); None: the axis is not padded, and may be cut to any beginning.
        kept: length without padding; the size if there is no role.
    """

    size: int
    role: str | None = None
    kept: int = -1

    def __post_init__(self) -> None:
        if self.role is None or self.kept < 0:
            object.__setattr__(self, "kept", self.size)


@dataclasses.dataclass(frozen=True)
class Masked:
    """A masked score.

    Args:
        bound: it is at most that, far below all others.
        is_seen: some score before the padding is not masked, or the result for a query that sees no key is 0.
    """

    bound: float
    is_seen: bool = False


@dataclasses.dataclass(frozen=True)
class Mask:
    """The padding of a mask.

    Args:
        value: of the padding.
        first: the value at the beginning of the axis; None: unknown.
        some: another value that is somewhere before the padding, wherever on the other axes one looks; None: unknown.
    """

    value: bool | int | float
    first: bool | int | float | None
    some: bool | int | float | None = None


Fill = bool | int | float | Masked | Mask | None
"""The padding's one value; None: unknown."""
FINITE = 1e300
"""Bounds a number of which only that is known: weights and inputs are finite, and so is what is computed from them."""
LARGEST_MASK = -9000.0
"""-10000 in bfloat16 is -9984."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about the beginning of an array.

    Args:
        symbol: equal for equal numbers.
        fills: padding at the end of each axis, where all other axes are before theirs.
        const: the one value of all numbers.
        low: no number is smaller; -inf only if numbers may be infinite.
        high: no number is larger; inf only if numbers may be infinite.
    """

    symbol: int
    fills: tuple[Fill, ...] = ()
    const: Any = None
    low: float = -FINITE
    high: float = FINITE


class Symbols:
    """The numbers of symbols, shared by the two programs that are compared."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, *key: Hashable) -> int:
        """The symbol of an operation on symbols."""
        return self._known.setdefault(key, len(self._known))

    def of_const(self, value: Any, dtype: Any) -> int:
        """The symbol of an array of one value, of any shape."""
        return self.of("const", str(dtype), repr(np.asarray(value, dtype).item()))


Groups = tuple[tuple[Axis, ...], ...]


class Value:
    """An array of the program.

    Args:
        groups: for each axis of the array, the axes that it is made of.
        dtype: of the array.
        find: facts about the array cut to a beginning, given by the length of each axis of each group.
        known: the array itself, if it does not depend on inputs.
        parts: for a concatenation on the last axis, the arrays, each of length 1 there.
    """

    def __init__(
        self,
        groups: Groups,
        dtype: Any,
        find: Callable[[tuple[int, ...]], Facts],
        *,
        known: np.ndarray | None = None,
        parts: tuple[Value, ...] | None = None,
    ) -> None:
        self.groups, self.dtype, self.known, self.parts = groups, dtype, known, parts
        self._find = find
        self._place: Callable[[], str] | None = None
        self._found: dict[tuple[int, ...], Facts | UnprovenError] = {}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes, merged ones one by one."""
        return tuple(axis for group in self.groups for axis in group)

    @property
    def kept(self) -> tuple[int, ...]:
        """The length of each axis without padding."""
        return tuple(axis.kept for axis in self.axes)

    @property
    def is_padded(self) -> bool:
        """Whether any axis has a role."""
        return any(axis.role is not None for axis in self.axes)

    def at(self, kept: tuple[int, ...] | None = None) -> Facts:
        """Facts about the array cut to these lengths; by default, those without padding.

        Raises:
            UnprovenError: its numbers may depend on padding.
        """
        kept = self.kept if kept is None else kept
        if kept not in self._found:
            try:
                self._found[kept] = self._find(kept)
            except UnprovenError as error:
                self._found[kept] = error if self._place is None else error.at(self._place)
        if isinstance(found := self._found[kept], UnprovenError):
            raise found
        return found

    def with_place(self, place: Callable[[], str]) -> Value:
        """The value; its own errors name this place."""
        self._place = self._place or place
        return self


def flexible(shape: Sequence[int]) -> Groups:
    """Groups of an array without padding."""
    return tuple((Axis(n),) for n in shape)


def known_value(array: np.ndarray, symbols: Symbols) -> Value:
    """The value of an array that does not depend on inputs."""
    return _known(array, flexible(array.shape), array, symbols)


def _known(array: np.ndarray, groups: Groups, detailed: np.ndarray, symbols: Symbols) -> Value:
    def find(kept: tuple[int, ...]) -> Facts:
        part = detailed[tuple(slice(n) for n in kept)]
        const = _only(part)
        if const is not None:
            symbol = symbols.of_const(const, array.dtype)
        else:
            digest = hashlib.sha256(np.ascontiguousarray(part).tobytes()).hexdigest()
            symbol = symbols.of("array", part.shape, str(array.dtype), digest)
        fills = tuple(_fill_of(detailed, kept, i) for i in range(len(kept)))
        return Facts(symbol, fills, const, *_limits(part))

    return Value(groups, array.dtype, find, known=array)


def _limits(array: np.ndarray) -> tuple[float, float]:
    if not array.size or not _is_number(array.dtype):
        return -math.inf, math.inf
    low, high = float(array.min()), float(array.max())
    return (low, high) if low <= high else (-math.inf, math.inf)  # not a number


def _is_number(dtype: Any) -> bool:
    return dtype.kind in "biuf" or dtype.name == "bfloat16"


def _fill_of(array: np.ndarray, kept: tuple[int, ...], axis: int) -> Fill:
    places = [slice(n) for n in kept]
    found = _only(array[(*places[:axis], slice(kept[axis], None), *places[axis + 1 :])])
    first = _only(array[(*places[:axis], slice(1), *places[axis + 1 :])])
    if found is None or found == first:
        return found
    before = array[tuple(places)]
    some = _only(before[before != found]) if bool((before != found).any(axis=axis).all()) else None
    return found if first is None and some is None else Mask(found, first, some)


def plain(fill: Fill) -> bool | int | float | Masked | None:
    """The padding's value, where nothing is known about what stands before."""
    return fill.value if isinstance(fill, Mask) else fill


def _only(array: np.ndarray) -> Any:
    """The one value of all elements; None if there is none."""
    if not array.size or not _is_number(array.dtype):
        return None
    first = array.flat[0]
    return first.item() if bool((array == first).all()) else None


def take(full: Facts, kept: tuple[int, ...], axes: Sequence[Axis], symbols: Symbols) -> Facts:
    """Facts about the beginning of an array, from those about the whole."""
    if full.const is not None:
        return dataclasses.replace(full, fills=(full.const,) * len(kept))
    cuts = tuple((i, n) for i, (n, axis) in enumerate(zip(kept, axes, strict=True)) if n != axis.kept)
    if not cuts:
        return full
    fills = tuple(None if any(c == i for c, _ in cuts) else fill for i, fill in enumerate(full.fills))
    return Facts(symbols.of("take", full.symbol, cuts), fills, None, full.low, full.high)


def cut_from_whole(groups: Groups, dtype: Any, whole: Callable[[], Facts], symbols: Symbols) -> Value:
    """A value whose beginnings are cut from facts about the whole."""
    axes = tuple(axis for group in groups for axis in group)
    return Value(groups, dtype, lambda kept: take(whole(), kept, axes, symbols))


def split(value: Value, position: int, sizes: Sequence[int], symbols: Symbols) -> Value:
    """The value with one unpadded axis (of a group of one) seen as several.

    Raises:
        UnprovenError: the axis is padded.
    """
    (axis,) = value.groups[position]
    if axis.role is not None:
        raise UnprovenError("a padded axis is divided")
    groups = (*value.groups[:position], tuple(Axis(n) for n in sizes), *value.groups[position + 1 :])
    first = sum(len(group) for group in value.groups[:position])
    count = len(sizes)
    if value.known is not None:
        detailed_shape = [a.size for group in groups for a in group]
        return _known(value.known, groups, value.known.reshape(detailed_shape), symbols)

    def find(kept: tuple[int, ...]) -> Facts:
        inner = kept[first : first + count]
        before, after = kept[:first], kept[first + count :]
        facts = value.at((*before, axis.size, *after))
        middle = facts.fills[first : first + 1] * count
        facts = dataclasses.replace(facts, fills=(*facts.fills[:first], *middle, *facts.fills[first + 1 :]))
        if inner == tuple(sizes):
            return facts
        if value.at((*before, 1, *after)).symbol == facts.symbol:  # the axis is a broadcast one: all alike
            middle = (facts.const,) * count
            return dataclasses.replace(facts, fills=(*facts.fills[:first], *middle, *facts.fills[first + count :]))
        axes = tuple(a for group in groups for a in group)
        return take(facts, kept, [dataclasses.replace(a, kept=a.size) if a.role is None else a for a in axes], symbols)

    return Value(groups, value.dtype, find)


def aligned(values: Sequence[Value], symbols: Symbols, *, apart: int | None = None) -> tuple[list[Value], Groups]:
    """Values of one shape with the same division of axes, and the axes of their elementwise combination.

    Args:
        values: of one shape.
        symbols: of the programs.
        apart: an axis that may differ, and is left as it is.

    Raises:
        UnprovenError: padded and unpadded axes meet in a way that is not understood.
    """
    made, found = list(values), []
    for position in range(len(values[0].groups)):
        if position == apart:
            found.append(made[0].groups[position])
            continue
        longest = max((v.groups[position] for v in made), key=len)
        for index, value in enumerate(made):
            if len(value.groups[position]) < len(longest):
                if len(value.groups[position]) != 1:
                    raise UnprovenError("merged axes of different kinds meet")
                made[index] = split(value, position, [a.size for a in longest], symbols)
        found.append(tuple(join(axes) for axes in zip(*(v.groups[position] for v in made), strict=True)))
    return made, tuple(found)


def alike(left: Value, i: int, right: Value, j: int, symbols: Symbols) -> tuple[Value, Value]:
    """Two values with one axis of each divided in the same way."""
    a, b = left.groups[i], right.groups[j]
    if len(a) < len(b) and len(a) == 1:
        return split(left, i, [axis.size for axis in b], symbols), right
    if len(b) < len(a) and len(b) == 1:
        return left, split(right, j, [axis.size for axis in a], symbols)
    if len(a) != len(b):
        raise UnprovenError("merged axes of different kinds meet")
    return left, right


def join(axes: Sequence[Axis]) -> Axis:
    """The axis on which axes of several arrays meet.

    Raises:
        UnprovenError: they are padded differently.
    """
    roles = {axis for axis in axes if axis.role is not None}
    if len({axis.size for axis in axes}) > 1 or len(roles) > 1:
        raise UnprovenError("axes with different padding meet")
    return next(iter(roles), axes[0])


def by_group(items: Sequence[Any], groups: Groups) -> list[tuple[Any, ...]]:
    """What belongs to each axis of an array, from one item for each of the axes that they are made of."""
    rest = iter(items)
    return [tuple(next(rest) for _ in group) for group in groups]


def joined(parts: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """The inverse of `by_group`."""
    return tuple(item for part in parts for item in part)
