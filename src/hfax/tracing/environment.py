"""How each torch call of a trace is executed: by a lowering on arrays, by torch itself on constants.

One `TraceEnvironment` sits between the modelling code and torchax's table of lowerings. It adds what that table lacks: constants
that stay on the host, views that share storage, in-place forms of every functional operation, torch's type promotion of 0-d
operands, and plain torch tensors mixed with traced ones. It does not know models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._mode_utils as mode_utils
import torchax.tensor
from torchax.ops import mappings

from hfax.tracing import indexing, wide_integers
from hfax.tracing.lowerings import LOWERINGS, REFUSED
from hfax.tracing.masked_selection import DistinctRuns, MaskedSelection, MaskPlaces
from hfax.tracing.observations import note_missing, note_wide
from hfax.tracing.trace_tensor import (
    TraceTensor,
    ValueReadError,
    constant_array,
    in_64_bits,
    is_in_64_bits,
    known_range,
)
from hfax.tracing.views import VIEW_OPS, keeps_order, link_host_view, link_views, with_torch_strides

_MAX_HOST_ELEMENTS = 1 << 16
"""Larger constants are computed by the program instead of being stored in it."""

_CONSTRUCTORS = frozenset(
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
_TO = frozenset(
    {torch.Tensor.to, torch.ops.aten.lift_fresh.default, torch.ops.aten._to_copy, torch.ops.aten._to_copy.default}
)
_COPY = frozenset({torch.Tensor.copy_, torch.ops.aten.copy_, torch.ops.aten.copy_.default})
_RANDOM_NAMES = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "poisson")
_ARITHMETIC = (
    "add sub mul div rsub true_divide floor_divide pow maximum minimum fmod remainder lerp addcmul addcdiv atan2 hypot"
)
_SCALAR_AWARE = frozenset([*_ARITHMETIC.split(), "where", "masked_fill", "clamp", "clamp_min", "clamp_max"])
"""Operations in which torch promotes a 0-d operand to the dtype of the others."""
_RESHAPED_IN_PLACE = frozenset({"unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_"})
_COMPARISONS = frozenset({"eq", "ne", "gt", "ge", "lt", "le"})

OperatorNotFound = torchax.tensor.OperatorNotFound


class TraceEnvironment(torchax.tensor.Environment):
    """torchax's environment with hfax's rules. Entered for one trace at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()
        """Names of patch lowerings used since the set was cleared."""
        for op, function in LOWERINGS.items():
            self.lower(op, function)

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Execute one torch call."""
        kwargs = kwargs or {}
        if is_in_64_bits() or not wide_integers.needs_64_bits(
            _name(func), list(_tensors((args, kwargs))), (*args, *kwargs.values())
        ):
            return self._carry_out(func, args, kwargs)
        if func is torch.ops.aten.scalar_tensor.default:  # from `where`, in the dtype of its other operand
            kwargs = {**kwargs, "dtype": torch.int64}
        with self._in_64_bits(_name(func)):
            return wide_integers.settled(_name(func), args, self._carry_out(func, args, kwargs))

    @contextlib.contextmanager
    def _in_64_bits(self, name: str) -> Iterator[None]:
        """Within the block, integers have JAX's 64-bit types."""
        try:
            with in_64_bits():
                yield
        except (TypeError, OverflowError) as error:  # a lowering that supports only 32 bits
            raise wide_integers.refusal(name, str(error).splitlines()[0]) from error

    def _carry_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _CONSTRUCTORS:
            return self._construct(func, args, kwargs)
        if func in _TO:
            return self._to(args, kwargs)
        if func in _COPY:
            return self._copy(*args, **kwargs)
        if func is torch.ops.aten.contiguous.default and isinstance(args[0], TraceTensor):
            return args[0] if args[0].is_contiguous() else self.wrap(args[0].jax())
        if func is torch.Tensor.__getitem__:
            return self.get_item(args[0], args[1])
        tensors = list(_tensors((args, kwargs)))
        name = _name(func)
        if any(t.device.type == "meta" for t in tensors if not isinstance(t, torchax.tensor.Tensor)):
            raise RuntimeError(f"{name} got a weight that was never loaded")
        if tensors and not any(isinstance(t, torchax.tensor.Tensor) for t in tensors):
            return func(*args, **kwargs)
        if tensors and all(_is_host(t) for t in tensors) and not _is_random(name):
            result = self._on_host(func, args, kwargs)
            if result is not _TOO_LARGE:
                return result
        try:
            return self._traced(func, name, args, kwargs)
        except TypeError as error:  # torch's operators take a TypeError for an operand of a type that they do not know
            if "incompatible shapes" not in str(error):
                raise
            raise RuntimeError(f"{name}: {str(error).splitlines()[0]}") from error

    def lower(self, op: Any, function: Callable[..., Any]) -> None:
        """Register a function of arrays as the lowering of `op`."""
        self._ops[op] = torchax.ops.ops_registry.Operator(  # type: ignore[attr-defined]
            op, function, is_jax_function=True, is_user_defined=True, needs_env=False, is_view_op=False
        )

    def wrap(self, array: Any) -> TraceTensor:
        """An array, or a constant torch tensor, as a tensor of the trace."""
        return TraceTensor(array, self)

    def constant(self, make: Callable[[], torch.Tensor]) -> TraceTensor:
        """A tensor of the trace with a value that torch code can read.

        Args:
            make: returns the value as a torch tensor.
        """
        with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            return TraceTensor(make(), self)

    def j2t_iso(self, jaxarray: Any) -> Any:
        """Convert the arrays in a nested value to tensors of the trace."""
        return _map(lambda v: isinstance(v, jax.Array), self.wrap, jaxarray)

    def t2j_iso(self, torchtensors: Any) -> Any:
        """Convert the tensors in a nested value to arrays; plain torch tensors become constants of the program."""
        return _map(_is_tensor, as_array, torchtensors)

    # Constants

    def _construct(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors((args, kwargs)))
        if func is torch.as_tensor and tensors and tensors[0] is args[0]:
            return self._to((args[0],), kwargs)
        if all(_is_host(t) for t in tensors):
            result = self._on_host(func, args, kwargs)
            if result is not _TOO_LARGE:
                return result
        if func is torch.arange and len(args) == 2 and (numbers := known_range(*args)) is not None:
            dtype = kwargs.get("dtype")
            return self.wrap(numbers.astype(mappings.t2j_dtype(dtype)) if dtype else numbers)
        if func is torch.arange and tensors:
            raise ValueReadError("arange()", tensors[0].shape, tensors[0].dtype)
        if func is torch.tensor and tensors:
            stacked = _stack(args[0])
            dtype = kwargs.get("dtype")
            return self.wrap(stacked.astype(mappings.t2j_dtype(dtype)) if dtype else stacked)
        return self._traced(func, _name(func), args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run torch's function on constants; `_TOO_LARGE` if the program should compute the result instead."""
        inputs: list[TraceTensor] = [t for t in _tensors((args, kwargs)) if isinstance(t, TraceTensor)]
        with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            plain_args = _map(_is_tensor_or_device, _to_host, args)
            plain_kwargs = _map(_is_tensor_or_device, _to_host, kwargs)
            result = func(*plain_args, **plain_kwargs)
        by_identity = {id(t.host): t for t in inputs}
        if any(r.numel() > _MAX_HOST_ELEMENTS and id(r) not in by_identity for r in _tensors(result)):
            return _TOO_LARGE

        def back(tensor: torch.Tensor) -> TraceTensor:
            if id(tensor) in by_identity:
                return by_identity[id(tensor)]
            wrapped = TraceTensor(tensor, self)
            link_host_view(wrapped, inputs)
            return wrapped

        return _map(_is_tensor, back, result)

    # Conversions and copies

    def _to(self, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        dtype, copy = kwargs.get("dtype"), kwargs.get("copy", False)
        for value in [*rest, kwargs.get("other")]:
            if isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, torch.Tensor):
                dtype = value.dtype
        if not isinstance(tensor, TraceTensor):
            if not isinstance(tensor, torchax.tensor.Tensor):
                tensor = TraceTensor(tensor, self)
            else:
                tensor = TraceTensor(tensor.jax(), self)
        if dtype is None or dtype == tensor.dtype:
            return self._clone(tensor) if copy else tensor
        if tensor.host is not None:
            with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                return TraceTensor(tensor.host.to(dtype), self)
        if dtype in (torch.float64, torch.int64):
            note_wide(str(dtype).removeprefix("torch."))
        result = self.wrap(tensor.jax().astype(mappings.t2j_dtype(dtype)))
        if not tensor.is_contiguous():
            result = with_torch_strides(lambda t: t.to(dtype), (tensor,), {}, result)
        if dtype in (torch.int64, torch.int32):
            result.at_least, result.at_most = wide_integers.known_limits(tensor)
        return result

    def _clone(self, tensor: TraceTensor) -> TraceTensor:
        if tensor.host is not None:
            with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                return TraceTensor(tensor.host.clone(), self)
        result = self.wrap(tensor.jax())
        return result if tensor.is_contiguous() else with_torch_strides(torch.clone, (tensor,), {}, result)

    def _copy(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        if not isinstance(target, torchax.tensor.Tensor):
            if not isinstance(source, torchax.tensor.Tensor):
                with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                    return target.copy_(source)
            if not _is_host(source):
                raise ValueReadError("copying into a plain torch tensor", source.shape, source.dtype)
            with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                return target.copy_(_to_host(source))
        if isinstance(target, TraceTensor) and target.host is not None and _is_host(source):
            with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                target.host.copy_(_to_host(source))
            return target
        self._store(target, as_array(source))
        return target

    def _store(self, target: Any, new: Any) -> None:
        old = target._elem
        if isinstance(target, TraceTensor) and getattr(new, "dtype", None) == jnp.int64 and old.dtype == jnp.int32:
            old = self._widen(target)
        target._elem = jnp.broadcast_to(jnp.asarray(new).astype(old.dtype), old.shape)
        if isinstance(target, TraceTensor):
            target.wrote()

    def _widen(self, target: TraceTensor) -> Any:
        """The array of a tensor that 64-bit values are written to, widened to 64 bits."""
        if target.has_shared_storage:
            raise wide_integers.refusal("a write", "the tensor shares its storage with one of 32 bits")
        target._elem = target._elem.astype(jnp.int64)
        return target._elem

    # Indexing

    def get_item(self, tensor: Any, index: Any) -> Any:
        """`tensor[index]`."""
        inputs = [tensor, *_tensors(index)]
        if not any(isinstance(t, torchax.tensor.Tensor) for t in inputs):
            return tensor[index]
        if all(_is_host(t) for t in inputs):
            result = self._on_host(torch.Tensor.__getitem__, (tensor, index), {})
            if result is not _TOO_LARGE:
                return result
        static = indexing.static_index(index)
        array = as_array(tensor)
        if (mask := indexing.whole_mask(static)) is not None:
            return MaskedSelection(array, mask, self.wrap)
        result = self.wrap(indexing.read(array, static))
        if isinstance(tensor, TraceTensor) and indexing.is_basic(static):
            result = with_torch_strides(lambda t: t[static], (tensor,), {}, result, is_linked_later=True)
            result.is_view_of(tensor, *indexing.make_reader(static))
        return result

    def set_item(self, tensor: TraceTensor, index: Any, value: Any) -> None:
        """`tensor[index] = value`."""
        if is_in_64_bits() or not wide_integers.needs_64_bits(
            "setitem", [tensor, *_tensors(value), *(i for i in _parts(index) if isinstance(i, TraceTensor))], (value,)
        ):
            self._set_item(tensor, index, value)
            return
        with self._in_64_bits("a write"):
            if not _is_host(tensor) and tensor.dtype == torch.int32:
                self._widen(tensor)
            self._set_item(tensor, index, value)

    def _set_item(self, tensor: TraceTensor, index: Any, value: Any) -> None:
        if tensor.host is not None and all(_is_host(t) for t in _tensors((index, value))):
            self._on_host(torch.Tensor.__setitem__, (tensor, index, value), {})
            return
        if (
            isinstance(value, MaskedSelection)
            and (mask := indexing.whole_mask(indexing.static_index(index))) is not None
        ):
            value = value.under(mask)
        value = as_array(value) if isinstance(value, torch.Tensor) else value
        tensor._elem = indexing.write(tensor.jax(), indexing.static_index(index), value)
        tensor.wrote()

    # Traced operations

    def _traced(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.where and len(args) == 1:
            return MaskPlaces.of(args[0])
        if func is torch.unique_consecutive and not any(kwargs.values()) and args[0].ndim == 1:
            return DistinctRuns(as_array(args[0]), self.wrap)
        if func is torch.Tensor.new_tensor:
            return self._construct(torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs, "device": None})
        if name in REFUSED and (reason := REFUSED[name](*args, **kwargs)):
            raise NotImplementedError(f"{name} has no lowering for this call: {reason}")
        if name in _RESHAPED_IN_PLACE and isinstance(func, torch._ops.OpOverload):
            args[0]._elem = as_array(self.dispatch(_functional_form(func, name), (), args, kwargs))
            return args[0]
        if name in _COMPARISONS and (known := _known_comparison(name, args)) is not None:
            return TraceTensor(torch.tensor(known), self)
        try:
            op = self._get_op_or_decomp(func)
        except torchax.tensor.OperatorNotFound:
            functional = _functional_form(func, name)
            if functional is None:
                if isinstance(func, torch._ops.OpOverload) and note_missing(name):
                    return self._like_meta(func, args, kwargs)
                raise
            self._store(args[0], as_array(self.dispatch(functional, (), args, kwargs)))
            return args[0]
        if op.needs_env:
            kwargs = {**kwargs, "env": self}
        if op.is_jax_function:
            args, kwargs = tuple(_with_numbers(a) for a in args), {n: _with_numbers(a) for n, a in kwargs.items()}
            convert = _quantized_too if getattr(op.func, "takes_quantized", False) else self.t2j_iso
            arrays, named = convert(args), convert(kwargs)
            if is_in_64_bits():
                arrays, named = wide_integers.widened(arrays), wide_integers.widened(named)
            if name in _SCALAR_AWARE:
                arrays = _match_scalars(arrays)
            lowering: Any = wide_integers.LOWERINGS.get(name, op.func) if is_in_64_bits() else op.func
            result = self.j2t_iso(lowering(*arrays, **named))
        else:
            wrapped = _map(_is_tensor, self._as_trace_tensor, (args, kwargs))
            with self._dispatch_mode:
                result = op.func(*wrapped[0], **wrapped[1])
        is_view = name in VIEW_OPS and isinstance(func, torch._ops.OpOverload) and isinstance(args[0], TraceTensor)
        if (is_view and not keeps_order(name)) or (
            isinstance(func, torch._ops.OpOverload) and ("memory_format" in kwargs or _lies_otherwise((args, kwargs)))
        ):
            result = with_torch_strides(func, args, kwargs, result, is_linked_later=is_view)
        if is_view:
            link_views(result, name, op.func if op.is_jax_function else self._as_function(func), args, kwargs)
        if name in ("add", "sub", "rsub"):
            _note_sum(result, name, args)
        for target in _written(func, args, kwargs):
            target.wrote()
        return result

    def _like_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Zeros with the operation's result shapes and dtypes in torch, for a diagnosis that continues without it."""

        def run(device: str) -> Any:
            make = lambda t: torch.zeros(tuple(t.shape), dtype=t.dtype, device=device)  # noqa: E731
            return func(*_map(_is_tensor, make, args), **_map(_is_tensor, make, kwargs))

        with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            try:
                result = run("meta")
            except NotImplementedError:  # torch must compute the result to know its shape
                result = run("cpu")
        return _map(_is_tensor, lambda t: self.wrap(jnp.zeros(tuple(t.shape), mappings.t2j_dtype(t.dtype))), result)

    def _as_function(self, func: Any) -> Callable[..., Any]:
        """A composite operation as a function of an array."""

        def function(array: Any, *rest: Any, **kwargs: Any) -> Any:
            return self.t2j_iso(self.dispatch(func, (), (self.wrap(array), *rest), kwargs))

        return function

    def _as_trace_tensor(self, tensor: Any) -> Any:
        if isinstance(tensor, torchax.tensor.Tensor):
            return tensor
        return TraceTensor(tensor.jax() if isinstance(tensor, torchax.tensor.View) else tensor, self)


_TOO_LARGE = object()


def is_tensor(value: Any) -> bool:
    """Whether torch code sees a tensor; a selection by a traced mask counts, though its length is unknown."""
    return isinstance(value, (torch.Tensor, MaskedSelection))


def as_array(tensor: Any) -> Any:
    """The array of a tensor of any kind."""
    if isinstance(tensor, (torchax.tensor.Tensor, torchax.tensor.View)):
        return tensor.jax()
    if isinstance(tensor, torch.Tensor):
        return constant_array(tensor)
    if isinstance(tensor, MaskedSelection):
        raise tensor.error()
    return tensor


def _quantized_too(value: Any) -> Any:
    """Like `TraceEnvironment.t2j_iso`, but leaves quantized weights unchanged."""
    return _map(_is_tensor, lambda t: getattr(t, "quantized", None) or as_array(t), value)


def _map(is_leaf: Callable[[Any], bool], change: Callable[[Any], Any], value: Any) -> Any:
    """Map over the leaves of nested lists, tuples and dicts."""
    if is_leaf(value):
        return change(value)
    if isinstance(value, tuple):
        items = [_map(is_leaf, change, v) for v in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        if type(value) is tuple:
            return tuple(items)
        return value if isinstance(value, torch.Size) else type(value)(items)  # torch.return_types take one sequence
    if isinstance(value, list):
        return [_map(is_leaf, change, v) for v in value]
    if isinstance(value, dict):
        return {k: _map(is_leaf, change, v) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(_map(is_leaf, change, v) for v in (value.start, value.stop, value.step)))
    return value


def _parts(index: Any) -> tuple[Any, ...]:
    return index if type(index) is tuple else (index,)


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, slice):
        yield from _tensors((value.start, value.stop, value.step))


def _lies_otherwise(value: Any) -> bool:
    """Whether a traced tensor in `value` is non-contiguous in torch."""
    return any(isinstance(t, TraceTensor) and not t.is_contiguous() for t in _tensors(value))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_host(value: Any) -> bool:
    if isinstance(value, TraceTensor):
        return value.host is not None
    return not isinstance(value, (torchax.tensor.Tensor, torchax.tensor.View))


def _is_tensor_or_device(value: Any) -> bool:
    return (
        _is_tensor(value)
        or isinstance(value, torch.device)
        or (isinstance(value, str) and value.partition(":")[0] in ("jax", "privateuseone", "meta"))
    )


def _to_host(value: Any) -> Any:
    if isinstance(value, TraceTensor):
        return value.host
    if isinstance(value, torch.Tensor):
        return value
    return torch.device("cpu")


def _stack(data: Any) -> Any:
    if isinstance(data, (list, tuple)):
        return jnp.stack([_stack(d) for d in data])
    return jnp.asarray(as_array(data))


@functools.lru_cache(maxsize=4096)
def _name(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.partition("::")[2]
    return getattr(func, "__name__", "")


@functools.lru_cache(maxsize=4096)
def _is_random(name: str) -> bool:
    return any(part in name for part in _RANDOM_NAMES)


@functools.lru_cache(maxsize=4096)
def _written_arguments(func: Any) -> tuple[int, ...]:
    """Positions of the arguments that an aten operation writes to."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return ()
    return tuple(i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[TraceTensor]:
    for position in _written_arguments(func):
        target = args[position] if position < len(args) else kwargs.get(func._schema.arguments[position].name)
        if isinstance(target, TraceTensor):
            yield target


@functools.lru_cache(maxsize=4096)
def _functional_form(func: Any, name: str) -> Any:
    """`aten.foo.Tensor` for `aten.foo_.Tensor`, if there is one."""
    if not isinstance(func, torch._ops.OpOverload) or not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, func._overloadname, None)


def _note_sum(result: Any, name: str, args: Any) -> None:
    """Track offsets between traced scalars, so that ranges between them have a known length."""
    if not isinstance(result, TraceTensor) or result.host is not None or result.ndim or len(args) < 2:
        return
    one, other = args[0], args[1]
    if name == "add" and not isinstance(one, TraceTensor):
        one, other = other, one
    number = other.host if isinstance(other, TraceTensor) else other
    if isinstance(number, torch.Tensor) and number.ndim == 0 and not number.is_floating_point():
        number = int(number)
    if isinstance(one, TraceTensor) and one.host is None and type(number) is int:
        if name == "rsub":
            result.is_difference(number, one)
        else:
            result.is_sum(one, number if name == "add" else -number)


def _known_comparison(name: str, args: Any) -> bool | None:
    one, other = args[:2]
    if isinstance(one, TraceTensor) and one.host is None and one.ndim == 0 and type(other) is int:
        return one.compare(name, other)
    return None


def _with_numbers(value: Any) -> Any:
    """A list of sizes with 0-d constants as Python numbers."""
    if type(value) not in (list, tuple) or not any(isinstance(v, TraceTensor) for v in value):
        return value
    return type(value)(
        v.item() if isinstance(v, TraceTensor) and v.host is not None and not v.ndim else v for v in value
    )


def _match_scalars(arrays: Any) -> Any:
    """torch's promotion: 0-d arrays take the dtype of the others if they are of the same or a lower kind."""
    wide = [a.dtype for a in arrays if isinstance(a, jax.Array) and a.ndim]
    if not wide:
        return arrays
    target = jnp.result_type(*wide)

    def fit(value: Any) -> Any:
        if isinstance(value, (jax.Array, np.ndarray)) and not value.ndim and value.dtype != target:
            return value.astype(target) if _kind(value.dtype) <= _kind(target) else value
        return value

    return tuple(fit(a) for a in arrays)


def _kind(dtype: Any) -> int:
    if dtype == jnp.bool_:
        return 0
    return 1 if jnp.issubdtype(dtype, jnp.integer) else 2 if jnp.issubdtype(dtype, jnp.floating) else 3
