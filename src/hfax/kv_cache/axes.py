"""Axes of a cache's arrays, by the arrays' names. Imports no framework."""

from __future__ import annotations

_ROWS_SECOND = ("key_pages", "value_pages", "positions")
"""Arrays with another axis before that of the sequences: pages of a head (`kernels.paged`), kinds of positions (`IndexedLayer`)."""


def rows_axis(name: str) -> int:
    """The axis of the cache array of that name on which the sequences of a batch are."""
    return 1 if name.rpartition(".")[2] in _ROWS_SECOND else 0
