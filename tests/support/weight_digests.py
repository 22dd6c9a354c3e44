"""Digests of a model's weights, to compare those of two processes. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def digests(params: Mapping[str, Any]) -> dict[str, str]:
    """Of the bytes, shapes, dtypes and encodings of weights, by name."""
    found: dict[str, str] = {}
    for name, weight in params.items():
        leaves, structure = jax.tree.flatten(weight)
        digest = hashlib.sha256(repr(structure).encode())
        for leaf in leaves:
            digest.update(f"{leaf.shape} {leaf.dtype}".encode() + np.asarray(leaf).tobytes())
        found[name] = digest.hexdigest()
    return found
