"""Values that modelling code reads, given to it between programs.

Some forward passes cannot be one program, because a size follows from what they compute: a vocoder's frames from predicted
durations, a matcher's pairs from the keypoints that it finds. Within `reading`, a trace that arrives at such a read ends there, and
its program returns the value. The next trace is given it as a constant and goes on to the following read, or to the end. Outside of
`reading`, in a decoding loop or under a caller's own `jax.jit`, `read` returns None and the reader raises.

A later program computes the value again, and may round otherwise on the way to it; so it returns whether it found the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from hfax.tracing.observations import note_read

Answers = tuple[np.ndarray, ...]
"""The values read so far, in order."""


@dataclasses.dataclass
class Reading:
    """The reads of one trace.

    Args:
        answers: the values read so far.
    """

    answers: Answers
    num_reads: int = 0
    _agreements: list[jax.Array] = dataclasses.field(default_factory=list)
    known: dict[int, tuple[jax.Array, np.ndarray]] = dataclasses.field(default_factory=dict)
    """By `id`: arrays that were read, kept so that their ids are not reused, and their values."""

    def answer(self, array: jax.Array) -> np.ndarray:
        """The next value."""
        value = self.answers[self.num_reads]
        self.num_reads += 1
        self.known[id(array)] = array, value
        self._agreements.append((array == value).all())
        return value

    def agrees(self) -> jax.Array:
        """Whether the trace's own values are the ones that it was given, a scalar bool."""
        return jnp.stack([jnp.asarray(True), *self._agreements]).all()


_reading: ContextVar[Reading | None] = ContextVar("hfax_reading", default=None)


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
    if found.num_reads == len(found.answers):
        raise ValueNeededError(array)
    return found.answer(array)


@contextlib.contextmanager
def reading(answers: Answers) -> Iterator[Reading]:
    """Within the block, a trace of this thread is given these values, and ends at the next one that it reads."""
    token = _reading.set(found := Reading(answers))
    try:
        yield found
    finally:
        _reading.reset(token)


def until_read(trace: Callable[..., tuple[Any, Any]], answers: Answers) -> Callable[..., tuple[Any, Any]]:
    """`trace` as a function that stops at the first value which is not among `answers`.

    Args:
        trace: returns arrays, and a note.
        answers: the values read so far.

    Returns:
        A function of the same arguments; where it stops, it returns the array to be read, and `VALUE_NEEDED` as the note. If there
        are answers, the arrays come with a scalar bool: whether they are the values of this trace, too.
    """

    def run(*args: Any) -> tuple[Any, Any]:
        with reading(answers) as found:
            try:
                results, note = trace(*args)
            except ValueNeededError as error:
                results, note = [error.array], VALUE_NEEDED
            return ((results, found.agrees()) if answers else results), note

    return run


VALUE_NEEDED = "hfax: the value is needed"
"""The note of a program that returns a value which the following trace needs."""


def key_of(answers: Answers) -> tuple[Any, ...]:
    """What a program with these values as constants depends on; `repr` gives all of it."""
    return tuple((str(a.dtype), a.shape, a.tobytes()) for a in answers)
