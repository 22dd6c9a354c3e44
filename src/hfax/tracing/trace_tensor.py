"""The tensor that torch code sees inside a trace: a `jax.Array`, or a constant that still lives on the host.

torchax's own tensor forgets which storage it shares, so that a write through `view`, `transpose`, `select` or `chunk` is lost; and
it makes every constant a traced value, on which no Python `if` can look. `TraceTensor` keeps both. A view remembers its base and
how it came from it; after an operation in place, `wrote` brings the base and all its other views up to date. A constant that comes
from shapes, not from inputs, keeps its torch tensor: operations among constants run in torch itself, exactly, and their values can
steer Python code; the moment one meets a traced tensor it becomes part of the program. This module does not know which operations
exist.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._mode_utils as mode_utils
import torchax.tensor
from torchax.ops import mappings

from hfax.errors import UnsupportedModelError, running_line
from hfax.kernels.quantized import QuantizedArray
from hfax.load.host_arrays import to_numpy
from hfax.tracing.observations import note_read

_META = torch.device("meta")
Array = Any
Forward = Callable[[Array], Array]
"""From a base's array to its view's."""
WriteBack = Callable[[Array, Array], Array]
"""From a base's array and its view's new array to the base's new array."""


class TraceTensor(torchax.tensor.Tensor):
    """A torch tensor of a trace.

    Args:
        elem: a `jax.Array` (or tracer); or a torch tensor on the CPU, for a constant; or a quantized weight, of which operations
            that do not know it see the numbers.
        env: the environment that it belongs to.
        requires_grad: as in torch; unused, gradients are JAX's.
        strides: those that torch's tensor would have, in elements; None: a contiguous one's, or the constant's own. They decide, in
            torch's own code, what of `reshape`, `contiguous` and `view` is a copy.
    """

    _array: Array | None
    _host: torch.Tensor | None

    @staticmethod
    def __new__(
        cls: Any, elem: Any, env: Any, requires_grad: bool = False, strides: tuple[int, ...] | None = None
    ) -> TraceTensor:
        is_constant = isinstance(elem, torch.Tensor)
        dtype = elem.dtype if is_constant else mappings.j2t_dtype(elem.dtype)
        strides = elem.stride() if is_constant else strides
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(elem.shape), strides=strides, dtype=dtype, device=_META
        )

    def __init__(
        self, elem: Any, env: Any, requires_grad: bool = False, strides: tuple[int, ...] | None = None
    ) -> None:
        self._env = env
        self._quantized: QuantizedArray | None = None
        if isinstance(elem, torch.Tensor):
            self._array, self._host = None, elem
        elif isinstance(elem, QuantizedArray):
            self._array, self._host, self._quantized = None, None, elem
        else:
            self._array, self._host = elem, None
        self._base_tensor: TraceTensor | None = None
        self._forward: Forward | None = None
        self._write_back: WriteBack | None = None
        self._views: list[weakref.ref[TraceTensor]] = []
        self._sum: tuple[TraceTensor, int] | None = None
        self.at_least: int | None = None
        self.at_most: int | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl

    # What it holds

    @property
    def _elem(self) -> Array:
        if self._host is not None:  # made anew each time: a later write in place changes the host's value
            return constant_array(self._host)
        if self._quantized is not None:
            return self._quantized.dequantize()
        return self._array

    @_elem.setter
    def _elem(self, array: Array) -> None:
        self._array, self._host, self._quantized = array, None, None
        self._sum = self.at_least = self.at_most = None  # they were the old value's

    @property
    def quantized(self) -> QuantizedArray | None:
        """The integers and scales, if it is a weight that is kept so."""
        return self._quantized

    @property
    def host(self) -> torch.Tensor | None:
        """The constant's value; None for what is traced."""
        return self._host

    @property
    def array(self) -> Array | None:
        """The array; None for a constant and for a quantized weight."""
        return self._array

    @property
    def is_wide(self) -> bool:
        """Whether it is traced and holds whole numbers of 64 bits."""
        return self._array is not None and self._array.dtype == jnp.int64

    @property
    def has_shared_storage(self) -> bool:
        """Whether another tensor is a view of its storage, or it of another's."""
        return self._base_tensor is not None or any(view() is not None for view in self._views)

    def narrow_to(self, dtype: Any) -> None:
        """Hold the same numbers in fewer bits; only for a traced tensor that shares no storage."""
        assert self._array is not None
        assert not self.has_shared_storage
        self._array = self._array.astype(dtype)

    def jax(self) -> Array:
        """The array; a constant becomes part of the program."""
        return self._elem

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self._shaped.shape) if self._host is None else self._host.shape

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return self._shaped.ndim if self._host is None else self._host.ndim

    def dim(self) -> int:
        """Number of axes."""
        return self.ndim

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return mappings.j2t_dtype(self._shaped.dtype) if self._host is None else self._host.dtype

    @property
    def _shaped(self) -> Any:
        """What has its shape and dtype."""
        return self._array if self._quantized is None else self._quantized

    @property
    def data(self) -> TraceTensor:  # type: ignore[override]
        return self

    @data.setter
    def data(self, other: Any) -> None:
        self._elem = other._elem
        self.wrote()

    # What is known of a traced scalar: the number it is above another one, and its bounds

    @property
    def as_sum(self) -> tuple[TraceTensor, int]:
        """A scalar as another one plus a number: two scalars over the same one have a difference that is known."""
        return self._sum or (self, 0)

    def is_sum(self, other: TraceTensor, number: int) -> None:
        """Remember that this scalar is `other` plus `number`."""
        root, before = other.as_sum
        self._sum = (root, before + number)
        self.at_least = None if other.at_least is None else other.at_least + number
        self.at_most = None if other.at_most is None else other.at_most + number

    def is_difference(self, number: int, other: TraceTensor) -> None:
        """Remember that this scalar is `number` minus `other`."""
        self.at_least = None if other.at_most is None else number - other.at_most
        self.at_most = None if other.at_least is None else number - other.at_least

    def compare(self, name: str, number: int) -> bool | None:
        """What a comparison ("eq", "ne", "gt", "ge", "lt", "le") with a number gives, if the scalar's bounds decide it."""
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        is_above, is_below = low > number, high < number
        if name in ("eq", "ne"):
            return (name == "ne") if is_above or is_below else None
        if name in ("gt", "le"):
            return (name == "gt") if is_above else (name == "le") if high <= number else None
        return (name == "ge") if low >= number else (name == "lt") if is_below else None

    # Values, which only constants have on the host

    def _constant(self, what: str) -> torch.Tensor:
        if self._host is None and not isinstance(self._elem, jax.core.Tracer):
            self._host = torch.from_numpy(np.array(self._elem))
        if self._host is None:
            if note_read(what):  # a diagnosis goes on with any value
                with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                    return (
                        torch.zeros(self.shape, dtype=self.dtype)
                        if self.dtype == torch.bool
                        else torch.ones(self.shape)
                    )
            raise ValueReadError(what, self.shape, self.dtype)
        return self._host

    def tolist(self) -> Any:
        """As torch's, for constants."""
        return self._constant("tolist()").tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:  # type: ignore[override]
        """As torch's, for constants."""
        return self._constant("numpy()").numpy()

    def item(self) -> Any:
        """As torch's, for constants; of a traced scalar itself, which is an error as soon as Python needs the number."""
        if self._host is None and self.numel() == 1 and isinstance(self._elem, jax.core.Tracer):
            return self.reshape(())
        return self._constant("item()").item()

    def __bool__(self) -> bool:
        return bool(self._constant("bool()"))

    def __int__(self) -> int:
        return int(self._constant("int()"))

    def __index__(self) -> int:
        return self._constant("an index").__index__()

    def __float__(self) -> float:
        return float(self._constant("float()"))

    def __str__(self) -> str:
        return f"TraceTensor({self._elem if self._host is None else self._host})"

    __repr__ = __str__  # type: ignore[assignment]

    # torchax's own versions of these lose the storage or change the source

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> torch.Tensor:  # type: ignore[override]
        """As torch's; a view where torch gives one."""
        rank = max(self.ndim, 1)
        start, end = start_dim % rank, end_dim % rank
        return self.reshape((*self.shape[:start], -1, *self.shape[end + 1 :]))

    def type_as(self, other: torch.Tensor) -> Any:
        """As torch's."""
        return self.to(other.dtype)

    def detach(self) -> Any:
        """As torch's: no gradient flows, the storage is shared."""
        if self._host is not None:
            return self
        detached = TraceTensor(jax.lax.stop_gradient(self._elem), self._env)
        detached.is_view_of(self, jax.lax.stop_gradient, lambda base, new: new)
        return detached

    def __setitem__(self, key: Any, value: Any) -> None:
        self._env.set_item(self, key, value)

    # Shared storage

    def with_strides(self, strides: tuple[int, ...]) -> TraceTensor:
        """The same array as a new tensor that lies otherwise, and shares its storage with no other."""
        other = TraceTensor(self._array, self._env, strides=strides)
        other._sum, other.at_least, other.at_most = self._sum, self.at_least, self.at_most
        return other

    def is_view_of(self, base: TraceTensor, forward: Forward, write_back: WriteBack | None) -> None:
        """Remember that this tensor shares its storage with `base`.

        Args:
            base: the tensor it was taken from.
            forward: gives this tensor's array from the base's.
            write_back: puts this tensor's array into the base's; None: found out from `forward`.
        """
        self._base_tensor, self._forward, self._write_back = base, forward, write_back
        if len(base._views) > 16:
            base._views = [ref for ref in base._views if ref() is not None]
        base._views.append(weakref.ref(self))

    def wrote(self) -> None:
        """This tensor's array was changed in place: change what shares its storage."""
        node = self
        while node._base_tensor is not None:
            base = node._base_tensor
            assert node._forward is not None
            write_back = node._write_back or _by_index(node._forward)
            base._elem = write_back(base._elem, node._elem.astype(base._elem.dtype))
            node = base
        node._refresh(self)

    def _refresh(self, writer: TraceTensor) -> None:
        for reference in self._views:
            view = reference()
            if view is None:
                continue
            if view is not writer:
                assert view._forward is not None
                view._elem = view._forward(self._elem)
            view._refresh(writer)


