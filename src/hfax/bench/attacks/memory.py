"""Memory of the attacked server: from its Prometheus metrics, or from /proc if it runs on this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

_PROC = Path("/proc")
_METRIC = b"process_resident_memory_bytes "


def of_metrics(page: bytes) -> int | None:
    """Resident memory of the server's process, in bytes, from the text of /metrics; None if it is not there."""
    for line in page.splitlines():
        if line.startswith(_METRIC):
            return int(float(line.removeprefix(_METRIC)))
    return None


def of_processes(pid: int) -> int | None:
    """Memory of a process and its descendants, in bytes; pages that they share count once. None if it does not run here."""
    sizes = [_size(one) for one in (pid, *_descendants(pid))]
    return sum(size for size in sizes if size is not None) if sizes[0] is not None else None


def _size(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return None


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found
