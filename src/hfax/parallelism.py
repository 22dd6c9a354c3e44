"""Turns the user's parallelism option into a layout: the mesh and the weights' sharding plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from hfax.errors import InvalidInputError
from hfax.kernels.quantized import together
from hfax.load.placement import free_bytes
from hfax.load.quantize import Quantized, bytes_of, layouts
from hfax.load.skeleton import Skeleton
from hfax.sharding.layout import Layout
from hfax.sharding.mesh import make_mesh
from hfax.sharding.partition import Role, ShardingPlan, make_plan

Parallelism = str | Mapping[str, int] | Mesh | Mapping[str, PartitionSpec | str | Mapping[str, int] | Mesh] | None


def choose_layout(skeleton: Skeleton, parallelism: Parallelism, quantization: Quantized, device: jax.Device) -> Layout:
    """Choose the placement of a model's weights.

    Args:
        skeleton: the model.
        parallelism: see `AutoModelForTPU.from_pretrained`.
        quantization: of its weights.
        device: the device to use if one is enough.

    Raises:
        InvalidInputError: see `make_mesh` and `make_plan`.
    """
    if parallelism is None:
        free = free_bytes(device)
        needed = sum(weight_bytes(skeleton, quantization).values())
        if jax.device_count() == 1 or device.platform == "cpu" or free is None or needed < free:
            return Layout.on(device)
        parallelism = "auto"
    given: dict[str, Any] = {}
    wanted: Any = parallelism
    if isinstance(parallelism, Mapping) and any(not isinstance(size, int) for size in parallelism.values()):
        given = {name: spec for name, spec in parallelism.items() if name != "mesh"}
        wanted = parallelism.get("mesh", "auto")
    mesh = make_mesh(wanted, skeleton.module.config)
    return Layout.of(plan_over(skeleton, mesh, quantization, given=given))


def plan_over(
    skeleton: Skeleton,
    mesh: Mesh,
    quantization: Quantized = None,
    *,
    given: Mapping[str, PartitionSpec] | None = None,
) -> ShardingPlan:
    """A model's sharding plan on a mesh with the axes of `hfax.sharding.mesh`."""
    packed = layouts(skeleton.module, skeleton.shapes, skeleton.tied, quantization)
    return make_plan(
        skeleton.module,
        skeleton.shapes,
        mesh,
        roles=lambda: roles_of(skeleton),
        given=given,
        granularity={
            name: (-2 if layout.is_transposed else -1, together(layout.encoding, layout.group))
            for name, layout in packed.items()
        },
        num_bytes=weight_bytes(skeleton, quantization),
    )


def weight_bytes(skeleton: Skeleton, quantization: Quantized) -> dict[str, int]:
    """Stored size of each weight, in bytes."""
    packed = layouts(skeleton.module, skeleton.shapes, skeleton.tied, quantization)
    return {
        name: bytes_of(packed[name]) if name in packed else t.numel() * t.element_size()
        for name, t in skeleton.shapes.items()
    }


logger = logging.getLogger(__name__)


def roles_of(skeleton: Skeleton) -> dict[str, Role]:
    """See `find_roles`; empty, with a warning, if the forward pass cannot be traced. Cached."""
    if "roles" not in skeleton.derived:
        skeleton.derived["roles"] = _traced_roles(skeleton)
    return skeleton.derived["roles"]


def _traced_roles(skeleton: Skeleton) -> dict[str, Role]:
    from hfax.sharding.structure import find_roles  # few models need a trace of their structure
    from hfax.tracing.abstract import example_inputs, without_weights

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
        logger.warning(
            "%s could not be traced, so weight roles are unknown (%s: %s)", kind, type(error).__name__, error
        )
        return {}
    names = sorted(params)  # dicts are flattened in the order of their keys
    return find_roles(closed.jaxpr, [*names, *[None] * len(arrays)])


def read_plan(path: str | Path) -> tuple[dict[str, int], Any]:
    """Mesh and quantization of the file's first plan for this machine's device count.

    Raises:
        InvalidInputError: the file has no plan, or none for this device count.
    """
    try:
        plans = json.loads(Path(path).read_text())["plans"]
        found = [(p["machine"], p["num_devices"], dict(p["mesh"]), p["quantization"]) for p in plans]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path} is not an hfax plan.",
            f"{type(error).__name__}: {error}",
            "Create one with hfax plan --json-file.",
        ) from error
    count = jax.device_count()
    for _, num_devices, mesh, quantization in found:
        if num_devices == count:
            return mesh, quantization
    raise InvalidInputError(
        f"{path} has no plan for {count} devices.",
        f"Its plans are for {', '.join(sorted({f'{machine} ({n})' for machine, n, _, _ in found}))}.",
        "Create a plan for this machine's topology.",
    )
