"""Which platform a program is being made for, and which ways of computing were chosen for it.

A trace that knows where it will run, because its program is compiled next, says so with `compiling_for`. Everything else, above all
`model.apply` under a user's own `jax.jit` or `jax.grad`, has no target and gets plain JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar

import jax

from hfax.sharding.mesh import HEAD_AXES, TENSOR, size_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Where a program will run.

    Args:
        platform: "cpu", "gpu" or "tpu".
        mesh: the devices, with the axes of `hfax.sharding.mesh`; None: one device.
        pages: caches are kept in pages, as TPU's kernel reads them.
        is_differentiated: gradients are taken through the program, so kernels without one are left out.
        chosen: gets a line for each way of computing that was chosen; shown by `hfax doctor`.
    """

    platform: str
    mesh: jax.sharding.Mesh | None = None
    pages: bool = False
    is_differentiated: bool = False
    chosen: set[str] = dataclasses.field(default_factory=set, compare=False)


_target: ContextVar[Target | None] = ContextVar("hfax_target", default=None)


def current() -> Target | None:
    """The target of the trace that is going on; None if it is not known."""
    return _target.get()


def is_for(platform: str) -> bool:
    """Whether the trace that goes on is for a program on that platform."""
    return (target := _target.get()) is not None and target.platform == platform


def is_differentiated() -> bool:
    """Whether gradients are taken through the program that the trace is for, as far as that is known."""
    return (target := _target.get()) is not None and target.is_differentiated


def mesh() -> jax.sharding.Mesh | None:
    """The devices of the program that the trace is for, if there are several."""
    return None if (target := _target.get()) is None else target.mesh


def head_shards() -> tuple[int, int]:
    """Into how many parts query heads are split, and heads of keys and values."""
    if (devices := mesh()) is None:
        return 1, 1
    return size_of(devices, HEAD_AXES), size_of(devices, TENSOR)


def choose(way: str) -> None:
    """Note that `way` was chosen."""
    if (target := _target.get()) is not None:
        target.chosen.add(way)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Within the block the target is not known, so that everything is plain JAX."""
    token = _target.set(None)
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
    chosen: set[str] | None = None,
) -> Iterator[Target]:
    """Traces within the block are for programs that run on `device`, or on a platform of that name.

    Args:
        device: where.
        mesh: see `Target`.
        pages: see `Target`; None: on TPU.
        is_differentiated: see `Target`.
        chosen: see `Target`.
    """
    platform = device if isinstance(device, str) else device.platform
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    target = Target(
        platform=platform,
        mesh=mesh,
        pages=platform == "tpu" if pages is None else pages,
        is_differentiated=is_differentiated,
        chosen=set() if chosen is None else chosen,
    )
    token = _target.set(target)
    try:
        yield target
    finally:
        _target.reset(token)
