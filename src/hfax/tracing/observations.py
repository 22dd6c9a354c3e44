"""Observations of a trace, for diagnosis: operations without a lowering, reads of values, 64-bit dtypes.

An observed trace can continue with placeholder values where it would otherwise fail, so that one trace finds all problems. Its
results are meaningless.
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
    """Lines of modelling code ("/…/modeling_x.py:12 in forward"), each with its observation.

    Args:
        goes_on: continue after operations that cannot be traced.
        missing: names of operations without a lowering.
        reads: how the value of a traced tensor was read.
        wide: "float64" or "int64", the dtype a traced value was converted to; programs use 32 bits.
    """

    goes_on: bool = False
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    reads: dict[str, str] = dataclasses.field(default_factory=dict)
    wide: dict[str, str] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def observing(*, goes_on: bool) -> Iterator[Observations]:
    """Collect observations of this thread's traces until the block ends.

    Args:
        goes_on: continue after operations without a lowering, and with a placeholder where a value is read.
    """
    before, _local.found = getattr(_local, "found", None), Observations(goes_on=goes_on)
    try:
        yield _local.found
    finally:
        _local.found = before


def note_missing(operation: str) -> bool:
    """Record an operation without a lowering; returns whether the trace should continue."""
    return _note("missing", operation)


def note_read(how: str) -> bool:
    """Record a read of a traced value; returns whether the trace should continue."""
    return _note("reads", how)


def note_wide(dtype: str) -> None:
    """Record a conversion to 64 bits."""
    _note("wide", dtype)


def _note(kind: str, what: str) -> bool:
    found = getattr(_local, "found", None)
    if found is not None:
        getattr(found, kind).setdefault(running_line(), what)
    return found is not None and found.goes_on
