"""Where an adapter's arrays are on a mesh: split along the layer's inputs or outputs like the layer's weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from hfax.lora.targets import target_of
from hfax.sharding.layout import Layout
from hfax.sharding.mesh import FSDP
from hfax.tracing.adapters import MAGNITUDE, PARTS, SCALING


def sharding_of(name: str, module: torch.nn.Module, layout: Layout, own_name: Callable[[str], str]) -> Sharding:
    """Sharding of an adapter's array, or of a weight.

    Args:
        name: the array's name.
        module: the model.
        layout: placement of the model's weights.
        own_name: name under which a weight is stored, if it is tied.
    """
    path, part = next(((name[: -len(p) - 1], p) for p in PARTS if name.endswith(f".{p}")), (name, None))
    plan = layout.plan
    if part is None or plan is None or part == SCALING:
        return layout.weight(name)
    target = target_of(module, path)
    weight = own_name(target.weight)
    if weight not in plan.weights:
        return layout.weight(name)
    *stack, rows, columns = plan.weights[weight].spec
    if target.is_turned:
        rows, columns = columns, rows
    parts = plan.mesh.shape[FSDP]
    is_free = parts > 1 and not any(FSDP in (axes if isinstance(axes, tuple) else (axes,)) for axes in stack)
    rows, columns = (  # the other half of the adapter takes the axis without fsdp
        FSDP if axes is None and is_free and size % parts == 0 else axes
        for axes, size in zip((rows, columns), (target.out, target.into), strict=True)
    )
    down, up = target.parts
    spec = {down: P(*stack, None, columns), up: P(*stack, rows, None), MAGNITUDE: P(rows)}[part]
    return NamedSharding(plan.mesh, spec)
