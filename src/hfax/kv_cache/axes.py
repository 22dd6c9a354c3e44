"""What a cache's arrays are, by their names. Imports no framework."""

from __future__ import annotations

_ROWS_SECOND = ("positions",)
"""Arrays with another axis before that of the sequences: kinds of positions (`IndexedLayer`)."""


def rows_axis(name: str) -> int:
    """The axis of the cache array of that name on which the sequences of a batch are."""
    return 1 if name.rpartition(".")[2] in _ROWS_SECOND else 0


def is_paged(name: str) -> bool:
    """Whether the cache array of that name holds pages (`hfax.kernels.paged`)."""
    return name.endswith(".pages")
