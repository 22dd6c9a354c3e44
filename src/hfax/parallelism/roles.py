"""Roles of a model's weights, from a trace of its forward pass on small inputs; nothing is computed."""

from __future__ import annotations

import logging
from typing import Any

import jax

from hfax.backends.abstract import example_inputs, without_weights
from hfax.load.skeleton import Skeleton
from hfax.sharding.structure import Role, find_roles

logger = logging.getLogger(__name__)


def roles_of(skeleton: Skeleton) -> dict[str, Role]:
    """See `find_roles`; empty, with a warning, where the forward pass cannot be traced. Asked again, the same."""
    module = skeleton.module
    if (known := module.__dict__.get(_KEPT)) is None:
        known = module.__dict__[_KEPT] = _traced_roles(skeleton)
    return known


_KEPT = "_hfax_roles"


def _traced_roles(skeleton: Skeleton) -> dict[str, Role]:
    module = skeleton.module
    traced, params = without_weights(skeleton)
    try:
        arrays, rest = example_inputs(traced, params)

        def forward(params: dict[str, Any], arrays: dict[str, Any]) -> list[jax.Array]:
            out = traced.apply(params, (), {**arrays, **rest})
            return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]

        closed = jax.make_jaxpr(forward)(params, arrays)
    except Exception as error:
        kind = type(module).__name__
        logger.warning("%s could not be traced, so no roles are known (%s: %s)", kind, type(error).__name__, error)
        return {}
    names = sorted(params)  # dicts are flattened in the order of their keys
    return find_roles(closed.jaxpr, [*names, *[None] * len(arrays)])
