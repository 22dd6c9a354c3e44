"""`x[index]` and `x[index] = value` with torch's rules, on arrays.

Turns torch's index expressions into JAX's. Indices with data-dependent result sizes (a traced boolean mask, a traced slice bound)
cannot be compiled: reading raises, writing through a mask becomes a select between old and new values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer

from hfax.kernels.masked_rows import masked_rows
from hfax.kernels.target import may_be_differentiated
from hfax.load.host_arrays import to_numpy
from hfax.tracing.masked_selection import MaskedSelection, MaskPlaces, known_places
from hfax.tracing.subgradients import with_value
from hfax.tracing.trace_tensor import TraceTensor, ValueReadError, known_range

Array = Any


def is_basic(index: Any) -> bool:
    """Whether an index of arrays and static parts is basic indexing, so that the result is a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(p is None or p is Ellipsis or (isinstance(p, (int, slice)) and not isinstance(p, bool)) for p in parts)


def static_index(index: Any) -> Any:
    """torch's index with constants as Python numbers and numpy arrays, and traced tensors as `jax.Array`s."""
    if isinstance(index, MaskPlaces):
        return _part(index.mask)
    if isinstance(index, tuple):
        return tuple(_part(p) for p in index)
    if isinstance(index, list):
        if any(isinstance(p, (slice, type(None), torch.Tensor)) or p is Ellipsis for p in index):
            return tuple(_part(p) for p in index)
        return _part(index)
    return _part(index)


def _part(part: Any) -> Any:
    if isinstance(part, slice):
        if part.step is None and (numbers := known_range(part.start, part.stop)) is not None:
            return numbers
        return slice(*(_bound(b) for b in (part.start, part.stop, part.step)))
    if isinstance(part, MaskedSelection):
        part = part.known()
    if isinstance(part, TraceTensor):
        host = part.host
        if host is None:
            array = part.jax()
            return array if isinstance(array, Tracer) else np.asarray(array)
        part = host
    if isinstance(part, torch.Tensor):
        if part.ndim == 0 and part.dtype != torch.bool:
            return int(part)
        return to_numpy(part)
    if isinstance(part, (list, range)):
        return np.asarray([_part(p) for p in part])
    if isinstance(part, np.integer):
        return int(part)
    return part


def _bound(bound: Any) -> int | None:
    return bound if bound is None or isinstance(bound, int) else bound.__index__()


def read(array: Array, index: Any) -> Array:
    """`array[index]`, the index from `static_index`.

    Raises:
        ValueReadError: the result's size would depend on the values of a traced mask.
    """
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if _is_mask(part) and part.ndim:
            if (places := known_places(part)) is None:
                raise ValueReadError("indexing with a boolean mask", torch.Size(part.shape), torch.bool)
            parts += places
        else:
            parts.append(part)
    return array[tuple(parts)]


def write(array: Array, index: Any, value: Any) -> Array:
    """`array` after `array[index] = value`, with the index from `static_index`."""
    value = jnp.asarray(value).astype(array.dtype)
    parts = index if isinstance(index, tuple) else (index,)
    masks = [i for i, p in enumerate(parts) if isinstance(p, jax.Array) and p.dtype == jnp.bool_]
    if not masks:
        return _put(array, index, _fitted(value, array, index))
    if len(masks) > 1 or any(not isinstance(p, slice) or p != slice(None) for p in parts if not _is_mask(p)):
        return _write_known("writing through a boolean mask among other indices", array, parts, value)
    lead, mask = masks[0], parts[masks[0]]
    rest = array.ndim - lead - mask.ndim
    wide = mask.reshape((1,) * lead + mask.shape + (1,) * rest)
    if (value.ndim <= rest and lead == 0) or value.size == 1:
        return jnp.where(wide, value if value.size > 1 else value.reshape(()), array)
    if lead == 0 and value.ndim == rest + 1:
        return masked_rows(array, mask, value)
    return _write_known("writing several values through a boolean mask", array, parts, value)


