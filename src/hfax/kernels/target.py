"""The target platform of a program, and the implementations chosen for it.

A trace with a known target, because its program is compiled next, declares it with `compiling_for`. Everything else, above all
`model.apply` under a user's own `jax.jit` or `jax.grad`, has no target and uses plain JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.sharding.mesh import HEAD_AXES, TENSOR, size_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The target of a program.

    Args:
        platform: "cpu", "gpu" or "tpu".
        device: a device of the program, possibly described by a topology; None: only the platform is known.
        mesh: the devices, with the axes of `hfax.sharding.mesh`; None: one device.
        pages: caches are paged, in the layout of the TPU kernels.
        is_differentiated: the program is differentiated, so kernels without gradients are excluded.
        is_batch_invariant: a row's products do not depend on how many rows there are (`hfax.programs.batch_invariance`).
        chosen: collects one line per chosen implementation; shown by `hfax doctor`.
    """

    platform: str
    device: jax.Device | None = None
    mesh: jax.sharding.Mesh | None = None
    pages: bool = False
    is_differentiated: bool = False
    is_batch_invariant: bool = False
    chosen: set[str] = dataclasses.field(default_factory=set, compare=False)


_TRITON_CAPABILITY = 8.0
"""bfloat16 on tensor cores."""
_target: ContextVar[Target | None] = ContextVar("hfax_target", default=None)


def current() -> Target | None:
    """The target of the current trace; None if unknown."""
    return _target.get()


def is_for(platform: str) -> bool:
    """Whether the current trace is for a program on that platform."""
    return (target := _target.get()) is not None and target.platform == platform


def nvidia_gpu() -> jax.Device | None:
    """The NVIDIA GPU, there or described, that the current trace's program is for, if it can run hfax's Triton kernels."""
    device = None if (target := _target.get()) is None or target.platform != "gpu" else target.device
    if device is None or "nvidia" not in device.device_kind.lower():
        return None
    return device if is_described(device) or float(device.compute_capability) >= _TRITON_CAPABILITY else None


def tpu() -> jax.Device | None:
    """The TPU, there or described, that the current trace's program is for; None if it is for another platform, or not known."""
    return None if (target := _target.get()) is None or target.platform != "tpu" else target.device


def is_differentiated() -> bool:
    """Whether the current trace's program is differentiated, as far as known."""
    return (target := _target.get()) is not None and target.is_differentiated


def may_be_differentiated() -> bool:
    """Whether a gradient may be taken of the current trace: it is a training step's, or nothing is known about it."""
    return (target := _target.get()) is None or target.is_differentiated


def is_batch_invariant() -> bool:
    """Whether the products of the current trace's program must not depend on the number of rows."""
    return (target := _target.get()) is not None and target.is_batch_invariant


def mesh() -> jax.sharding.Mesh | None:
    """The mesh of the current trace's program; None for one device."""
    return None if (target := _target.get()) is None else target.mesh


def head_shards() -> tuple[int, int]:
    """The number of shards of query heads, and of key and value heads."""
    if (devices := mesh()) is None:
        return 1, 1
    return size_of(devices, HEAD_AXES), size_of(devices, TENSOR)


def product_dtype(dtype: jnp.dtype, *, is_added: bool = False, is_forward: bool = False) -> jnp.dtype:
    """The dtype in which XLA returns a matrix product of arrays of `dtype`: float32 for half precision.

    On GPU it is `dtype`: the product is added up in float32 and rounded as it is written, where a float32 result would be written,
    read and rounded by a kernel of its own. Over several GPUs what is added up over devices is rounded before; XLA's GPU compiler
    would send float32, which takes twice the time. Over several TPUs that of a forward pass is rounded before, too: libtpu adds up
    routed and shared experts by one sum only if both have the same dtype.

    Args:
        dtype: of the operands.
        is_added: something is added before the result is rounded; on one GPU it then is float32.
        is_forward: it is a layer's product in a pass that is not differentiated.
    """
    is_half, is_one = dtype in (jnp.bfloat16, jnp.float16), is_one_device()
    is_rounded = not (is_added and is_one) if is_for("gpu") else is_for("tpu") and is_forward and not is_one
    return jnp.dtype(jnp.float32) if is_half and not is_rounded else dtype


