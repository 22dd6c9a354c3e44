"""What a trace is seen to do, for a diagnosis: operations without a lowering, looks at values, dtypes of 64 bits.

A trace that is observed can go on where it would otherwise end, with made-up values, so that one trace finds all that stands in its
way. Its results mean nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from hfax.errors import running_line

_local = threading.local()


@dataclasses.dataclass(kw_only=True)
class Observations:
    """Lines of modelling code ("/…/modeling_x.py:12 in forward"), each with what was seen there.

    Args:
        goes_on: whether the trace does not end at what cannot be traced.
        missing: names of operations that have no lowering.
        reads: how the value of a traced tensor was asked for.
        wide: "float64" or "int64", to which a traced value was converted; a program has 32 bits.
    """

    goes_on: bool = False
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    reads: dict[str, str] = dataclasses.field(default_factory=dict)
    wide: dict[str, str] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def observing(*, goes_on: bool) -> Iterator[Observations]:
    """Collect what traces of this thread do until the block ends.

    Args:
        goes_on: past operations without a lowering, and with some value where one is looked at.
    """
    before, _local.found = getattr(_local, "found", None), Observations(goes_on=goes_on)
    try:
        yield _local.found
    finally:
        _local.found = before


def note_missing(operation: str) -> bool:
    """Remember an operation that cannot be lowered; whether the trace should go on."""
    return _note("missing", operation)


def note_read(how: str) -> bool:
    """Remember a look at a traced value; whether the trace should go on."""
    return _note("reads", how)


def note_wide(dtype: str) -> None:
    """Remember a conversion to 64 bits."""
    _note("wide", dtype)


def _note(kind: str, what: str) -> bool:
    found = getattr(_local, "found", None)
    if found is not None:
        getattr(found, kind).setdefault(running_line(), what)
    return found is not None and found.goes_on
