"""The folder of compiled programs: files that only their owner reads and writes, atomically, up to a total size.

It knows nothing of what is in a file. Files are pickles, as are JAX's serialized executables: the folder is created with owner-only
permissions, and files owned by another user are not opened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from hfax.home import hfax_home, put
from hfax.programs.program_records import record_path, write_record
from hfax.programs.shared import find_shared, keep

logger = logging.getLogger(__name__)

_MAX_BYTES = 4 << 30
"""Folder size above which the least recently used programs are removed."""

_Loaded = TypeVar("_Loaded")


def program_folder() -> Path:
    """The folder of compiled programs; it may not exist."""
    return hfax_home() / "programs"


def is_enabled() -> bool:
    """Whether programs, and what is stored beside them, are kept on disk."""
    return os.environ.get("HFAX_PROGRAM_CACHE") != "0"


def is_of_another_user(path: Path) -> bool:
    """Whether a file is another user's, which is not trusted.

    Raises:
        OSError: there is no such file.
    """
    return hasattr(os, "getuid") and path.stat().st_uid != os.getuid()


_uses: ContextVar[set[Path] | None] = ContextVar("hfax_uses", default=None)


@contextlib.contextmanager
def noting_uses() -> Iterator[set[Path]]:
    """The files of the cache that are read or written in the block, and in threads of its context, as they come."""
    found = set[Path]()
    token = _uses.set(found)
    try:
        yield found
    finally:
        _uses.reset(token)


def note_use(path: Path) -> None:
    """Tell `noting_uses` of a file."""
    if (uses := _uses.get()) is not None:
        uses.add(path)


def read_program(path: Path, unpack: Callable[[bytes], _Loaded]) -> _Loaded | None:
    """Load a program from disk, or from a shared folder; None if there is none or it cannot be used (then it is removed).

    Args:
        path: its file.
        unpack: loads its contents; may raise anything.

    Raises:
        InvalidInputError: see `find_shared`.
    """
    if not is_enabled():
        return None
    shared = None if path.exists() else find_shared(f"{program_folder().name}/{path.name}")
    if shared is not None:
        keep(path, shared)
    try:
        if shared is None and is_of_another_user(path):
            logger.warning("%s is owned by another user and was ignored", path)
            return None
        program = unpack(path.read_bytes() if shared is None else shared)
        with contextlib.suppress(OSError):
            os.utime(path)
        note_use(path)
        return program
    except FileNotFoundError:
        return None
    except ImportError as error:  # what it returns needs a package that is not installed; elsewhere it is
        logger.warning("%s could not be loaded: %s", path, error)
        return None
    except Exception as error:
        logger.warning("%s could not be loaded and will be recompiled (%s: %s)", path, type(error).__name__, error)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None


def write_program(path: Path, packed: Callable[[], bytes], parts: dict[str, str]) -> None:
    """Write a program and its record to disk, each atomically; a full or read-only disk only causes a warning.

    Args:
        path: its file.
        packed: gives its contents; may raise anything.
        parts: of its key, by name.
    """
    if not is_enabled():
        return
    try:
        data = packed()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        put(path, data)
        write_record(path, parts)
        note_use(path)
        _prune(path.parent)
    except Exception as error:
        logger.warning("program not cached in %s (%s: %s)", path.parent, type(error).__name__, error)


def remove_orphans(folder: Path) -> None:
    """Remove leftover files of interrupted writes.

    Raises:
        OSError: the folder cannot be written.
    """
    for orphan in folder.glob(".writing-*"):
        if time.time() - orphan.stat().st_mtime > 3600:
            orphan.unlink(missing_ok=True)


def _prune(folder: Path) -> None:
    """Remove the least recently used programs while the folder is too large, and leftover files of interrupted writes."""
    with contextlib.suppress(OSError):
        remove_orphans(folder)
        files = sorted(folder.glob("*.program"), key=lambda p: p.stat().st_mtime, reverse=True)
        total = 0
        for file in files:
            total += file.stat().st_size
            if total > _MAX_BYTES:
                file.unlink(missing_ok=True)
                record_path(file).unlink(missing_ok=True)
