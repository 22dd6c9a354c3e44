"""How many threads the kernels use: `HFAX_NUM_THREADS`, else the cores that this process may use.

The threads are those of XLA's pool, which is as large as the machine, or as the process's affinity; a container's limit is a share
of time, which XLA does not see: more threads than that are stopped together, in the middle of their work. Imports no JAX.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from hfax.errors import InvalidInputError

VARIABLE = "HFAX_NUM_THREADS"


def num_threads() -> int:
    """`HFAX_NUM_THREADS`, else `usable_cores()`.

    Raises:
        InvalidInputError: `HFAX_NUM_THREADS` is not a whole number from 1 on.
    """
    if not (text := os.environ.get(VARIABLE)):
        return usable_cores()
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise InvalidInputError(
        f"{VARIABLE}={text!r} is not a number of threads.",
        "The CPU kernels use that many threads, so it is a whole number from 1 on.",
        f"Set {VARIABLE} to a number such as 4, or unset it to use all cores that this process may use.",
    )


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process may use: its affinity, or its control groups' share of time, rounded up, whichever is less.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # on Linux
    allowed = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    shares = [math.ceil(share) for share in _shares(root)]
    return max(1, min([allowed, *shares]))


def _shares(root: Path) -> Iterator[float]:
    """The limits, in cores, of the control groups that this process is in."""
    mounted = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:  # version 2
            yield from _limits(mounted, group, _share_v2)
        elif "cpu" in controllers.split(","):
            for name in dict.fromkeys((controllers, "cpu")):  # the folder has one of these names, or both
                yield from _limits(mounted / name, group, _share_v1)


def _limits(mounted: Path, group: str, share_of: Callable[[Path], float | None]) -> Iterator[float]:
    """The limits of a group and of all above it; within a container, the group's path may be one that only its host has."""
    path = PurePosixPath(group.lstrip("/"))
    for folder in (path, *path.parents):
        if (share := share_of(mounted / folder)) is not None:
            yield share


def _share_v2(folder: Path) -> float | None:
    match _read(folder / "cpu.max").split():
        case [quota, period] if quota != "max":
            return int(quota) / int(period)
    return None


def _share_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None  # -1: no limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
