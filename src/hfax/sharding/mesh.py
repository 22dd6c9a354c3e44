"""The mesh that a model is spread over.

Turns what a user asks for (`"auto"`, sizes by axis, a `jax.sharding.Mesh`) and a configuration into a mesh with the five axes that
the rest of hfax knows:

- `data`: batches are split, weights are on every device.
- `fsdp`: batches are split, and so are weights, which are put together when they are needed.
- `expert`: experts of mixtures are split.
- `tensor` and `group`: heads and inner widths are split, between them as many ways as the user's `tensor` says. Keys and values are
  split over `tensor` alone, which is no larger than there are heads of them, so devices of one `group` hold the same ones.

It does not know weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PretrainedConfig

from hfax.errors import InvalidInputError

# JAX's own classes; without JAX, classes of the same shape, which a backend that has no JAX turns into its own.
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

DATA, FSDP, EXPERT, TENSOR, GROUP = AXES = ("data", "fsdp", "expert", "tensor", "group")
BATCH_AXES = (DATA, FSDP)
HEAD_AXES = (TENSOR, GROUP)
EXPERT_AXES = (EXPERT, TENSOR, GROUP)
GIVEN_AXES = AXES[:-1]
"""The axes that users name; `group` is made from `tensor`."""


def make_mesh(
    parallelism: str | Mapping[str, int] | Mesh, config: PretrainedConfig, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with the axes `AXES`.

    Args:
        parallelism: "auto" for all devices; sizes by axis ("data", "fsdp", "expert", "tensor"; left out: 1), for as many of the
            devices as their product says; or a mesh with axes of these names.
        config: of the model.
        devices: those there are; None: all of this run.

    Raises:
        InvalidInputError: unknown axes, more devices than there are, or heads that `tensor` does not divide.
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
                f"parallelism={parallelism!r} is not known.",
                "It says over which axes of a mesh the model is spread.",
                f'Use "auto", sizes such as {{"tensor": 4}} by the axes {", ".join(GIVEN_AXES)}, or a jax.sharding.Mesh.',
            )
        else:
            sizes = _checked_sizes(parallelism)
        wanted = math.prod(sizes.values())
        if wanted > len(devices):
            raise InvalidInputError(
                f"A mesh of {' x '.join(f'{n} {s}' for n, s in sizes.items())} needs {wanted} devices; there are {len(devices)}.",
                "Every place of a mesh is a device.",
                f"Make the sizes' product at most {len(devices)}, or start hfax where there are more devices.",
            )
        grid = _grid(devices[:wanted], [sizes[name] for name in GIVEN_AXES])
    heads, kv_heads = attention_heads(config)
    tensor = sizes[TENSOR]
    if heads is not None and heads % tensor:
        divisors = [n for n in range(2, heads + 1) if heads % n == 0]
        raise InvalidInputError(
            f"{heads} attention heads cannot be divided among {tensor} devices.",
            'The axis "tensor" gives every device whole heads.',
            f"Use a size that divides {heads}: {', '.join(map(str, divisors))}; the rest of the devices fit on another axis.",
        )
    split = math.gcd(tensor, kv_heads) if kv_heads else tensor
    shape = (sizes[DATA], sizes[FSDP], sizes[EXPERT], split, tensor // split)
    return Mesh(np.asarray(grid).reshape(shape), AXES)


def fitting_sizes(config: PretrainedConfig, count: int) -> Iterator[dict[str, int]]:
    """Sizes by axis of the meshes of `count` devices that divide the model's heads and experts, without "fsdp"."""
    heads, _ = attention_heads(config)
    experts = num_experts(config)
    for tensor in (n for n in range(1, count + 1) if count % n == 0 and (n == 1 or (heads and heads % n == 0))):
        rest = count // tensor
        for expert in (n for n in range(1, rest + 1) if rest % n == 0 and (n == 1 or (experts and experts % n == 0))):
            yield {DATA: rest // expert, FSDP: 1, EXPERT: expert, TENSOR: tensor}


def choose_sizes(config: PretrainedConfig, count: int) -> dict[str, int]:
    """Of those as many as divide the heads on "tensor"; of the rest, experts, then batches."""
    return max(fitting_sizes(config, count), key=lambda sizes: (sizes[TENSOR], sizes[EXPERT]))


def attention_heads(config: PretrainedConfig) -> tuple[int | None, int | None]:
    """Query heads, and heads of keys and values, of the text part; None where the config does not say."""
    text: Any = config.get_text_config(decoder=True)
    heads = _number(text, "num_attention_heads", "decoder_attention_heads", "n_head", "num_heads")
    return heads, _number(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def num_experts(config: PretrainedConfig) -> int | None:
    """Experts of a mixture; None if it is none."""
    text: Any = config.get_text_config(decoder=True)
    return _number(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def batch_axes(mesh: Mesh, rows: int) -> tuple[str, ...] | None:
    """The axes over which so many rows are split; None where they do not divide."""
    for axes in (BATCH_AXES, (DATA,), (FSDP,)):
        if (size := math.prod(mesh.shape[a] for a in axes)) > 1 and rows and rows % size == 0:
            return axes
    return None


def expert_axes(mesh: Mesh, experts: int) -> tuple[str, ...]:
    """The axes over which so many experts are split: all that there are, if they divide; else the largest part that does."""
    for axes in (EXPERT_AXES, (EXPERT, TENSOR), (EXPERT,)):
        if (size := math.prod(mesh.shape[a] for a in axes)) > 1 and experts % size == 0:
            return axes
    return ()


def size_of(mesh: Mesh, axes: str | Sequence[str] | None) -> int:
    """Into how many parts these axes split."""
    if axes is None:
        return 1
    return math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes))


def _checked_sizes(given: Mapping[str, int]) -> dict[str, int]:
    unknown = sorted(set(given) - set(GIVEN_AXES))
    bad = {name: size for name, size in given.items() if not isinstance(size, int) or size < 1}
    if unknown or bad:
        raise InvalidInputError(
            f"A mesh of hfax has no {', '.join(f'axis {name!r}' for name in unknown)}."
            if unknown
            else f"Sizes of a mesh are positive whole numbers; {bad} are not.",
            f"Its axes are {', '.join(GIVEN_AXES)}.",
            'For instance parallelism={"data": 2, "tensor": 4}.',
        )
    return {name: given.get(name, 1) for name in GIVEN_AXES}


def _grid(devices: list[Any], shape: list[int]) -> np.ndarray:
    """The devices in an order that puts neighbours of the last axes close together on a TPU."""
    if devices and devices[0].platform == "tpu":
        from jax.experimental import mesh_utils

        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(shape)


def _number(config: Any, *names: str) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), None)
