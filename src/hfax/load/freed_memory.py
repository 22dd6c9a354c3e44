"""Memory that was freed, given back to the operating system."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None in other C libraries, which have none."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def give_back_freed_memory() -> None:
    """Return freed pages to the operating system, where the C library can.

    glibc keeps freed blocks of up to 32 MB for later use, and each loading thread has a heap of its own: after a checkpoint is
    converted, the process would hold the pages of tensors that are gone, as much again as the weights.
    """
    if (trim := _trim()) is not None:
        trim(0)
