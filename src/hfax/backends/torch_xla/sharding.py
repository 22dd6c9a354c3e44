"""Sharding a model over several torch_xla devices (SPMD), with the same plan as on JAX.

XLA partitions the programs; `mark_sharding` annotates weights and caches. The data, fsdp, expert and tensor axes mean the same as
on JAX; weights of models without a tensor-parallel plan are replicated, since inferring their roles requires JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hfax.backends.torch_xla import runtime
from hfax.errors import BackendNotAvailableError, UnsupportedOptionError
from hfax.load.skeleton import Skeleton
from hfax.sharding.mesh import TENSOR, batch_axes, make_mesh, size_of
from hfax.sharding.partition import ShardingPlan, make_plan


class _Device:
    """A torch_xla device, by index."""

    platform = "torch_xla"

    def __init__(self, number: int) -> None:
        self.id = number


class Spread:
    """Devices, the sharding plan of a model's weights, and their sharding annotations.

    Args:
        skeleton: the model.
        parallelism: "auto", or sizes by axis.

    Raises:
        UnsupportedOptionError: `parallelism` is neither.
        InvalidInputError: `make_mesh` rejects the sizes.
        BackendNotAvailableError: torch_xla already runs without SPMD.
    """

    def __init__(self, skeleton: Skeleton, parallelism: Any) -> None:
        sizes = parallelism if isinstance(parallelism, str) else dict(parallelism) if _is_sizes(parallelism) else None
        if sizes is None:
            raise UnsupportedOptionError(
                'The backend torch_xla supports only parallelism="auto" or sizes by axis.',
                "Name patterns and JAX meshes require JAX.",
                'Pass for example parallelism={"data": 2, "tensor": 4}, or use backend="jax".',
            )
        number = runtime.module("runtime").global_runtime_device_count()
        mesh = make_mesh(sizes, skeleton.module.config, [_Device(i) for i in range(number)])
        if mesh.size != number:
            raise UnsupportedOptionError(
                f"parallelism uses {mesh.size} of {number} devices.",
                "torch_xla programs run on all devices of a process.",
                "Choose sizes with a product equal to the number of devices; data or fsdp can take the rest.",
            )
        self.plan: ShardingPlan = make_plan(skeleton.module, skeleton.shapes, mesh, roles=dict)
        self._mesh: Any = None
        if number > 1:
            _use_spmd()
            spmd = runtime.module("distributed.spmd")
            ids = np.array([device.id for device in mesh.devices.flat])
            self._mesh = spmd.Mesh(ids, tuple(mesh.shape.values()), tuple(mesh.shape))

    def mark(self, name: str, tensor: torch.Tensor) -> None:
        """Shard a weight by the plan as soon as it is on the device."""
        if name in self.plan.weights:
            self._split(tensor, tuple(self.plan.weights[name].spec))

    def mark_weights(self, skeleton: Skeleton) -> None:
        """Shard the module's parameters by the plan."""
        held = skeleton.module.state_dict(keep_vars=True)
        for name in self.plan.weights:
            self.mark(name, held[name])

    def place(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Place a tensor on the devices: caches sharded by heads and rows, inputs by rows, everything else replicated."""
        if tensor.device.type != "xla":
            tensor = tensor.to(runtime.device())
        mesh = self.plan.mesh
        axes: list[Any] = [None] * tensor.ndim
        kind = name.rpartition(".")[2]
        if name.startswith("cache.") and kind in ("keys", "values") and tensor.ndim == 4:
            if tensor.shape[1] % size_of(mesh, TENSOR) == 0:
                axes[1] = TENSOR
            axes[0] = batch_axes(mesh, tensor.shape[0])
        elif name and tensor.ndim:
            axes[0] = batch_axes(mesh, tensor.shape[0])
        if any(axes):
            self._split(tensor, tuple(axes))
        return tensor

    def _split(self, tensor: torch.Tensor, axes: tuple[Any, ...]) -> None:
        if self._mesh is not None:
            runtime.module("distributed.spmd").mark_sharding(tensor, self._mesh, axes)


def _is_sizes(parallelism: Any) -> bool:
    return isinstance(parallelism, Mapping) and all(isinstance(size, int) for size in parallelism.values())


def _use_spmd() -> None:
    devices = runtime.module("runtime")
    if devices.is_spmd():
        return
    try:
        devices.use_spmd()
    except RuntimeError as error:
        raise BackendNotAvailableError(
            "torch_xla could not switch to several devices (SPMD).",
            str(error).splitlines()[0],
            "Load the model with parallelism before anything else in this process uses torch_xla.",
        ) from error
