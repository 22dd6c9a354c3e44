"""Which torch operations give a view of their first argument, and how a write through that view reaches it.

Turns an operation's name and arguments into functions on arrays. It knows no tensors and no environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

Array = Any

_RESHAPES = frozenset({"view", "reshape", "squeeze", "unsqueeze", "alias", "_reshape_alias", "detach"})
_REARRANGED = frozenset(
    {"permute", "transpose", "t", "expand", "select", "slice", "split", "split_with_sizes", "unbind"}
)
_OTHERS = frozenset({"diagonal", "unfold", "as_strided"})
VIEW_OPS = _RESHAPES | _REARRANGED | _OTHERS
"""Names of the aten operations whose result shares its first argument's storage."""


def keeps_order(name: str) -> bool:
    """Whether a contiguous tensor's view by this operation is contiguous."""
    return name in _RESHAPES


def write_back(name: str, args: tuple[Any, ...]) -> Callable[[Array, Array], Array] | None:
    """How a write through the view gets into the base; None where only the index of each element tells.

    Args:
        name: of the aten operation.
        args: its arguments after the tensor.
    """
    if name in _RESHAPES:
        return lambda base, new: new.reshape(base.shape)
    if name == "transpose":
        return lambda base, new: jnp.swapaxes(new, args[0], args[1])
    if name == "t":
        return lambda base, new: new.T
    if name == "permute":
        return lambda base, new: jnp.transpose(new, _inverse([axis % len(args[0]) for axis in args[0]]))
    return None


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