def is_one_device() -> bool:
    """Whether the current trace's program is for one device."""
    devices = mesh()
    return devices is None or devices.size == 1


def choose(way: str) -> None:
    """Record that the implementation `way` was chosen."""
    if (target := _target.get()) is not None:
        target.chosen.add(way)


def is_described(device: jax.Device) -> bool:
    """Whether the device is a topology's, for which programs can be compiled but not run."""
    return type(device.client).__name__ == "CompileOnlyPyClient"


def compiler_options(
    device: jax.Device, *, has_few_rows: bool, has_packed_weights: bool = False
) -> dict[str, str | bool]:
    """XLA options of a program for the device.

    On GPU, products of many rows with the same operand are not merged: the merged weights would be written to memory in every
    prefill (20% of its time with 512 tokens). For few rows XLA reads them where they are, and saves a kernel
    (docs/performance.md). On a described GPU nothing can be tuned: XLA would run candidates on the device. On TPU7x, weights stay
    in the tiles in which they are stored, of which a program with a loop would otherwise make a copy. On v5e the compiler searched
    for minutes how to prefetch packed weights in slices, which their kernels read by themselves.

    Args:
        device: there or described.
        has_few_rows: the program is a decoding step, or a loop of them.
        has_packed_weights: weights are packed.
    """
    if device.device_kind.startswith("TPU7"):
        return {"xla_tpu_control_large_2nd_minor_layout_for_x16": False}
    if device.device_kind == "TPU v5 lite" and has_packed_weights:
        return {"xla_tpu_sliced_prefetch_max_slices": "1"}
    if device.platform not in ("gpu", "cuda", "rocm"):
        return {}
    options: dict[str, str | bool] = {} if has_few_rows else {"xla_gpu_dot_merger_threshold_mb": "0"}
    return options | ({"xla_gpu_autotune_level": "0"} if is_described(device) else {})


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Within the block the target is unknown, so everything uses plain JAX."""
    token = _target.set(None)
    try:
        yield
    finally:
        _target.reset(token)


@contextlib.contextmanager
def without_pages() -> Iterator[None]:
    """Within the block caches are not paged."""
    target = _target.get()
    token = _target.set(None if target is None else dataclasses.replace(target, pages=False))
    try:
        yield
    finally:
        _target.reset(token)


@contextlib.contextmanager
def compiling_for(
    device: jax.Device | str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    pages: bool | None = None,
    is_differentiated: bool = False,
    is_batch_invariant: bool = False,
    chosen: set[str] | None = None,
) -> Iterator[Target]:
    """Traces within the block are for programs on `device`, or on a platform of that name.

    Args:
        device: the device or platform.
        mesh: as in `Target`.
        pages: as in `Target`; None: only on TPU.
        is_differentiated: as in `Target`.
        is_batch_invariant: as in `Target`.
        chosen: as in `Target`.
    """
    platform = device if isinstance(device, str) else device.platform
    device = None if isinstance(device, str) else device
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    target = Target(
        platform=platform,
        device=device,
        mesh=mesh,
        pages=platform == "tpu" if pages is None else pages,
        is_differentiated=is_differentiated,
        is_batch_invariant=is_batch_invariant,
        chosen=set() if chosen is None else chosen,
    )
    token = _target.set(target)
    try:
        with _described(device, mesh):
            yield target
    finally:
        _target.reset(token)


def _described(device: jax.Device | None, mesh: jax.sharding.Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Within the block Pallas knows a described GPU, which it otherwise seeks among this process's devices (JAX 0.11)."""
    if device is None or device.platform not in ("gpu", "cuda") or not is_described(device):
        return contextlib.nullcontext()
    devices = jax.sharding.Mesh(np.array([device]), ("device",)) if mesh is None else mesh
    return jax.sharding.use_abstract_mesh(devices.abstract_mesh)
