"""Which torch operations return a view of their first argument, and how writes through the view reach it.

Turns an operation's name and arguments into functions on arrays, and links the tensors of a trace that share storage. It executes
no operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
import torch.utils._mode_utils as mode_utils
from torch.utils._pytree import tree_map

from hfax.tracing.trace_tensor import TraceTensor

Array = Any

_RESHAPES = frozenset({"view", "reshape", "squeeze", "unsqueeze", "alias", "_reshape_alias", "detach"})
_REARRANGED = frozenset(
    {"permute", "transpose", "t", "expand", "select", "slice", "split", "split_with_sizes", "unbind"}
)
_OTHERS = frozenset({"diagonal", "unfold", "as_strided"})
VIEW_OPS = _RESHAPES | _REARRANGED | _OTHERS
"""Names of aten operations that return a view of their first argument."""


def keeps_order(name: str) -> bool:
    """Whether this operation's view of a contiguous tensor is contiguous."""
    return name in _RESHAPES


def write_back(name: str, args: tuple[Any, ...]) -> Callable[[Array, Array], Array] | None:
    """How a write through the view updates the base; None if element indices must be tracked.

    Args:
        name: name of the aten operation.
        args: its arguments after the tensor.
    """
    if name in _RESHAPES:
        return lambda base, new: new.reshape(base.shape)
    if name == "transpose":
        return lambda base, new: jnp.swapaxes(new, args[0], args[1])
    if name == "t":
        return lambda base, new: new.T
    if name == "permute":
        return lambda base, new: jnp.transpose(new, _inverse([axis % len(args[0]) for axis in args[0]]))
    return None


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def link_views(result: Any, name: str, lowering: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Link the outputs of a view operation with its first argument.

    Args:
        result: one tensor or several.
        name: name of the aten operation.
        lowering: the operation as a function of arrays.
        args: its positional arguments; the first is the base.
        kwargs: its keyword arguments.
    """
    base: TraceTensor = args[0]
    rest = tuple(args[1:])
    outputs = [result] if isinstance(result, TraceTensor) else list(result)
    for position, view in enumerate(outputs):
        if not isinstance(view, TraceTensor) or view is base:
            continue

        def forward(array: Any, position: int = position, single: bool = view is result) -> Any:
            out = lowering(array, *rest, **kwargs)
            return out if single else out[position]

        view.is_view_of(base, forward, write_back(name, rest))


def unexpanded(tensor: Any) -> Any:
    """The tensor with the axes that `expand` has made cut to one entry, which it can be broadcast from."""
    if not isinstance(tensor, TraceTensor) or tensor.host is not None or 0 not in tensor.stride():
        return tensor
    strides = tensor.stride()
    return TraceTensor(tensor.jax()[tuple(slice(None) if s else slice(0, 1) for s in strides)], tensor._env)


def link_host_view(view: TraceTensor, inputs: list[TraceTensor]) -> None:
    """Record that a constant shares an argument's storage, in case a traced value is written there later."""
    plain = view.host
    assert plain is not None
    for base in inputs:
        root = base
        while root._base_tensor is not None:
            root = root._base_tensor
        storage = root.host
        if storage is None or storage.data_ptr() == 0 or not storage.is_contiguous():
            continue
        if storage.untyped_storage().data_ptr() != plain.untyped_storage().data_ptr() or storage.dtype != plain.dtype:
            continue
        offset = int(plain.storage_offset()) - int(storage.storage_offset())
        view.is_view_of(root, _by_strides(tuple(plain.shape), plain.stride(), offset), None)
        return


def _by_strides(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Callable[[Any], Any]:
    """The view of a contiguous array with the given torch strides."""

    def forward(array: Any) -> Any:
        with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            index = torch.arange(array.size).as_strided(shape, strides, offset).numpy()
        return array.reshape(-1)[index]

    return forward


def with_torch_strides(
    call: Callable[..., Any], args: Any, kwargs: Any, result: Any, *, is_linked_later: bool = False
) -> Any:
    """The result of a call with torch's strides: tensors with other strides are replaced by new ones.

    Args:
        call: the torch operation, run on meta tensors.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
        result: its result in the trace: one tensor, several, or anything else.
        is_linked_later: the tensors will be linked with their base; otherwise existing views are unchanged.
    """
    outputs = [result] if isinstance(result, TraceTensor) else result
    if not isinstance(outputs, (tuple, list)) or not any(isinstance(o, TraceTensor) and o.ndim for o in outputs):
        return result
    with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
        try:
            theirs = call(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
        except (RuntimeError, NotImplementedError, TypeError):  # torch has no meta implementation for it
            return result
        plain = [theirs] if isinstance(theirs, torch.Tensor) else theirs
        places = [(tuple(t.shape), t.stride()) if isinstance(t, torch.Tensor) else None for t in plain]

    def restrided(ours: Any, place: Any) -> Any:
        if not isinstance(ours, TraceTensor) or ours.array is None or place is None:
            return ours
        if (tuple(ours.shape), ours.stride()) == place or tuple(ours.shape) != place[0]:
            return ours
        if ours.has_shared_storage and not is_linked_later:
            return ours
        return ours.with_strides(place[1])

    changed = [restrided(o, p) for o, p in zip(outputs, places, strict=False)]
    if all(new is old for new, old in zip(changed, outputs, strict=False)):
        return result
    if isinstance(result, TraceTensor):
        return changed[0]
    return type(result)(*changed) if hasattr(result, "_fields") else type(result)(changed)


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="meta")
    return value
