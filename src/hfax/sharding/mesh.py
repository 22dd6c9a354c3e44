"""The mesh that a model is sharded over.

Turns the user's `parallelism` (`"auto"`, sizes by axis, a `jax.sharding.Mesh`) and a configuration into a mesh with the five axes
used in the rest of hfax:

- `data`: batches are split, weights are replicated.
- `fsdp`: batches and weights are split; weights are gathered when needed.
- `expert`: experts of mixtures are split.
- `tensor` and `group`: heads and inner widths are split; the product of both axes is the user's `tensor`. Keys and values are split
  only over `tensor`, which is at most the number of key and value heads, so devices of one `group` hold the same ones.

This module does not know weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.errors import InvalidInputError

# JAX's classes; without JAX, equivalent classes that other backends convert to their own.
if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from transformers import PretrainedConfig
else:
    try:
        from jax.sharding import Mesh, NamedSharding, PartitionSpec
    except ImportError:

        class PartitionSpec(tuple):
            """For each array axis, the mesh axes that split it: a name, several, or None."""

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
            """A mesh and a partition spec."""

            def __init__(self, mesh: Mesh, spec: PartitionSpec) -> None:
                self.mesh, self.spec = mesh, spec


P = PartitionSpec

DATA, FSDP, EXPERT, TENSOR, GROUP = AXES = ("data", "fsdp", "expert", "tensor", "group")
BATCH_AXES = (DATA, FSDP)
HEAD_AXES = (TENSOR, GROUP)
EXPERT_AXES = (EXPERT, TENSOR, GROUP)
GIVEN_AXES = AXES[:-1]
"""The user-facing axes; `group` is derived from `tensor`."""


def make_mesh(
    parallelism: str | Mapping[str, int] | Mesh, config: PretrainedConfig, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with the axes `AXES`.

    Args:
        parallelism: "auto" for all devices; sizes by axis ("data", "fsdp", "expert", "tensor"; default 1), using as many devices
            as their product; or a mesh with axes of these names.
        config: the model's config.
        devices: available devices; None: all of this run.

    Raises:
        InvalidInputError: an axis is unknown, there are not enough devices, or `tensor` does not divide the heads.
    """
    if isinstance(parallelism, Mesh):
        sizes = _checked_sizes(dict(parallelism.shape))
        order = [parallelism.axis_names.index(name) for name in GIVEN_AXES if name in parallelism.axis_names]
        grid = parallelism.devices.transpose(order)
    else:
        if devices is None:
            import jax

            devices = jax.devices()
        devices = list(devices)
        if parallelism == "auto":
            sizes = choose_sizes(config, len(devices))
        elif isinstance(parallelism, str):
            raise InvalidInputError(
                f"parallelism={parallelism!r} is not a known value.",
                "It sets the mesh axes over which the model is sharded.",
                f'Use "auto", sizes such as {{"tensor": 4}} by the axes {", ".join(GIVEN_AXES)}, or a jax.sharding.Mesh.',
            )
        else:
            sizes = _checked_sizes(parallelism)
        wanted = math.prod(sizes.values())
        if wanted > len(devices):
            raise InvalidInputError(
                f"A mesh of {' x '.join(f'{n} {s}' for n, s in sizes.items())} needs {wanted} devices; there are {len(devices)}.",
                "The product of the sizes is the number of devices used.",
                f"Choose sizes with a product of at most {len(devices)}, or run hfax on more devices.",
            )
        grid = _grid(devices[:wanted], [sizes[name] for name in GIVEN_AXES])
    heads, kv_heads = attention_heads(config)
    tensor = sizes[TENSOR]
    if heads is not None and heads % tensor:
        divisors = [n for n in range(2, heads + 1) if heads % n == 0]
        raise InvalidInputError(
            f"{heads} attention heads cannot be divided among {tensor} devices.",
            'The axis "tensor" assigns whole heads to each device.',
            f"Use a size that divides {heads}: {', '.join(map(str, divisors))}; put remaining devices on another axis.",
        )
    split = math.gcd(tensor, kv_heads) if kv_heads else tensor
    shape = (sizes[DATA], sizes[FSDP], sizes[EXPERT], split, tensor // split)
    return Mesh(np.asarray(grid).reshape(shape), AXES)


def fitting_sizes(config: PretrainedConfig, count: int) -> Iterator[dict[str, int]]:
    """Sizes by axis of all meshes of `count` devices that divide the model's heads and experts, without "fsdp"."""
    heads, _ = attention_heads(config)
    experts = num_experts(config)
    for tensor in (n for n in range(1, count + 1) if count % n == 0 and (n == 1 or (heads and heads % n == 0))):
        rest = count // tensor
        for expert in (n for n in range(1, rest + 1) if rest % n == 0 and (n == 1 or (experts and experts % n == 0))):
            yield {DATA: rest // expert, FSDP: 1, EXPERT: expert, TENSOR: tensor}


def choose_sizes(config: PretrainedConfig, count: int) -> dict[str, int]:
    """The sizes with the largest "tensor" that divides the heads, then the largest "expert", then "data"."""
    return max(fitting_sizes(config, count), key=lambda sizes: (sizes[TENSOR], sizes[EXPERT]))


def attention_heads(config: PretrainedConfig) -> tuple[int | None, int | None]:
    """Query heads, and key and value heads, of the text model; None if not in the config."""
    text: Any = config.get_text_config(decoder=True)
    heads = _number(text, "num_attention_heads", "decoder_attention_heads", "n_head", "num_heads")
    return heads, _number(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def num_experts(config: PretrainedConfig) -> int | None:
    """Number of experts of a mixture; None for dense models."""
    text: Any = config.get_text_config(decoder=True)
    return _number(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def batch_axes(mesh: Mesh, rows: int) -> tuple[str, ...] | None:
    """The axes over which `rows` rows are split; None if they do not divide."""
    for axes in (BATCH_AXES, (DATA,), (FSDP,)):
        if (size := math.prod(mesh.shape[a] for a in axes)) > 1 and rows and rows % size == 0:
            return axes
    return None


def expert_axes(mesh: Mesh, experts: int) -> tuple[str, ...]:
    """The axes over which the experts are split: all, if they divide; else the largest subset that does."""
    for axes in (EXPERT_AXES, (EXPERT, TENSOR), (EXPERT,)):
        if (size := math.prod(mesh.shape[a] for a in axes)) > 1 and experts % size == 0:
            return axes
    return ()


def size_of(mesh: Mesh, axes: str | Sequence[str] | None) -> int:
    """The number of shards over these axes."""
    if axes is None:
        return 1
    return math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes))


def _checked_sizes(given: Mapping[str, int]) -> dict[str, int]:
    unknown = sorted(set(given) - set(GIVEN_AXES))
    bad = {name: size for name, size in given.items() if not isinstance(size, int) or size < 1}
    if unknown or bad:
        raise InvalidInputError(
            f"An hfax mesh has no {', '.join(f'axis {name!r}' for name in unknown)}."
            if unknown
            else f"Mesh sizes must be positive integers; {bad} are not.",
            f"Its axes are {', '.join(GIVEN_AXES)}.",
            'Pass for example parallelism={"data": 2, "tensor": 4}.',
        )
    return {name: given.get(name, 1) for name in GIVEN_AXES}


def _grid(devices: list[Any], shape: list[int]) -> np.ndarray:
    """The devices in an order that keeps neighbours along the last axes close together on a TPU."""
    if devices and devices[0].platform == "tpu" and hasattr(devices[0], "coords"):
        from jax.experimental import mesh_utils

        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(shape)


def _number(config: Any, *names: str) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), None)
