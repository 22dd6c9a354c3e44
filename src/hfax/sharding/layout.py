"""Where a model's arrays lie: on one device, or over a mesh as a plan says."""

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
        devices: all of them, in the mesh's order.
        plan: of the weights; None for one device.
        is_described: nothing is put there: arrays are `jax.ShapeDtypeStruct`s, and programs are compiled and not run.
    """

    devices: tuple[jax.Device, ...]
    plan: ShardingPlan | None = None
    is_described: bool = False

    @classmethod
    def on(cls, device: jax.Device) -> Layout:
        """Everything on one device."""
        return cls(devices=(device,))

    @classmethod
    def of(cls, plan: ShardingPlan) -> Layout:
        """Over a plan's mesh."""
        return cls(devices=tuple(plan.mesh.devices.flat), plan=plan)

    def described(self) -> Layout:
        """The same place, where nothing is put."""
        return dataclasses.replace(self, is_described=True)

    @property
    def device(self) -> jax.Device:
        """The first; its platform is that of all."""
        return self.devices[0]

    @property
    def mesh(self) -> Mesh | None:
        """None for one device."""
        return None if self.plan is None else self.plan.mesh

    @property
    def spans_processes(self) -> bool:
        """Whether some of the devices belong to other processes, which must make the same calls."""
        return any(device.process_index != jax.process_index() for device in self.devices)

    @property
    def replicated(self) -> Sharding:
        """The whole array on every device."""
        return SingleDeviceSharding(self.device) if self.plan is None else NamedSharding(self.plan.mesh, P())

    def weight(self, name: str) -> Sharding:
        """Of the weight of that name; whole on every device if the plan has none of it."""
        if self.plan is None or name not in self.plan.weights:
            return self.replicated
        return self.plan.sharding(name)

    def rows(self, count: int) -> Sharding:
        """Of inputs with so many rows: split over the axes of batches, if they divide."""
        if self.plan is None:
            return self.replicated
        return NamedSharding(self.plan.mesh, P(batch_axes(self.plan.mesh, count)))

    def put_like(self, array: np.ndarray, other: jax.Array) -> jax.Array:
        """An array of the host, the same in every process, split as another one."""
        return _put(array, other.sharding)

    def put(self, tree: Any) -> Any:
        """Arrays of the host, whole on every device."""
        return jax.tree.map(lambda array: self.place(array, self.replicated), tree)

    def put_rows(self, tree: Any) -> Any:
        """Arrays of the host whose first axis goes over rows of a batch."""
        return jax.tree.map(lambda array: self.place(array, self.rows(array.shape[0] if array.ndim else 0)), tree)

    def place(self, array: Any, where: Sharding) -> Any:
        """An array of the host, split so."""
        return describe(array, where) if self.is_described else _put(array, where)

    @property
    def key(self) -> str:
        """Identifies it among those of this run."""
        if self.plan is None:
            return f"device {self.device.id}"
        specs = sorted((name, str(weight.spec)) for name, weight in self.plan.weights.items())
        text = repr((dict(self.plan.mesh.shape), [d.id for d in self.devices], specs))
        return hashlib.sha256(text.encode()).hexdigest()


def describe(array: Any, where: Sharding) -> jax.ShapeDtypeStruct:
    """What stands for an array there."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)


def from_slices(shape: tuple[int, ...], where: Sharding, part: Callable[[tuple[slice, ...]], np.ndarray]) -> jax.Array:
    """An array of the parts that `part` gives for the devices of this process."""
    callback: Any = part
    return jax.make_array_from_callback(shape, where, callback)


def _put(array: Any, where: Sharding) -> jax.Array:
    if where.is_fully_addressable or isinstance(array, jax.Array):
        return jax.device_put(array, where)
    host = np.asarray(array)
    return from_slices(host.shape, where, lambda index: host[index])


def to_host(array: jax.Array) -> np.ndarray:
    """The whole array in this process's memory, a copy; every process of the run must ask for it."""
    if not (array.is_fully_addressable or array.is_fully_replicated):
        everywhere = NamedSharding(array.sharding.mesh, P())  # pyright: ignore[reportAttributeAccessIssue]
        array = jax.jit(lambda a: a, out_shardings=everywhere)(array)
    return np.array(array)
