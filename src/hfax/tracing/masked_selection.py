"""`x[mask]` with a traced mask: a tensor of unknown length.

It can be counted, and combined with a tensor of known length: it is then assumed to have that length, and the program returns the
condition, so that the host can raise if it is false. Anything else needs the length, which is read between programs
(`hfax.tracing.host_reads`); where that is not possible, it raises `ValueReadError`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfax.errors import running_line
from hfax.kernels.masked_rows import masked_rows
from hfax.patches.control_flow import note_check
from hfax.tracing.host_reads import read
from hfax.tracing.trace_tensor import TraceTensor, ValueReadError, constant_array


def known_places(mask: jax.Array) -> tuple[jax.Array, ...] | None:
    """The indices where a mask is true, one array of known length for each axis; None if the number cannot be read here."""
    if (count := read(mask.sum(dtype=jnp.int32), "the number of places in a mask")) is None:
        return None
    return jnp.nonzero(mask, size=int(count))


def _of_known(name: str) -> Callable[..., Any]:
    """A method that is the tensor's own, once its length is known."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.known(), name)(*args, **kwargs)

    return method


class MaskedSelection:
    """The selection by a traced mask.

    Args:
        array: the array to select from, [*mask, *rest].
        mask: bool mask.
        wrap: wraps an array as a tensor of the trace.
        number: the number of selected entries, if it is known and checked.
    """

    def __init__(
        self, array: jax.Array, mask: jax.Array, wrap: Callable[[jax.Array], TraceTensor], number: int | None = None
    ) -> None:
        self._array, self._mask, self._wrap, self._number = array, mask, wrap, number
        self._rest = array.shape[mask.ndim :]
        self._made_at = running_line()
        self._known: TraceTensor | None = None

    def known(self) -> TraceTensor:
        """The selected values, [n, *rest], with n read between programs.

        Raises:
            ValueReadError: values cannot be read here.
        """
        if self._known is None and self._number is not None:
            self._known = self._first(self._number)
        if self._known is None:
            if (places := known_places(self._mask)) is None:
                raise self.error()
            self._known = self._wrap(self._array[places])
        return self._known

    def numel(self) -> TraceTensor:
        """The number of selected values, a traced scalar."""
        count = self._mask.sum(dtype=jnp.int32)
        for size in self._rest:
            count = count * size
        return self._wrap(count)

    def to(self, *args: Any, **kwargs: Any) -> MaskedSelection:
        """Like `torch.Tensor.to`: convert the dtype."""
        dtype = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)), None)
        if dtype is None:
            return self
        array = self._wrap(self._array).to(dtype).jax()  # pyright: ignore[reportAttributeAccessIssue]
        return MaskedSelection(array, self._mask, self._wrap, self._number)

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of selected entries, a traced scalar, and the remaining sizes."""
        return (self._wrap(self._mask.sum(dtype=jnp.int32)), *self._rest)

    def view(self, *sizes: Any) -> SelectionByRow | torch.Tensor:
        """The selection in each row of the mask; the program returns whether all rows select equally many entries.

        Args:
            *sizes: rows of the mask, -1 for the unknown size, and the other axes, unchanged; for any others, the length is read.
        """
        if self._mask.ndim != 2 or tuple(sizes) != (self._mask.shape[0], -1, *self._rest):
            return self.known().view(*sizes)
        counts = self._mask.sum(axis=1)
        note_check(self._wrap(counts == counts[0]), "a mask must select as many places in each row")
        return SelectionByRow(self._array, self._mask, self._wrap, self.error)

    reshape = view

    def left_aligned(self) -> jax.Array:
        """[rows, places, *rest]: the selected values of each row of the mask, followed by the others."""
        if self._mask.ndim != 2:
            raise self.error()
        order = jnp.argsort(~self._mask, axis=1, stable=True)
        return self._array[jnp.arange(len(order))[:, None], order]

    def clone(self) -> MaskedSelection:
        """Return itself: it is immutable."""
        return self

    def _first(self, number: int) -> TraceTensor:
        places = jnp.nonzero(self._mask.reshape(-1), size=number, fill_value=0)[0]
        return self._wrap(self._array.reshape(self._mask.size, *self._rest)[places])

    def _check(self, number: int) -> None:
        note_check(self._wrap(self._mask.sum(dtype=jnp.int32) == number), f"a mask must select {number} places")

    def written(self, array: jax.Array, mask: jax.Array) -> jax.Array:
        """`array` after the selected values were written through `mask`; the program returns whether the counts match."""
        if mask is self._mask:
            return jnp.where(
                mask.reshape(*mask.shape, *(1 for _ in self._rest)), self._array.astype(array.dtype), array
            )
        counts = self._mask.sum(dtype=jnp.int32) == mask.sum(dtype=jnp.int32)
        note_check(self._wrap(counts), "two masks must select as many places")
        return masked_rows(array, mask, self._first(self._mask.size).jax())

    def _combine(self, other: Any, operation: Callable[[Any, Any], Any]) -> Any:
        if isinstance(other, MaskedSelection) and other._mask is self._mask:
            both = operation(self._wrap(self._array), other._wrap(other._array))
            return MaskedSelection(both.jax(), self._mask, self._wrap, self._number or other._number)
        if isinstance(other, torch.Tensor) and other.ndim == len(self._rest) + 1 and other.shape[0] > 1:
            return self._combined_with_rows(other, operation)
        if isinstance(other, (int, float)) or (isinstance(other, torch.Tensor) and other.ndim <= len(self._rest)):
            array = operation(self._wrap(self._array), other).jax()
            return MaskedSelection(array, self._mask, self._wrap, self._number)
        return operation(self.known(), other.known() if isinstance(other, MaskedSelection) else other)

    def _combined_with_rows(self, other: Any, operation: Callable[[Any, Any], Any]) -> MaskedSelection:
        """The selection combined with a tensor [n, *rest], whose rows are placed where the mask is set."""
        self._check(number := other.shape[0])
        rows = other.jax() if isinstance(other, TraceTensor) else constant_array(other)
        placed = masked_rows(jnp.zeros((*self._mask.shape, *rows.shape[1:]), rows.dtype), self._mask, rows)
        return MaskedSelection(
            operation(self._wrap(self._array), self._wrap(placed)).jax(), self._mask, self._wrap, number
        )

    def __add__(self, other: Any) -> Any:
        return self._combine(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._combine(other, operator.sub)

    def __mul__(self, other: Any) -> Any:
        return self._combine(other, operator.mul)

    def __truediv__(self, other: Any) -> Any:
        return self._combine(other, operator.truediv)

    __radd__, __rmul__ = __add__, __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = {"add": operator.add, "mul": operator.mul}.get(getattr(func, "__name__", ""))
        if name is not None and len(args) == 2 and isinstance(args[1], cls):
            return args[1]._combine(args[0], name)
        known = jax.tree.map(
            lambda a: a.known() if isinstance(a, cls) else a, (args, kwargs or {}), is_leaf=lambda a: isinstance(a, cls)
        )
        return func(*known[0], **known[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.known(), name)

    def error(self) -> ValueReadError:
        """The error for operations that need the length."""
        return ValueReadError("indexing with a boolean mask", torch.Size(self._mask.shape), torch.bool, self._made_at)

    __len__, __iter__, __bool__ = _of_known("__len__"), _of_known("__iter__"), _of_known("__bool__")
    __getitem__, __setitem__ = _of_known("__getitem__"), _of_known("__setitem__")
    __neg__, __invert__ = _of_known("__neg__"), _of_known("__invert__")


class SelectionByRow:
    """The selection by a traced mask in each row: only the last entry of each row can be read.

    Args:
        array: [rows, places, *rest].
        mask: [rows, places] bool.
        wrap: wraps an array as a tensor of the trace.
        error: returns the error for anything else.
    """

    def __init__(
        self,
        array: jax.Array,
        mask: jax.Array,
        wrap: Callable[[jax.Array], TraceTensor],
        error: Callable[[], ValueReadError],
    ) -> None:
        self._array, self._mask, self._wrap, self._error = array, mask, wrap, error

    def __getitem__(self, index: Any) -> TraceTensor:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) < 2 or parts[1] != -1 or any(p not in (slice(None), Ellipsis) for p in (parts[0], *parts[2:])):
            raise self._error()
        places = jnp.arange(self._mask.shape[1], dtype=jnp.int32)
        last = jnp.where(self._mask, places, -1).max(axis=1)
        return self._wrap(self._array[jnp.arange(len(self._array)), last])

    def __getattr__(self, name: str) -> Any:
        raise self._error()


class DistinctRuns:
    """The result of `unique_consecutive` on a traced tensor: it can be counted.

    Args:
        array: [n].
        wrap: wraps an array as a tensor of the trace.
    """

    def __init__(self, array: jax.Array, wrap: Callable[[jax.Array], TraceTensor]) -> None:
        self._array, self._wrap = array, wrap
        self._made_at = running_line()

    def numel(self) -> TraceTensor:
        """The number of runs of equal values, a traced scalar."""
        return self._wrap((self._array[1:] != self._array[:-1]).sum(dtype=jnp.int32) + min(len(self._array), 1))

    def known(self) -> TraceTensor:
        """The first value of each run, [n], with n read between programs.

        Raises:
            ValueReadError: values cannot be read here.
        """
        starts = jnp.ones(self._array.shape, bool).at[1:].set(self._array[1:] != self._array[:-1])
        if (places := known_places(starts)) is None:
            raise ValueReadError("unique_consecutive()", torch.Size(self._array.shape), torch.int64, self._made_at)
        return self._wrap(self._array[places])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.known(), name)

    __len__, __iter__, __bool__ = _of_known("__len__"), _of_known("__iter__"), _of_known("__bool__")
    __getitem__ = _of_known("__getitem__")
    __add__, __sub__, __mul__ = _of_known("__add__"), _of_known("__sub__"), _of_known("__mul__")


class MaskPlaces(tuple[Any, ...]):
    """The result of `torch.where(mask)` with a traced mask: usable as an index, equivalent to the mask."""

    mask: TraceTensor

    @classmethod
    def of(cls, mask: TraceTensor) -> MaskPlaces:
        """The indices where `mask` is true."""
        found = cls()
        found.mask = mask
        found.made_at = running_line()
        return found

    made_at: str = ""

    def known(self) -> tuple[TraceTensor, ...]:
        """The indices, [n] for each axis, with n read between programs.

        Raises:
            ValueReadError: values cannot be read here.
        """
        if (places := known_places(self.mask.jax())) is None:
            raise ValueReadError("where()", self.mask.shape, torch.bool, self.made_at)
        return tuple(self.mask._env.wrap(p) for p in places)

    __len__, __iter__, __bool__ = _of_known("__len__"), _of_known("__iter__"), _of_known("__bool__")  # type: ignore[assignment]
    __getitem__, __add__ = _of_known("__getitem__"), _of_known("__add__")  # type: ignore[assignment]
