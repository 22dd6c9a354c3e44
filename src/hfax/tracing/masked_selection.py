"""`x[mask]` with a traced mask: a tensor of unknown length.

It can be counted, and combined with a tensor of known length: it is then assumed to have that length, and the program returns the
condition, so that the host can raise if it is false. Anything else raises `ValueReadError`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfax.errors import running_line
from hfax.patches.control_flow import note_check
from hfax.tracing.trace_tensor import TraceTensor, ValueReadError


class MaskedSelection:
    """The selection by a traced mask.

    Args:
        array: the array to select from, [*mask, *rest].
        mask: bool mask.
        wrap: wraps an array as a tensor of the trace.
    """

    def __init__(self, array: jax.Array, mask: jax.Array, wrap: Callable[[jax.Array], TraceTensor]) -> None:
        self._array, self._mask, self._wrap = array, mask, wrap
        self._rest = array.shape[mask.ndim :]
        self._made_at = running_line()

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
        return MaskedSelection(self._wrap(self._array).to(dtype).jax(), self._mask, self._wrap)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of selected entries, a traced scalar, and the remaining sizes."""
        return (self._wrap(self._mask.sum(dtype=jnp.int32)), *self._rest)

    def view(self, rows: int, number: int, *rest: int) -> SelectionByRow:
        """The selection in each row of the mask; the program returns whether all rows select equally many entries.

        Args:
            rows: rows of the mask.
            number: -1, the unknown size.
            *rest: the other axes, unchanged.
        """
        if number != -1 or self._mask.ndim != 2 or rows != self._mask.shape[0] or rest != self._rest:
            raise self.error()
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

    def rows(self, number: int) -> TraceTensor:
        """The selected values as [number, *rest]; the program returns whether the count matches."""
        mask = self._mask.reshape(-1)
        note_check(self._wrap(mask.sum(dtype=jnp.int32) == number), f"a mask must select {number} places")
        places = jnp.nonzero(mask, size=number, fill_value=0)[0]
        return self._wrap(self._array.reshape(mask.size, *self._rest)[places])

    def under(self, mask: jax.Array) -> TraceTensor:
        """The selected values with padding, to be written through `mask`; the program returns whether the counts match."""
        if mask is not self._mask:
            counts = self._mask.sum(dtype=jnp.int32) == mask.sum(dtype=jnp.int32)
            note_check(self._wrap(counts), "two masks must select as many places")
        places = jnp.nonzero(self._mask.reshape(-1), size=self._mask.size, fill_value=0)[0]
        return self._wrap(self._array.reshape(self._mask.size, *self._rest)[places])

    def _combine(self, other: Any, operation: Callable[[Any, Any], Any]) -> Any:
        if isinstance(other, MaskedSelection) and other._mask is self._mask:
            both = operation(self._wrap(self._array), other._wrap(other._array))
            return MaskedSelection(both.jax(), self._mask, self._wrap)
        if isinstance(other, torch.Tensor) and other.ndim == len(self._rest) + 1 and other.shape[0] != 1:
            return operation(self.rows(other.shape[0]), other)
        if isinstance(other, (int, float)) or (isinstance(other, torch.Tensor) and other.ndim <= len(self._rest)):
            return MaskedSelection(operation(self._wrap(self._array), other).jax(), self._mask, self._wrap)
        raise self.error()

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
        raise next(a for a in args if isinstance(a, cls)).error()

    def __getattr__(self, name: str) -> Any:
        raise self.error()

    def error(self) -> ValueReadError:
        """The error for operations that need the length."""
        return ValueReadError("indexing with a boolean mask", torch.Size(self._mask.shape), torch.bool, self._made_at)

    def _fail(self, *args: Any) -> Any:
        raise self.error()

    __len__ = __iter__ = __bool__ = __getitem__ = __setitem__ = __neg__ = __invert__ = _fail


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

    def _fail(self, *args: Any) -> Any:
        raise ValueReadError("unique_consecutive()", torch.Size(self._array.shape), torch.int64, self._made_at)

    __getattr__ = __len__ = __iter__ = __getitem__ = __bool__ = __add__ = __sub__ = __mul__ = _fail


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

    def _fail(self, *args: Any) -> Any:
        raise ValueReadError("where()", self.mask.shape, torch.bool, self.made_at)

    __len__ = __iter__ = __getitem__ = __bool__ = __add__ = _fail  # type: ignore[assignment]
