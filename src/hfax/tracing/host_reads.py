"""Values that modelling code reads, given to it between programs.

Some forward passes cannot be one program, because a size follows from what they compute: a vocoder's frames from predicted
durations, a matcher's pairs from the keypoints that it finds. Within `reading`, a trace that arrives at such a read ends there, and
its program returns the value. The next trace is given it as a constant and goes on to the following read, or to the end. Outside of
`reading`, in a decoding loop or under a caller's own `jax.jit`, `read` returns None and the reader raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from hfax.tracing.observations import note_read

Answers = tuple[np.ndarray, ...]
"""The values read so far, in order."""


@dataclasses.dataclass
class _Reading:
    answers: Answers
    num_reads: int = 0
    known: dict[int, tuple[jax.Array, np.ndarray]] = dataclasses.field(default_factory=dict)
    """By `id`: arrays that were read, kept so that their ids are not reused, and their values."""


_reading: ContextVar[_Reading | None] = ContextVar("hfax_reading", default=None)


class ValueNeededError(Exception):
    """A trace cannot go on without a value.

    Args:
        array: the traced array.
    """

    def __init__(self, array: jax.Array) -> None:
        super().__init__(f"a program must return the value first, shape {array.shape}")
        self.array = array


def read(array: jax.Array, what: str) -> np.ndarray | None:
    """The value of an array; None if it is traced, and values cannot be read here. A diagnosis is given zeros or ones.

    Args:
        array: the array.
        what: the operation that reads it, for a diagnosis.

    Raises:
        ValueNeededError: within `reading`, if no program has returned it yet.
    """
    if not isinstance(array, Tracer):
        return np.asarray(array)
    if note_read(what):
        return np.zeros(array.shape, bool) if array.dtype == bool else np.ones(array.shape, array.dtype)
    if (found := _reading.get()) is None:
        return None
    if id(array) in found.known:
        return found.known[id(array)][1]
    number = found.num_reads
    if number == len(found.answers):
        raise ValueNeededError(array)
    found.num_reads += 1
    found.known[id(array)] = array, found.answers[number]
    return found.answers[number]


@contextlib.contextmanager
def reading(answers: Answers) -> Iterator[None]:
    """Within the block, a trace of this thread is given these values, and ends at the next one that it reads."""
    token = _reading.set(_Reading(answers))
    try:
        yield
    finally:
        _reading.reset(token)


def until_read(trace: Callable[..., tuple[list[Any], Any]], answers: Answers) -> Callable[..., tuple[list[Any], Any]]:
    """`trace` as a function that stops at the first value which is not among `answers`.

    Args:
        trace: returns arrays, and a note.
        answers: the values read so far.

    Returns:
        A function of the same arguments; where it stops, it returns the array to be read, and `VALUE_NEEDED` as the note.
    """

    def run(*args: Any) -> tuple[list[Any], Any]:
        with reading(answers):
            try:
                return trace(*args)
            except ValueNeededError as error:
                return [error.array], VALUE_NEEDED

    return run


VALUE_NEEDED = "hfax: the value is needed"
"""The note of a program that returns a value which the following trace needs."""


def key_of(answers: Answers) -> tuple[Any, ...]:
    """What a program with these values as constants depends on; `repr` gives all of it."""
    return tuple((str(a.dtype), a.shape, a.tobytes()) for a in answers)
