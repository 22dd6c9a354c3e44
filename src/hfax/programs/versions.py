"""Versions of what programs are made with: installed packages, and hfax's own source. Imports no framework."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from pathlib import Path

from hfax import __version__

LEAVES = frozenset(
    {
        "__main__",
        "checkpoint",
        "cli",
        "doctor",
        "evaluation",
        "exporting",
        "matrix",
        "pipelines",
        "quantization",
        "server",
        "verification",
    }
)
"""Parts of hfax that call programs but trace none: nothing else imports them, so changes do not make programs stale."""


def version_of(name: str) -> str:
    """Version of an installed package, or "none". hfax's is read from its source, since editable installs may lag behind."""
    if name == "hfax":
        return __version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def source_digest(root: Path = Path(__file__).parents[1]) -> str:
    """Digest of the hfax source that affects traces, so that a changed lowering never uses a stale program.

    Args:
        root: the package's folder.
    """
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0].removesuffix(".py") not in LEAVES:
            digest.update(path.read_bytes())
    return digest.hexdigest()
