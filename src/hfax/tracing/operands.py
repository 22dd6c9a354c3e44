"""The tensors in the arguments of a torch call: found in nested lists, tuples, dicts and slices, and converted to arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import torch
import torchax.tensor

from hfax.tracing.masked_selection import MaskedSelection
from hfax.tracing.trace_tensor import TraceTensor, constant_array


def is_tensor(value: Any) -> bool:
    """Whether torch code sees a tensor; a selection by a traced mask counts, though its length is unknown."""
    return isinstance(value, (torch.Tensor, MaskedSelection))


def is_selection(value: Any) -> bool:
    """Whether a value is a selection by a traced mask."""
    return isinstance(value, MaskedSelection)


def has_selection(value: Any) -> bool:
    """Whether there is a selection by a traced mask in nested lists, tuples and dicts."""
    if isinstance(value, (tuple, list)):
        return any(has_selection(item) for item in value)
    return any(map(has_selection, value.values())) if isinstance(value, dict) else is_selection(value)


def is_torch_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, of the trace or not."""
    return isinstance(value, torch.Tensor)


def as_array(tensor: Any) -> Any:
    """The array of a tensor of any kind."""
    if isinstance(tensor, (torchax.tensor.Tensor, torchax.tensor.View)):
        return tensor.jax()
    if isinstance(tensor, torch.Tensor):
        return constant_array(tensor)
    if isinstance(tensor, MaskedSelection):
        return tensor.known().jax()
    return tensor


def as_arrays_or_quantized(value: Any) -> Any:
    """Like `TraceEnvironment.t2j_iso`, but leaves quantized weights unchanged."""
    return map_leaves(is_torch_tensor, lambda t: getattr(t, "quantized", None) or as_array(t), value)


def map_leaves(is_leaf: Callable[[Any], bool], change: Callable[[Any], Any], value: Any) -> Any:
    """Map over the leaves of nested lists, tuples, dicts and slices."""
    if is_leaf(value):
        return change(value)
    if isinstance(value, tuple):
        items = [map_leaves(is_leaf, change, v) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        if type(value) is tuple:
            return tuple(items)
        return value if isinstance(value, torch.Size) else type(value)(items)  # torch.return_types take one sequence
    if isinstance(value, list):
        return [map_leaves(is_leaf, change, v) for v in value]
    if isinstance(value, dict):
        return {k: map_leaves(is_leaf, change, v) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(map_leaves(is_leaf, change, v) for v in (value.start, value.stop, value.step)))
    return value


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors in nested lists, tuples, dicts and slices."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def has_other_strides(value: Any) -> bool:
    """Whether a traced tensor in `value` is non-contiguous in torch."""
    return any(isinstance(t, TraceTensor) and not t.is_contiguous() for t in tensors_in(value))


def with_numbers(value: Any) -> Any:
    """A list of sizes with 0-d constants as Python numbers."""
    if type(value) not in (list, tuple) or not any(isinstance(v, TraceTensor) for v in value):
        return value
    return type(value)(
        v.item() if isinstance(v, TraceTensor) and v.host is not None and not v.ndim else v for v in value
    )


def stack(data: Any) -> Any:
    """Nested lists of numbers and tensors as one array, like `torch.tensor`."""
    if isinstance(data, (list, tuple)):
        return jnp.stack([stack(d) for d in data])
    return jnp.asarray(as_array(data))
