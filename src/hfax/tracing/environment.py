"""How each torch call of a trace is executed: by a lowering on arrays, by torch itself on constants.

One `TraceEnvironment` sits between the modelling code and torchax's table of lowerings. It adds what that table lacks: constants
that stay on the host (`constants`), views that share storage (`views`), in-place forms of every functional operation, torch's type
promotion of 0-d operands (`scalars`), and plain torch tensors mixed with traced ones. It does not know models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._mode_utils as mode_utils
import torchax.tensor
from torchax.ops import mappings

from hfax.kernels import precision
from hfax.kernels.target import may_be_differentiated
from hfax.tracing import bounds, indexing, wide_integers
from hfax.tracing.constants import TOO_LARGE, is_host, run_on_host, to_host
from hfax.tracing.host_reads import read
from hfax.tracing.lowerings import LOWERINGS, REFUSED
from hfax.tracing.masked_selection import DistinctRuns, MaskedSelection, MaskPlaces, known_places
from hfax.tracing.observations import note_missing, note_wide
from hfax.tracing.operands import (
    as_array,
    as_arrays_or_quantized,
    has_other_strides,
    has_selection,
    is_selection,
    is_tensor,
    is_torch_tensor,
    map_leaves,
    stack,
    tensors_in,
    with_numbers,
)
from hfax.tracing.scalars import COMPARISONS, SCALAR_AWARE, known_comparison, match_scalars, note_sum
from hfax.tracing.subgradients import with_value
from hfax.tracing.torch_functions import (
    CONSTRUCTORS,
    COPY,
    PRODUCTS,
    RESHAPED_IN_PLACE,
    TO,
    functional_form,
    is_random,
    name_of,
    written_tensors,
)
from hfax.tracing.trace_tensor import (
    TraceTensor,
    ValueReadError,
    in_64_bits,
    is_in_64_bits,
    known_range,
)
from hfax.tracing.views import VIEW_OPS, keeps_order, link_views, unexpanded, with_torch_strides

OperatorNotFound = torchax.tensor.OperatorNotFound
VALUE_ERRORS = (
    ValueReadError,
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
)
"""What a trace raises where it cannot go on without a value."""


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
            name_of(func), list(tensors_in((args, kwargs))), (*args, *kwargs.values())
        ):
            return self._carry_out(func, args, kwargs)
        if func is torch.ops.aten.scalar_tensor.default:  # from `where`, in the dtype of its other operand
            kwargs = {**kwargs, "dtype": torch.int64}
        with self._in_64_bits(name_of(func)):
            return wide_integers.settled(name_of(func), self._carry_out(func, args, kwargs))

    @contextlib.contextmanager
    def _in_64_bits(self, name: str) -> Iterator[None]:
        """Within the block, integers have JAX's 64-bit types."""
        try:
            with in_64_bits():
                yield
        except (TypeError, OverflowError) as error:  # a lowering that supports only 32 bits
            raise wide_integers.refusal(name, str(error).splitlines()[0]) from error

    def _carry_out(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        if has_selection((args, kwargs)) and name not in (
            "add",
            "sub",
            "mul",
            "div",
        ):  # these a selection answers itself
            args, kwargs = map_leaves(is_selection, lambda s: s.known(), (args, kwargs))
        try:
            return self._carried_out(func, name, args, kwargs)
        except VALUE_ERRORS as error:  # JAX's, for a result whose size depends on values
            return self._with_values(func, args, kwargs, error)
        except TypeError as error:  # torch's operators take a TypeError for an operand of a type that they do not know
            if "concrete values" in str(error):
                return self._with_values(func, args, kwargs, error)
            if "incompatible shapes" not in str(error):
                raise
            raise RuntimeError(f"{name}: {str(error).splitlines()[0]}") from error

    def _carried_out(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in CONSTRUCTORS:
            return self._construct(func, args, kwargs)
        if func in TO:
            return self._to(args, kwargs)
        if func in COPY:
            return self._copy(*args, **kwargs)
        if func is torch.ops.aten.contiguous.default and isinstance(args[0], TraceTensor):
            return args[0] if args[0].is_contiguous() else self.wrap(args[0].jax())
        if func is torch.Tensor.__getitem__:
            return self.get_item(args[0], args[1])
        tensors = list(tensors_in((args, kwargs)))
        if any(t.device.type == "meta" for t in tensors if not isinstance(t, torchax.tensor.Tensor)):
            raise RuntimeError(f"{name} got a weight that was never loaded")
        if tensors and not any(isinstance(t, torchax.tensor.Tensor) for t in tensors):
            return func(*args, **kwargs)
        if tensors and all(is_host(t) for t in tensors) and not is_random(name):
            result = run_on_host(func, args, kwargs, self.wrap)
            if result is not TOO_LARGE:
                return result
        is_half = name in PRODUCTS and all(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
        with precision.of_half() if is_half else contextlib.nullcontext():
            return self._traced(func, name, args, kwargs)

    def _with_values(self, func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
        """A call whose result has a size that depends on values, which are read: those of scalars, or else all.

        Raises:
            Exception: `error`, if values cannot be read here.
        """
        traced = [t for t in tensors_in((args, kwargs)) if not is_host(t)]
        has_scalars = any(t.ndim == 0 for t in traced)
        if not has_scalars and may_be_differentiated() and any(t.is_floating_point() for t in traced):
            raise error  # as constants, they would have no gradient
        if (known := self._read(name_of(func), args, kwargs, only_scalars=has_scalars)) is None:
            raise error
        if has_scalars:
            return self._carry_out(func, *known)
        return run_on_host(func, *known, self.wrap)

    def _read(self, name: str, args: Any, kwargs: Any, *, only_scalars: bool = False) -> tuple[Any, Any] | None:
        """The arguments with the values of traced tensors as constants; None if values cannot be read here."""
        values: dict[int, Any] = {}
        for tensor in tensors_in((args, kwargs)):
            if not is_host(tensor) and (tensor.ndim == 0 or not only_scalars):
                if (value := read(as_array(tensor), f"{name}()")) is None:
                    return None
                values[id(tensor)] = self.constant(lambda v=value: torch.from_numpy(np.array(v)))
        return map_leaves(is_torch_tensor, lambda t: values.get(id(t), t), (args, kwargs))

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
        return map_leaves(lambda v: isinstance(v, jax.Array), self.wrap, jaxarray)

    def t2j_iso(self, torchtensors: Any) -> Any:
        """Convert the tensors in a nested value to arrays; plain torch tensors become constants of the program."""
        return map_leaves(is_torch_tensor, as_array, torchtensors)

    # Constants

    def _construct(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = list(tensors_in((args, kwargs)))
        if func is torch.as_tensor and tensors and tensors[0] is args[0]:
            return self._to((args[0],), kwargs)
        if all(is_host(t) for t in tensors):
            result = run_on_host(func, args, kwargs, self.wrap)
            if result is not TOO_LARGE:
                return result
        if func is torch.arange and len(args) == 2 and (numbers := known_range(*args)) is not None:
            dtype = kwargs.get("dtype")
            return self.wrap(numbers.astype(mappings.t2j_dtype(dtype)) if dtype else numbers)
        if func is torch.arange and tensors:
            raise ValueReadError("arange()", tensors[0].shape, tensors[0].dtype)
        if func is torch.tensor and tensors:
            stacked = stack(args[0])
            dtype = kwargs.get("dtype")
            return self.wrap(stacked.astype(mappings.t2j_dtype(dtype)) if dtype else stacked)
        return self._traced(func, name_of(func), args, kwargs)

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
            result.at_least, result.at_most = bounds.known(tensor)
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
            if not is_host(source):
                if (known := self._read("copy_", (source,), {})) is None:
                    raise ValueReadError("copying into a plain torch tensor", source.shape, source.dtype)
                (source,) = known[0]
            with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                return target.copy_(to_host(source))
        if isinstance(target, TraceTensor) and target.host is not None and is_host(source):
            with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
                target.host.copy_(to_host(source))
            return target
        self._store(target, as_array(source))
        return target

    def _store(self, target: Any, new: Any) -> None:
        old = target._elem
        if isinstance(target, TraceTensor) and getattr(new, "dtype", None) == jnp.int64 and old.dtype == jnp.int32:
            old = self._widen(target)
        target._elem = self._written(old, jnp.broadcast_to(jnp.asarray(new).astype(old.dtype), old.shape))
        if isinstance(target, TraceTensor):
            target.wrote()

    @staticmethod
    def _written(old: Any, new: Any) -> Any:
        """What a tensor holds after a write. While gradients are off, autograd does not see it: the gradient of before remains."""
        if torch.is_grad_enabled() or not may_be_differentiated() or not jnp.issubdtype(new.dtype, jnp.floating):
            return new
        return with_value(old, new)

    def _widen(self, target: TraceTensor) -> Any:
        """The array of a tensor that 64-bit values are written to, widened to 64 bits."""
        if target.has_shared_storage:
            raise wide_integers.refusal("a write", "the tensor shares its storage with one of 32 bits")
        target._elem = target._elem.astype(jnp.int64)
        return target._elem

    # Indexing

    def get_item(self, tensor: Any, index: Any) -> Any:
        """`tensor[index]`."""
        inputs = [tensor, *tensors_in(index)]
        if not any(isinstance(t, torchax.tensor.Tensor) for t in inputs):
            return tensor[index]
        if all(is_host(t) for t in inputs):
            result = run_on_host(torch.Tensor.__getitem__, (tensor, index), {}, self.wrap)
            if result is not TOO_LARGE:
                return result
        static = indexing.static_index(index)
        array = as_array(tensor)
        if (mask := indexing.whole_mask(static)) is not None:
            return MaskedSelection(array, mask, self.wrap)
        result = self.wrap(indexing.read(array, static))
        if isinstance(tensor, TraceTensor) and indexing.is_basic(static):
            result = with_torch_strides(lambda t: t[static], (tensor,), {}, result, is_linked_later=True)
            result.is_view_of(tensor, *indexing.make_reader(static))
        bounds.note(result, "__getitem__", (tensor,), {})
        return result

    def set_item(self, tensor: TraceTensor, index: Any, value: Any) -> None:
        """`tensor[index] = value`."""
        if is_in_64_bits() or not wide_integers.needs_64_bits(
            "setitem", [tensor, *tensors_in(value), *(i for i in _parts(index) if isinstance(i, TraceTensor))], (value,)
        ):
            self._set_item(tensor, index, value)
            return
        with self._in_64_bits("a write"):
            if not is_host(tensor) and tensor.dtype == torch.int32:
                self._widen(tensor)
            self._set_item(tensor, index, value)

    def _set_item(self, tensor: TraceTensor, index: Any, value: Any) -> None:
        if tensor.host is not None and all(is_host(t) for t in tensors_in((index, value))):
            run_on_host(torch.Tensor.__setitem__, (tensor, index, value), {}, self.wrap)
            return
        old, static = tensor.jax(), indexing.static_index(index)
        if isinstance(value, MaskedSelection) and (mask := indexing.whole_mask(static)) is not None:
            new = value.written(old, mask)
        else:
            new = indexing.write(old, static, as_array(value) if is_tensor(value) else value)
        tensor._elem = self._written(old, new)
        tensor.wrote()

    # Traced operations

    def _traced(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.where and len(args) == 1:
            return MaskPlaces.of(args[0])
        if func is torch.unique_consecutive and not any(kwargs.values()) and args[0].ndim == 1:
            return DistinctRuns(as_array(args[0]), self.wrap)
        if func in (torch.masked_select, torch.Tensor.masked_select):
            array, mask = jnp.broadcast_arrays(as_array(args[0]), as_array(args[1]))
            return MaskedSelection(array, mask, self.wrap)
        if (
            name == "nonzero"
            and not kwargs.get("as_tuple")
            and (places := known_places(as_array(args[0]) != 0)) is not None
        ):
            return self.wrap(jnp.stack(places, axis=1))
        if name == "repeat_interleave" and (repeated := self._repeated(*args, **kwargs)) is not None:
            return repeated
        if func is torch.randint and "high" in kwargs:  # torchax's lowering takes bounds and size by their place
            limits = (*args, *(kwargs[n] for n in ("low", "high", "size") if n in kwargs))
            args, kwargs = limits, {n: v for n, v in kwargs.items() if n not in ("low", "high", "size")}
        if func is torch.Tensor.new_tensor:
            return self._construct(torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs, "device": None})
        if name in REFUSED and (reason := REFUSED[name](*args, **kwargs)):
            raise NotImplementedError(f"{name} has no lowering for this call: {reason}")
        if name == "masked_scatter":
            args = (args[0], unexpanded(args[1]), *args[2:])
        if name in RESHAPED_IN_PLACE and isinstance(func, torch._ops.OpOverload):
            args[0]._elem = as_array(self.dispatch(functional_form(func, name), (), args, kwargs))
            return args[0]
        if name in COMPARISONS and (known := known_comparison(name, args)) is not None:
            return TraceTensor(torch.tensor(known), self)
        try:
            op = self._get_op_or_decomp(func)
        except torchax.tensor.OperatorNotFound:
            functional = functional_form(func, name)
            if functional is None:
                if isinstance(func, torch._ops.OpOverload) and note_missing(name):
                    return self._like_meta(func, args, kwargs)
                raise
            self._store(args[0], as_array(self.dispatch(functional, (), args, kwargs)))
            return args[0]
        if op.needs_env:
            kwargs = {**kwargs, "env": self}
        if op.is_jax_function:
            args, kwargs = tuple(with_numbers(a) for a in args), {n: with_numbers(a) for n, a in kwargs.items()}
            convert = as_arrays_or_quantized if getattr(op.func, "takes_quantized", False) else self.t2j_iso
            arrays, named = convert(args), convert(kwargs)
            if may_be_differentiated() and not torch.is_grad_enabled():  # the modelling code has turned them off
                arrays, named = jax.tree.map(_without_gradient, (arrays, named))
            if is_in_64_bits():
                arrays, named = wide_integers.widened(arrays), wide_integers.widened(named)
            if name in SCALAR_AWARE:
                arrays = match_scalars(arrays)
            lowering: Any = wide_integers.LOWERINGS.get(name, op.func) if is_in_64_bits() else op.func
            result = self.j2t_iso(lowering(*arrays, **named))
        else:
            wrapped = map_leaves(is_torch_tensor, self._as_trace_tensor, (args, kwargs))
            with self._dispatch_mode:
                result = self.j2t_iso(op.func(*wrapped[0], **wrapped[1]))
        is_view = name in VIEW_OPS and isinstance(func, torch._ops.OpOverload) and isinstance(args[0], TraceTensor)
        if (is_view and not keeps_order(name)) or (
            isinstance(func, torch._ops.OpOverload) and ("memory_format" in kwargs or has_other_strides((args, kwargs)))
        ):
            result = with_torch_strides(func, args, kwargs, result, is_linked_later=is_view)
        if is_view:
            link_views(result, name, op.func if op.is_jax_function else self._as_function(func), args, kwargs)
        bounds.note(result, name, args, kwargs)
        if name in ("add", "sub", "rsub"):
            note_sum(result, name, args)
        for target in written_tensors(func, args, kwargs):
            target.wrote()
        return result

    def _repeated(self, tensor: Any, repeats: Any = None, dim: int | None = None, **kwargs: Any) -> Any:
        """`repeat_interleave` with traced repeats, whose sum is read; None for other calls, and if values cannot be read here."""
        if repeats is None:  # of the places, by the repeats alone
            tensor, repeats = self.wrap(jnp.arange(tensor.shape[0], dtype=jnp.int32)), tensor
        if not isinstance(repeats, torch.Tensor) or is_host(repeats) or kwargs.get("output_size") is not None:
            return None
        counts, array = as_array(repeats), as_array(tensor)
        if dim is None:
            array, dim = array.reshape(-1), 0
        counts = jnp.broadcast_to(counts, (array.shape[dim],))
        if (total := read(counts.sum(), "the sum of repeats")) is None:
            return None
        return self.wrap(jnp.repeat(array, counts, axis=dim, total_repeat_length=int(total)))

    def _like_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Zeros with the operation's result shapes and dtypes in torch, for a diagnosis that continues without it."""

        def run(device: str) -> Any:
            make = lambda t: torch.zeros(tuple(t.shape), dtype=t.dtype, device=device)  # noqa: E731
            return func(*map_leaves(is_torch_tensor, make, args), **map_leaves(is_torch_tensor, make, kwargs))

        with mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            try:
                result = run("meta")
            except NotImplementedError:  # torch must compute the result to know its shape
                result = run("cpu")
        return map_leaves(
            is_torch_tensor, lambda t: self.wrap(jnp.zeros(tuple(t.shape), mappings.t2j_dtype(t.dtype))), result
        )

    def _as_function(self, func: Any) -> Callable[..., Any]:
        """A composite operation as a function of an array."""

        def function(array: Any, *rest: Any, **kwargs: Any) -> Any:
            return self.t2j_iso(self.dispatch(func, (), (self.wrap(array), *rest), kwargs))

        return function

    def _as_trace_tensor(self, tensor: Any) -> Any:
        if isinstance(tensor, torchax.tensor.Tensor):
            return tensor
        return TraceTensor(tensor.jax() if isinstance(tensor, torchax.tensor.View) else tensor, self)


def _without_gradient(value: Any) -> Any:
    return jax.lax.stop_gradient(value) if isinstance(value, jax.Array) else value


def _parts(index: Any) -> tuple[Any, ...]:
    return index if type(index) is tuple else (index,)
