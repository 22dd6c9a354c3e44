"""JAX's words for how arrays lie over devices; where JAX is not installed, what has the same shape and means the same.

Plans are made of these. A backend that has no JAX reads them and says the same in its own words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
else:
    try:
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
    except ImportError:

        class PartitionSpec(tuple):
            """For each axis of an array, the mesh's axes that split it: a name, several, or None."""

            def __new__(cls, *axes: Any) -> PartitionSpec:
                return super().__new__(cls, axes)

            def __repr__(self) -> str:
                return f"PartitionSpec{tuple(self)!r}"

        class Mesh:
            """Devices in an array with named axes."""

            def __init__(self, devices: Any, axis_names: tuple[str, ...]) -> None:
                self.devices = np.asarray(devices, dtype=object)
                self.axis_names = tuple(axis_names)
                self.shape = dict(zip(self.axis_names, self.devices.shape, strict=True))
                self.size = self.devices.size

        class NamedSharding:
            """A mesh and a spec."""

            def __init__(self, mesh: Mesh, spec: PartitionSpec) -> None:
                self.mesh, self.spec = mesh, spec


P = PartitionSpec
__all__ = ["Mesh", "NamedSharding", "P", "PartitionSpec"]
