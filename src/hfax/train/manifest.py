"""A manifest of a folder's files, by which damage is found before they are read. Knows nothing about what is in them."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST_NAME = "hfax_manifest.json"
_THREADS = 8
_WRITTEN_LATER = {MANIFEST_NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}
"""Files at the top that orbax changes when it commits a checkpoint. They hold times and messages, which nothing restores."""


def write_manifest(folder: Path) -> None:
    """Write the sizes and BLAKE2 hashes of all files, atomically, after all of them have reached the disk.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_left_out(path, folder)]
    with ThreadPoolExecutor(_THREADS) as pool:
        entries = dict(zip((_name(p, folder) for p in files), pool.map(_synced_entry, files), strict=True))
    part = folder / f"{MANIFEST_NAME}.part"
    with part.open("w", encoding="utf-8") as out:
        json.dump({"files": entries}, out, indent=0)
        out.flush()
        os.fsync(out.fileno())
    part.replace(folder / MANIFEST_NAME)
    for below in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        sync_folder(below)


def find_damage(folder: Path) -> str | None:
    """What is wrong with a folder that `write_manifest` described; None: all files are as they were written."""
    try:
        entries = dict(json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))["files"])
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST_NAME} cannot be read ({type(error).__name__})"
    with ThreadPoolExecutor(_THREADS) as pool:
        return next(filter(None, pool.map(lambda name: _damage(folder, name, entries[name]), entries)), None)


def sync_folder(folder: Path) -> None:
    """Make a folder's entries, such as a new name, reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damage(folder: Path, name: str, entry: Any) -> str | None:
    path = folder / name
    try:
        size, wanted = int(entry["size"]), str(entry["blake2b"])
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        return None if _digest(path) == wanted else f"the contents of {name} have changed"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{name} cannot be read ({type(error).__name__})"


def _synced_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "blake2b": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _is_left_out(path: Path, folder: Path) -> bool:
    return path.parent == folder and path.name in _WRITTEN_LATER


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()
