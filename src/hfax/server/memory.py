"""The memory of this process: how much it has, giving unused memory back to the system, and the garbage collector's part."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

_STATM = Path("/proc/self/statm")


def mapped_bytes() -> int:
    """Mapped memory, in bytes; 0 where the system has no /proc."""
    return _pages(0) * resource.getpagesize()


def resident_bytes() -> int:
    """Resident memory, in bytes; 0 where the system has no /proc."""
    return _pages(1) * resource.getpagesize()


def allocated_bytes() -> int:
    """Memory that this process has allocated and not freed, in bytes; where libc does not tell, its resident memory."""
    try:
        of_libc = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return resident_bytes()
    of_libc.restype = _Mallinfo
    found = of_libc()
    return found.uordblks + found.hblkhd


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def give_memory_back() -> None:
    """Return freed memory to the system; glibc keeps it otherwise."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL(None).malloc_trim(0)


def freeze_heap() -> None:
    """Leave all objects that exist now out of garbage collections: a full one holds the GIL for a quarter of a second otherwise.

    For a process that only serves: what becomes garbage in a cycle among these objects is never freed.
    """
    gc.collect()
    gc.freeze()


def _pages(field: int) -> int:
    try:
        return int(_STATM.read_text().split()[field])
    except OSError:
        return 0
