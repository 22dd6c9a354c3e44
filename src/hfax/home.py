"""hfax's cache folder, for compiled programs and other derived files.

Model files are not stored here; they are in huggingface_hub's cache.
"""

from __future__ import annotations

import os
from pathlib import Path


def hfax_home() -> Path:
    """The folder for hfax's caches: `HFAX_HOME`, else `XDG_CACHE_HOME/hfax`, else `~/.cache/hfax`. It may not exist."""
    if explicit := os.environ.get("HFAX_HOME"):
        return Path(explicit).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg).expanduser() if xdg else Path.home() / ".cache") / "hfax"
