"""hfax's cache folder, for compiled programs and other derived files.

Model files are not stored here; they are in huggingface_hub's cache.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def hfax_home() -> Path:
    """The folder for hfax's caches: `HFAX_HOME`, else `XDG_CACHE_HOME/hfax`, else `~/.cache/hfax`. It may not exist."""
    if explicit := os.environ.get("HFAX_HOME"):
        return Path(explicit).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg).expanduser() if xdg else Path.home() / ".cache") / "hfax"


def put(path: Path, data: bytes) -> None:
    """Write a file of a cache atomically.

    Raises:
        OSError: the disk is full, or the folder cannot be written; there is no half file.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
        try:
            file.write(data)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
