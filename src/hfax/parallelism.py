"""From what a user says about devices to a layout: the mesh, and the plan of the weights over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from hfax.load.placement import free_bytes
from hfax.load.quantize import Quantization, bytes_of, columns_together, weights_to_quantize
from hfax.load.skeleton import Skeleton
from hfax.mesh import make_mesh
from hfax.sharding.layout import Layout
from hfax.sharding.plan import ShardingPlan, make_plan
from hfax.sharding.role import Role

Parallelism = str | Mapping[str, int] | Mesh | Mapping[str, PartitionSpec | str | Mapping[str, int] | Mesh] | None


def choose_layout(
    skeleton: Skeleton, parallelism: Parallelism, quantization: Quantization | None, device: jax.Device
) -> Layout:
    """Where the weights of a model go.

    Args:
        skeleton: the model.
        parallelism: as `AutoModelForTPU.from_pretrained` takes it.
        quantization: of the weights, likewise.
        device: the one that is used where one is enough.

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
    quantization: Quantization | None = None,
    *,
    given: Mapping[str, PartitionSpec] | None = None,
) -> ShardingPlan:
    """The plan of a model's weights over a mesh with the axes of `hfax.mesh`."""

    def roles() -> Mapping[str, Role]:
        from hfax.parallelism.roles import roles_of

        return roles_of(skeleton)

    together: dict[str, int] = {}
    if quantization:
        packed = weights_to_quantize(skeleton.module, skeleton.shapes, skeleton.tied)
        together = {name: columns_together(skeleton.shapes[name].shape[-1], quantization) for name in packed}
    return make_plan(
        skeleton.module,
        skeleton.shapes,
        mesh,
        roles=roles,
        given=given,
        granularity=together,
        num_bytes=weight_bytes(skeleton, quantization),
    )


def weight_bytes(skeleton: Skeleton, quantization: Quantization | None) -> dict[str, int]:
    """Of each weight, as it will be stored."""
    packed: Sequence[str] | set[str] = ()
    if quantization:
        packed = weights_to_quantize(skeleton.module, skeleton.shapes, skeleton.tied)
    return {
        name: bytes_of(tuple(t.shape), quantization)
        if quantization and name in packed
        else t.numel() * t.element_size()
        for name, t in skeleton.shapes.items()
    }
