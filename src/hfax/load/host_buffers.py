"""Aligned host memory for tensors, taken from the system in large pieces.

Turns sizes into writable buffers at aligned addresses, in anonymous memory backed by huge pages where the system has
them: with 4 KiB pages, faulting fresh memory in costs several times the copy into it. It does not know what is put
there.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading

_ARENA_BYTES = 64 << 20
"""Tensors smaller than this share pieces of it: huge pages are wasted on one small tensor each, and the system limits
the number of mappings. Memory goes back to the system when all tensors of a piece are gone."""

_HUGE_PAGE_BYTES = 2 << 20


class HostBuffers:
    """Hands out buffers; each keeps its memory alive by itself. Safe from several threads.

    Args:
        alignment: bytes, a power of two no larger than a page; of every buffer's address.
    """

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._lock = threading.Lock()
        self._arena = memoryview(b"")
        self._used = 0

    def take(self, num_bytes: int) -> memoryview:
        """A fresh, zeroed buffer of `num_bytes`, more than none."""
        if num_bytes >= _ARENA_BYTES:
            return _anonymous(num_bytes)[:num_bytes]
        with self._lock:
            start = -(-self._used // self._alignment) * self._alignment
            if start + num_bytes > len(self._arena):
                self._arena, start = _anonymous(_ARENA_BYTES), 0
            self._used = start + num_bytes
            return self._arena[start : self._used]


def _anonymous(num_bytes: int) -> memoryview:
    # Whole huge pages: Linux aligns a mapping to them only if its length is a multiple. Pages never touched cost
    # nothing.
    rounded = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
