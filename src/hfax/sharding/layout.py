"""Placement of a model's arrays: on one device, or over a mesh by a plan."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from hfax.sharding.mesh import batch_axes
from hfax.sharding.partition import ShardingPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One device, or a plan for several.

    Args:
        devices: all devices, in mesh order.
        plan: sharding plan of the weights; None for one device.
        is_described: abstract layout: arrays are `jax.ShapeDtypeStruct`s, and programs are compiled but not run.
    """

    devices: tuple[jax.Device, ...]
    plan: ShardingPlan | None = None
    is_described: bool = False

    @classmethod
    def on(cls, device: jax.Device) -> Layout:
        """A layout with everything on one device."""
        return cls(devices=(device,))

    @classmethod
    def of(cls, plan: ShardingPlan) -> Layout:
        """A layout over a plan's mesh."""
        return cls(devices=tuple(plan.mesh.devices.flat), plan=plan)

    def described(self) -> Layout:
        """The abstract version of this layout."""
        return dataclasses.replace(self, is_described=True)

    @property
    def device(self) -> jax.Device:
        """The first device; all have its platform."""
        return self.devices[0]

    @property
    def mesh(self) -> Mesh | None:
        """The mesh; None for one device."""
        return None if self.plan is None else self.plan.mesh

    @property
    def spans_processes(self) -> bool:
        """Whether some devices belong to other processes, which must make the same calls."""
        return any(device.process_index != jax.process_index() for device in self.devices)

    @property
    def replicated(self) -> Sharding:
        """The sharding with the whole array on every device."""
        return SingleDeviceSharding(self.device) if self.plan is None else NamedSharding(self.plan.mesh, P())

    def weight(self, name: str) -> Sharding:
        """The sharding of the weight of that name; replicated if the plan does not contain it."""
        if self.plan is None or name not in self.plan.weights:
            return self.replicated
        return self.plan.sharding(name)

    def rows(self, count: int) -> Sharding:
        """The sharding of inputs with `count` rows: over the batch axes, if they divide."""
        if self.plan is None:
            return self.replicated
        return NamedSharding(self.plan.mesh, P(batch_axes(self.plan.mesh, count)))

    def put_like(self, array: np.ndarray, other: jax.Array) -> jax.Array:
        """Put a host array, the same in every process, with the sharding of another array."""
        return _put(array, other.sharding)

    def put(self, tree: Any) -> Any:
        """Put host arrays, replicated on every device."""
        return jax.tree.map(lambda array: self.place(array, self.replicated), tree)

    def put_rows(self, tree: Any) -> Any:
        """Put host arrays with batch rows as first axis."""
        return jax.tree.map(lambda array: self.place(array, self.rows(array.shape[0] if array.ndim else 0)), tree)

    def place(self, array: Any, where: Sharding) -> Any:
        """Put a host array with the given sharding."""
        return describe(array, where) if self.is_described else _put(array, where)

    @property
    def key(self) -> str:
        """Identifies the layout within this run."""
        if self.plan is None:
            return f"device {self.device.id}"
        specs = sorted((name, str(weight.spec)) for name, weight in self.plan.weights.items())
        text = repr((dict(self.plan.mesh.shape), [d.id for d in self.devices], specs))
        return hashlib.sha256(text.encode()).hexdigest()


def describe(array: Any, where: Sharding) -> jax.ShapeDtypeStruct:
    """The abstract array with this sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)


def from_slices(shape: tuple[int, ...], where: Sharding, part: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """An array from the shards that `part` returns for the devices of this process."""
    callback: Any = part
    return jax.make_array_from_callback(shape, where, callback)


def _put(array: Any, where: Sharding) -> jax.Array:
    if where.is_fully_addressable or isinstance(array, jax.Array):
        return jax.device_put(array, where)
    host = np.asarray(array)
    return from_slices(host.shape, where, lambda index: host[index])


def to_host(array: jax.Array) -> np.ndarray:
    """A copy of the whole array in this process's memory; every process of the run must call it."""
    if not (array.is_fully_addressable or array.is_fully_replicated):
        everywhere = NamedSharding(array.sharding.mesh, P())  # pyright: ignore[reportAttributeAccessIssue]
        array = jax.jit(lambda a: a, out_shardings=everywhere)(array)
    return np.array(array)
