"""Extracts weights by name from flax.nnx modules and states. flax is imported only when needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from hfax.errors import InvalidInputError


def weights_of(module_or_state: Any) -> dict[str, jax.Array]:
    """Weights by name, from an `hfax.to_nnx` module, its state, or a dict of weights.

    Raises:
        InvalidInputError: the argument is none of these.
    """
    if isinstance(module_or_state, Mapping) and all(isinstance(name, str) for name in module_or_state):
        found = dict(module_or_state)
        if all(hasattr(array, "shape") for array in found.values()):
            return found
    try:
        from flax import nnx
    except ImportError:
        raise _no_weights(module_or_state) from None
    state = nnx.state(module_or_state, nnx.Param) if isinstance(module_or_state, nnx.Module) else module_or_state
    if not isinstance(state, nnx.State):
        raise _no_weights(state)
    leaves = nnx.to_flat_state(state)
    return {".".join(str(part) for part in path): _value(leaf) for path, leaf in leaves}


def _value(leaf: Any) -> Any:
    return leaf.get_value() if hasattr(leaf, "get_value") else leaf


def _no_weights(given: Any) -> InvalidInputError:
    return InvalidInputError(
        f"A {type(given).__name__} holds no weights.",
        "Weights come from a to_nnx module, its state, or a dict of arrays by name.",
        "Pass one of these.",
    )