def _write_known(what: str, array: Array, parts: tuple[Any, ...], value: Array) -> Array:
    """The write, with the numbers of places in its masks read between programs."""
    index: list[Any] = []
    for part in parts:
        if _is_mask(part):
            if (places := known_places(part)) is None:
                raise ValueReadError(what, torch.Size(part.shape), torch.bool)
            index += places
        else:
            index.append(part)
    return _put(array, tuple(index), _fitted(value, array, tuple(index)))


def _put(array: Array, index: Any, value: Array) -> Array:
    """`array.at[index].set(value)` with torch's gradient: where places repeat, each of their values has that of the place."""
    if is_basic(index):
        return _put_basic(array, index, value)
    new = array.at[index].set(value)
    has_arrays = any(isinstance(p, (jax.Array, np.ndarray)) for p in (index if isinstance(index, tuple) else (index,)))
    if not has_arrays or not may_be_differentiated() or not jnp.issubdtype(array.dtype, jnp.floating):
        return new
    is_kept = jnp.ones(array.shape, bool).at[index].set(False)
    return with_value(jnp.where(is_kept, array, 0).at[index].add(value), new)


def _put_basic(array: Array, index: Any, value: Array) -> Array:
    """`array.at[index].set(value)` for numbers and slices, without the scatter that JAX makes of it.

    A contiguous part is updated in place; with steps, the value is spread over the array, and selected.
    """
    shape = jax.eval_shape(lambda a: a[index], array).shape
    if 0 in shape:
        return array
    index = index if isinstance(index, tuple) else (index,)
    cut = next((i for i, part in enumerate(index) if part is Ellipsis), len(index))
    rest = array.ndim - sum(part is not None and part is not Ellipsis for part in index)
    parts = [*index[:cut], *[slice(None)] * rest, *index[cut + 1 :]]
    given = jnp.broadcast_to(value, shape)
    given = given.squeeze([i for i, part in enumerate(p for p in parts if not isinstance(p, int)) if part is None])
    parts = [part for part in parts if part is not None]
    given = jnp.expand_dims(given, [i for i, part in enumerate(parts) if isinstance(part, int)])
    places = [np.atleast_1d(np.arange(size)[part]) for size, part in zip(array.shape, parts, strict=True)]
    starts = [int(found[0]) for found in places]
    steps = [int(found[1] - found[0]) if len(found) > 1 else 1 for found in places]
    if all(step == 1 for step in steps):
        return jax.lax.dynamic_update_slice(array, given, starts)
    sides = [size - int(found[-1]) - 1 for size, found in zip(array.shape, places, strict=True)]
    spread = jax.lax.pad(given, jnp.zeros((), given.dtype), [*zip(starts, sides, (s - 1 for s in steps), strict=True)])
    for axis, found in enumerate(places):
        is_written = np.isin(np.arange(array.shape[axis]), found)
        if not is_written.all():
            spread = jnp.where(is_written.reshape(-1, *(1 for _ in array.shape[axis + 1 :])), spread, array)
    return spread


def _is_mask(part: Any) -> bool:
    return isinstance(part, jax.Array) and part.dtype == jnp.bool_


def _fitted(value: Array, array: Array, index: Any) -> Array:
    """Drop leading axes of size 1 that the target lacks, which torch allows."""
    target = jax.eval_shape(lambda a: a[index], array).ndim if value.ndim else 0
    while value.ndim > target and value.shape[0] == 1:
        value = value[0]
    return value


def whole_mask(index: Any) -> Array | None:
    """The mask if the index is one traced boolean mask over the leading axes, optionally followed by `:`; else None."""
    parts = index if isinstance(index, tuple) else (index,)
    rest = [p for p in parts[1:] if p is not Ellipsis and not (isinstance(p, slice) and p == slice(None))]
    return parts[0] if parts and not rest and _is_mask(parts[0]) and parts[0].ndim else None


def make_reader(index: Any) -> tuple[Callable[[Array], Array], Callable[[Array, Array], Array]]:
    """For a basic index: functions from the base array to the view's array, and back."""
    return lambda array: array[index], lambda array, new: _put_basic(array, index, new)
