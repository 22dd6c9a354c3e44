"""Whether a padded program's outputs begin with those of the program without padding, proved from both traces.

Both programs are read with symbols in place of numbers (`prefixes`). Where an output gets the same symbol from both, what they
compute is the same, and the difference of the two shapes tells which axes of the output to cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hfax.tracing.prefix_rules import Broken, read_program
from hfax.tracing.prefixes import Axis, Facts, Fill, Symbols, UnprovenError, Value, flexible, known_value, take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Padded:
    """An input that is padded.

    Args:
        roles: for each axis, the name of the size that it has; None: it is not padded.
        fills: for each axis, the value in its padding; None: any.
        low: no value is smaller.
        known: the values without and with padding, if they are known.
    """

    roles: tuple[str | None, ...]
    fills: tuple[Fill, ...]
    low: float = float("-inf")
    known: tuple[np.ndarray, np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class Cut:
    """One of the axes that an output's axis is made of.

    Args:
        role: the size that it has; None: its length is `size`.
        size: its length, or what it exceeds the size by.
    """

    role: str | None
    size: int


Cuts = tuple[tuple[Cut, ...], ...]
"""For each axis of an output, the axes that it is made of."""


def prove(
    exact: Any,
    padded: Any,
    inputs: Sequence[tuple[str, Padded | None]],
    sizes: Mapping[str, tuple[int, int]],
) -> list[Cuts]:
    """The axes of each output.

    Args:
        exact: the `ClosedJaxpr` without padding; its inputs have the names of the padded one's, some may be missing (at the end).
        padded: the `ClosedJaxpr` with padding.
        inputs: for each input of the padded program, its name, and how it is padded, if it is.
        sizes: for each role, the length without and with padding; those of one row may be equal.

    Raises:
        UnprovenError: an output may depend on the padding.
    """
    symbols = Symbols()
    made = [_input(v.aval, *given, sizes, 1, symbols) for v, given in zip(padded.jaxpr.invars, inputs, strict=True)]
    found = read_program(padded, made, symbols)
    given = inputs[: len(exact.jaxpr.invars)]
    made = [_input(v.aval, *given, sizes, 0, symbols) for v, given in zip(exact.jaxpr.invars, given, strict=True)]
    wanted = read_program(exact, made, symbols)
    if len(found) != len(wanted):
        raise UnprovenError("the padded program has other outputs")
    return [_compare(a, b, sizes) for a, b in zip(wanted, found, strict=True)]


def _input(
    shaped: Any,
    name: str,
    given: Padded | None,
    sizes: Mapping[str, tuple[int, int]],
    which: int,
    symbols: Symbols,
) -> Value:
    symbol = symbols.of("input", name)
    if given is None:
        groups = flexible(shaped.shape)
        axes = [axis for (axis,) in groups]
        return Value(groups, shaped.dtype, lambda kept: take(Facts(symbol, (None,) * len(axes)), kept, axes, symbols))
    if given.known is not None:
        return known_value(given.known[which], symbols)
    axes = [Axis(n, r, -1 if r is None else sizes[r][0]) for n, r in zip(shaped.shape, given.roles, strict=True)]
    facts = Facts(symbol, given.fills, None, given.low)
    return Value(tuple((a,) for a in axes), shaped.dtype, lambda kept: take(facts, kept, axes, symbols))


def _compare(exact: Value | Broken, padded: Value | Broken, sizes: Mapping[str, tuple[int, int]]) -> Cuts:
    for value in (padded, exact):
        if isinstance(value, Broken):
            raise UnprovenError(value.why)
    assert isinstance(exact, Value)
    assert isinstance(padded, Value)
    if [len(g) for g in exact.groups] != [len(g) for g in padded.groups]:
        raise UnprovenError("an output's axes differ")
    kept, cuts = [], []
    for mine, other in zip(exact.axes, padded.axes, strict=True):
        if other.role is not None and other.kept != mine.kept:
            raise UnprovenError("an output's length does not follow from that of the inputs")
        kept.append(mine.kept)
        cuts.append(_cut(mine.size, other.size, mine.role or other.role, sizes))
    if exact.at(tuple(kept)).symbol != padded.at(tuple(kept)).symbol:
        raise UnprovenError("an output is computed differently with padding")
    rest = iter(cuts)
    return tuple(tuple(next(rest) for _ in group) for group in padded.groups)


def _cut(exact: int, padded: int, role: str | None, sizes: Mapping[str, tuple[int, int]]) -> Cut:
    candidates = [r for r, (a, b) in sizes.items() if b - a == padded - exact and (role is None or r == role)]
    if role is None and exact == padded:
        return Cut(None, padded)
    if len(candidates) != 1:
        raise UnprovenError("an output's length does not follow from that of the inputs")
    return Cut(candidates[0], exact - sizes[candidates[0]][0])
