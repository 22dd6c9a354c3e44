"""Where hfax keeps what it may delete: compiled programs and other derived files.

Model files are not kept here; they belong to huggingface_hub's own cache.
"""

from __future__ import annotations

import os
from pathlib import Path


def hfax_home() -> Path:
    """The folder for hfax's caches: `HFAX_HOME`, else `XDG_CACHE_HOME/hfax`, else `~/.cache/hfax`. It need not exist."""
    if explicit := os.environ.get("HFAX_HOME"):
        return Path(explicit).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg).expanduser() if xdg else Path.home() / ".cache") / "hfax"
