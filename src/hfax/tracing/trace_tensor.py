"""The tensor that torch code sees inside a trace: a `jax.Array`, or a constant on the host.

torchax's own tensor does not track shared storage, so a write through `view`, `transpose`, `select` or `chunk` is lost; and it
traces every constant, so no Python `if` can read it. `TraceTensor` handles both. A view stores its base and how it was derived;
after an in-place operation, `wrote` updates the base and all its other views. A constant derived from shapes, not from inputs,
keeps its torch tensor: operations among constants run in torch, exactly, and Python code can branch on their values; once combined
with a traced tensor it becomes part of the program. This module does not know which operations exist.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

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
from hfax.tracing import host_reads

if TYPE_CHECKING:
    from hfax.kernels.latents import Latents
    from hfax.kernels.paged import Pages, PromptKeys
    from hfax.kernels.pool import Pool
    from hfax.patches.masks import MaskStructure

_META = torch.device("meta")
_DEVICE = torch.device("privateuseone", 0)
Array = Any
Forward = Callable[[Array], Array]
"""From the base array to the view's array."""
WriteBack = Callable[[Array, Array], Array]
"""From the base array and the view's new array to the new base array."""


class TraceTensor(torchax.tensor.Tensor):
    """A torch tensor of a trace.

    Args:
        elem: a `jax.Array` (or tracer); a torch tensor on the CPU, for a constant; or a quantized weight, which operations without
            support for it see dequantized.
        env: the environment of the tensor.
        requires_grad: as in torch; unused, since JAX computes gradients.
        strides: strides of the equivalent torch tensor, in elements; None: contiguous, or the constant's own. torch's code uses
            them to decide whether `reshape`, `contiguous` and `view` copy.
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
        self.mask_structure: MaskStructure | None = None
        """What is known about a mask besides its values."""
        self.pages: Pages | PromptKeys | None = None
        """The paged cache that these keys or values stand for; of a prompt's, what attention tells of them."""
        self.held: jax.Array | None = None
        """The cache's own numbers, of a smaller dtype, that these keys or values were made of."""
        self.scales: tuple[float, float] | None = None
        """Of keys: what the cache, its pages or its pool holds is to be multiplied by, keys and values; None: it is not scaled."""
        self.unscaled: jax.Array | None = None
        """The cache's own numbers in the dtype of these keys or values, if they are scaled."""
        self.latents: Latents | None = None
        """What these keys, and the values beside them, are made of; they are not expanded yet."""
        self.pool: Pool | None = None
        """The pool of pages that these keys were written to; attention reads it instead of them."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    # Contents

    @property
    def device(self) -> torch.device:
        """torch's device for backends of others, without the name "jax" that torchax gives it for the whole process."""
        return _DEVICE

    @property
    def _elem(self) -> Array:
        if self._host is not None:  # converted each time: a later in-place write changes the host value
            return constant_array(self._host)
        if self._quantized is not None:
            return self._quantized.dequantize()
        return self._array

    @_elem.setter
    def _elem(self, array: Array) -> None:
        self._array, self._host, self._quantized = array, None, None
        self._sum = self.at_least = self.at_most = None  # they were the old value's
        self.pages = self.held = self.pool = self.scales = self.unscaled = self.latents = None

    @property
    def quantized(self) -> QuantizedArray | None:
        """The integers and scales of a quantized weight, else None."""
        return self._quantized

    @property
    def host(self) -> torch.Tensor | None:
        """The constant's value; None for a traced tensor."""
        return self._host

    @property
    def array(self) -> Array | None:
        """The array; None for a constant and for a quantized weight."""
        return self._array

    @property
    def is_wide(self) -> bool:
        """Whether it is traced and holds 64-bit integers."""
        return self._array is not None and self._array.dtype == jnp.int64

    @property
    def has_shared_storage(self) -> bool:
        """Whether it shares storage with another tensor as base or view."""
        return self._base_tensor is not None or any(view() is not None for view in self._views)

    def narrow_to(self, dtype: Any) -> None:
        """Convert to a narrower dtype in place; only for a traced tensor that shares no storage."""
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

    # Static knowledge of a traced scalar: its offset from another one, and its bounds

    @property
    def as_sum(self) -> tuple[TraceTensor, int]:
        """A scalar as another one plus a constant: scalars with the same base have a known difference."""
        return self._sum or (self, 0)

    def is_sum(self, other: TraceTensor, number: int) -> None:
        """Record that this scalar is `other` plus `number`."""
        root, before = other.as_sum
        self._sum = (root, before + number)
        self.at_least = None if other.at_least is None else other.at_least + number
        self.at_most = None if other.at_most is None else other.at_most + number

    def is_difference(self, number: int, other: TraceTensor) -> None:
        """Record that this scalar is `number` minus `other`."""
        self.at_least = None if other.at_most is None else number - other.at_most
        self.at_most = None if other.at_least is None else number - other.at_least

    def compare(self, name: str, number: int) -> bool | None:
        """The result of a comparison ("eq", "ne", "gt", "ge", "lt", "le") with a number, if the bounds decide it; else None."""
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
            if (value := host_reads.read(self._elem, what)) is None:
                raise ValueReadError(what, self.shape, self.dtype)
            with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                return torch.from_numpy(np.array(value))
        return self._host

    def tolist(self) -> Any:
        """As torch's, for constants."""
        return self._constant("tolist()").tolist()

    def numpy(self, *, force: bool = False) -> np.ndarray:  # type: ignore[override]
        """As torch's, for constants."""
        return self._constant("numpy()").numpy()

    def item(self) -> Any:
        """As torch's, for constants; a traced scalar returns itself, and raises once Python needs its value."""
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
        """The same array as a new tensor with other strides and its own storage."""
        other = TraceTensor(self._array, self._env, strides=strides)
        other._sum, other.at_least, other.at_most = self._sum, self.at_least, self.at_most
        return other

    def is_view_of(self, base: TraceTensor, forward: Forward, write_back: WriteBack | None) -> None:
        """Record that this tensor shares its storage with `base`.

        Args:
            base: the tensor it is a view of.
            forward: maps the base array to this tensor's array.
            write_back: writes this tensor's array into the base array; None: derived from `forward`.
        """
        self._base_tensor, self._forward, self._write_back = base, forward, write_back
        if len(base._views) > 16:
            base._views = [ref for ref in base._views if ref() is not None]
        base._views.append(weakref.ref(self))

    def wrote(self) -> None:
        """Propagate an in-place change of this tensor to the tensors that share its storage."""
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
    """Python code read the value of a traced tensor.

    Args:
        what: the operation that read it.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        where: the responsible line; None: the line that raised.
    """

    def __init__(self, what: str, shape: torch.Size, dtype: torch.dtype, where: str | None = None) -> None:
        super().__init__(f"{what} of a traced tensor, shape {tuple(shape)}, {dtype}")
        self.where = where


