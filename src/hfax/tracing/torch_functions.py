"""What is known about a torch function by itself: its name, its kind, the arguments it writes to, its functional form."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from hfax.tracing.trace_tensor import TraceTensor

CONSTRUCTORS = frozenset(
    {
        torch.ones,
        torch.zeros,
        torch.empty,
        torch.empty_strided,
        torch.tensor,
        torch.arange,
        torch.eye,
        torch.full,
        torch.as_tensor,
        torch.linspace,
        torch.logspace,
        torch.tril_indices,
        torch.triu_indices,
        torch.scalar_tensor,
        torch.from_numpy,
    }
)
"""Functions that make a tensor from numbers."""
TO = frozenset(
    {torch.Tensor.to, torch.ops.aten.lift_fresh.default, torch.ops.aten._to_copy, torch.ops.aten._to_copy.default}
)
"""Conversions of dtype and device."""
COPY = frozenset({torch.Tensor.copy_, torch.ops.aten.copy_, torch.ops.aten.copy_.default})
_RANDOM_NAMES = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "poisson")
PRODUCTS = frozenset(
    {
        "addbmm",
        "addmm",
        "addmv",
        "baddbmm",
        "bmm",
        "dot",
        "einsum",
        "inner",
        "linear",
        "matmul",
        "mm",
        "mv",
        "tensordot",
    }
    | {"__matmul__", "__rmatmul__"}
)
"""Operations that multiply matrices."""
RESHAPED_IN_PLACE = frozenset({"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_"})
"""Operations in place that change only a tensor's shape."""


@functools.lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """The name of an operation without its overload ("add"), or of a function."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.partition("::")[2]
    return getattr(func, "__name__", "")


@functools.lru_cache(maxsize=4096)
def is_random(name: str) -> bool:
    """Whether an operation of that name draws random numbers."""
    return any(part in name for part in _RANDOM_NAMES)


@functools.lru_cache(maxsize=4096)
def _written_arguments(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an aten operation writes to."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return ()
    return tuple(i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write)


def written_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[TraceTensor]:
    """The tensors among the arguments of an aten operation that it writes to."""
    for position in _written_arguments(func):
        target = args[position] if position < len(args) else kwargs.get(func._schema.arguments[position].name)
        if isinstance(target, TraceTensor):
            yield target


@functools.lru_cache(maxsize=4096)
def functional_form(func: Any, name: str) -> Any:
    """`aten.foo.Tensor` for `aten.foo_.Tensor`, if there is one."""
    if not isinstance(func, torch._ops.OpOverload) or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, func._overloadname, None)
