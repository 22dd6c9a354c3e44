"""Calls on constants, which torch itself executes on the host.

A constant is a tensor whose value is known: a plain torch tensor, or a tensor of the trace that holds one. Results are constants
again, and views of constants stay views, unless they are so large that the program should compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._mode_utils as mode_utils
import torchax.tensor

from hfax.tracing.operands import is_torch_tensor, map_leaves, tensors_in
from hfax.tracing.trace_tensor import TraceTensor
from hfax.tracing.views import link_host_view

_MAX_HOST_ELEMENTS = 1 << 16
"""Larger constants are computed by the program instead of being stored in it."""
TOO_LARGE = object()
"""The result of `run_on_host` for a result that the program should compute."""


def is_host(value: Any) -> bool:
    """Whether a tensor is a constant."""
    if isinstance(value, TraceTensor):
        return value.host is not None
    return not isinstance(value, (torchax.tensor.Tensor, torchax.tensor.View))


def to_host(value: Any) -> Any:
    """The torch tensor of a constant; the CPU for a device."""
    if isinstance(value, TraceTensor):
        return value.host
    if isinstance(value, torch.Tensor):
        return value
    return torch.device("cpu")


def _is_tensor_or_device(value: Any) -> bool:
    return (
        is_torch_tensor(value)
        or isinstance(value, torch.device)
        or (isinstance(value, str) and value.partition(":")[0] in ("jax", "privateuseone", "meta"))
    )


def run_on_host(func: Any, args: Any, kwargs: Any, wrap: Callable[[torch.Tensor], TraceTensor]) -> Any:
    """Run torch's function on constants; `TOO_LARGE` if the program should compute the result instead.

    Args:
        func: torch's function.
        args: its positional arguments, with constants as the only tensors.
        kwargs: its keyword arguments.
        wrap: makes a constant of the trace from a torch tensor.
    """
    inputs: list[TraceTensor] = [t for t in tensors_in((args, kwargs)) if isinstance(t, TraceTensor)]
    with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        plain_args = map_leaves(_is_tensor_or_device, to_host, args)
        plain_kwargs = map_leaves(_is_tensor_or_device, to_host, kwargs)
        result = func(*plain_args, **plain_kwargs)
    by_identity = {id(t.host): t for t in inputs}
    if any(r.numel() > _MAX_HOST_ELEMENTS and id(r) not in by_identity for r in tensors_in(result)):
        return TOO_LARGE

    def back(tensor: torch.Tensor) -> TraceTensor:
        if id(tensor) in by_identity:
            return by_identity[id(tensor)]
        wrapped = wrap(tensor)
        link_host_view(wrapped, inputs)
        return wrapped

    return map_leaves(is_torch_tensor, back, result)