class ValueReadError(Exception):
    """Python code asked for the value of a traced tensor.

    Args:
        what: how it asked.
        shape: of the tensor.
        dtype: of the tensor.
        where: the line that is to blame; None: the one that raised.
    """

    def __init__(self, what: str, shape: torch.Size, dtype: torch.dtype, where: str | None = None) -> None:
        super().__init__(f"{what} of a traced tensor, shape {tuple(shape)}, {dtype}")
        self.where = where


_in_64_bits: ContextVar[bool] = ContextVar("hfax_in_64_bits", default=False)


def is_in_64_bits() -> bool:
    """Whether whole numbers have 64 bits in the call that is carried out; see `tracing/wide_integers.py`."""
    return _in_64_bits.get()


@contextlib.contextmanager
def in_64_bits() -> Iterator[None]:
    """Within the block, calls of this thread give whole numbers 64 bits, also as `jax.Array`s."""
    token = _in_64_bits.set(True)
    try:
        with jax.enable_x64(True):
            yield
    finally:
        _in_64_bits.reset(token)


def constant_array(tensor: torch.Tensor) -> Array:
    """A constant as a part of the program; whole numbers of 64 bits as such within `in_64_bits`, else in 32."""
    if tensor.dtype == torch.int64 and is_in_64_bits():
        return jnp.asarray(tensor.detach().contiguous().numpy())
    return jnp.asarray(to_numpy(tensor))


def known_range(start: Any, stop: Any) -> Array | None:
    """The integers from `start` to `stop`, [n] int32, if n is known though both are traced; else None."""
    if not isinstance(start, TraceTensor) or not isinstance(stop, TraceTensor):
        return None
    (root, first), (other, last) = start.as_sum, stop.as_sum
    if root is not other:
        return None
    return jnp.arange(last - first, dtype=jnp.int32) + start.jax().astype(jnp.int32)


def _by_index(forward: Forward) -> WriteBack:
    """Write back through any selection or rearrangement, by following the index of each element."""

    def write_back(base: Array, new: Array) -> Array:
        with jax.ensure_compile_time_eval():
            indices = np.asarray(forward(jnp.arange(base.size, dtype=jnp.int32).reshape(base.shape))).reshape(-1)
        if indices.size and np.bincount(indices).max() > 1:
            raise UnsupportedModelError(
                f"{running_line()}: a part of an expanded or overlapping tensor is written in place.",
                "The tensor shows elements of its storage several times, and XLA's arrays have no strides to write through.",
                "Write to a copy (clone()) or to the tensor before expand(); for a model of others, register a patch.",
            )
        return base.reshape(-1).at[indices].set(new.reshape(-1)).reshape(base.shape)

    return write_back