_in_64_bits: ContextVar[bool] = ContextVar("hfax_in_64_bits", default=False)


def is_in_64_bits() -> bool:
    """Whether integers have 64 bits in the current call; see `tracing/wide_integers.py`."""
    return _in_64_bits.get()


@contextlib.contextmanager
def in_64_bits() -> Iterator[None]:
    """Within the block, calls of this thread use 64-bit integers, also as `jax.Array`s."""
    token = _in_64_bits.set(True)
    try:
        with jax.enable_x64(True):
            yield
    finally:
        _in_64_bits.reset(token)


def constant_array(tensor: torch.Tensor) -> Array:
    """A constant as part of the program; 64-bit integers stay 64-bit within `in_64_bits`, else become 32-bit."""
    if tensor.dtype == torch.int64 and is_in_64_bits():
        return jnp.asarray(tensor.detach().contiguous().numpy())
    return jnp.asarray(to_numpy(tensor))


def known_range(start: Any, stop: Any) -> Array | None:
    """The integers from `start` to `stop`, [n] int32, if n is known although both are traced; else None."""
    if not isinstance(start, TraceTensor) or not isinstance(stop, TraceTensor):
        return None
    (root, first), (other, last) = start.as_sum, stop.as_sum
    if root is not other:
        return None
    return jnp.arange(last - first, dtype=jnp.int32) + start.jax().astype(jnp.int32)


def _by_index(forward: Forward) -> WriteBack:
    """Write back through any selection or rearrangement by tracking element indices."""

    def write_back(base: Array, new: Array) -> Array:
        with jax.ensure_compile_time_eval():
            indices = np.asarray(forward(jnp.arange(base.size, dtype=jnp.int32).reshape(base.shape))).reshape(-1)
        if indices.size and np.bincount(indices).max() > 1:
            raise UnsupportedModelError(
                f"{running_line()}: a part of an expanded or overlapping tensor is written in place.",
                "Several elements of the tensor share storage, and XLA arrays have no strides to write through.",
                "Write to a copy (clone()) or to the tensor before expand(); for third-party models, register a patch.",
            )
        return base.reshape(-1).at[indices].set(new.reshape(-1)).reshape(base.shape)

    return write_back
