"""`torch.autograd.Function`s of modelling code, with the gradients that their `backward` gives.

A trace has no autograd: JAX would differentiate `forward`, which is another gradient where a model rounds with a straight-through
estimator, bounds a derivative or estimates one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfax.kernels.target import may_be_differentiated
from hfax.tracing.operands import as_array
from hfax.tracing.structure import flatten, unflatten
from hfax.tracing.trace_tensor import TraceTensor

Retrace = Callable[[Callable[[], Any]], Any]
"""Runs torch code of a trace after the trace of the forward pass has ended."""


class FunctionContext:
    """What stands for `ctx`. Its attributes are those that `forward` sets.

    Args:
        needs_input_grad: by argument of `forward`.
    """

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for `backward`."""
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        """Not supported: the caller's tensor would have to change, too."""
        raise NotImplementedError("mark_dirty has no lowering for this call")

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Nothing: such outputs get gradients of zero."""

    def save_for_forward(self, *tensors: Any) -> None:
        """Nothing: for derivatives in forward mode, which are not taken."""

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing: outputs without a gradient get zeros, which have the same effect."""


def apply_function(kind: Any, args: tuple[Any, ...], wrap: Callable[[jax.Array], Any], retrace: Retrace) -> Any:
    """`kind.apply(*args)` in a trace.

    Args:
        kind: a subclass of `torch.autograd.Function`.
        args: its arguments.
        wrap: makes a tensor of an array.
        retrace: runs `backward`.
    """
    places = [i for i, a in enumerate(args) if isinstance(a, TraceTensor) and a.host is None]
    if not (places and may_be_differentiated() and torch.is_grad_enabled()):
        return _forward(kind, args)[0]
    arrays = [args[i].jax() for i in places]
    needs = tuple(i in places and args[i].is_floating_point() for i in range(len(args)))
    structures: dict[str, Any] = {}

    def run(*given: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The outputs, and what `backward` reads."""
        own = list(args)
        for place, array in zip(places, given, strict=True):
            own[place] = wrap(array)
        out, context = _forward(kind, tuple(own), needs)
        outputs, structures["outputs"] = flatten(out, _is_tensor)
        kept, structures["kept"] = flatten(vars(context), _is_tensor)
        return [as_array(t) for t in outputs], [as_array(t) for t in kept]

    def backward(kept: list[jax.Array], gradients: list[jax.Array]) -> tuple[Any, ...]:
        def call() -> list[Any]:
            context = FunctionContext(needs)
            vars(context).update(unflatten(structures["kept"], [wrap(a) for a in kept]))
            found = kind.backward(context, *(wrap(g) for g in gradients))
            found = found if isinstance(found, tuple) else (found,)
            return [None if found[i] is None else as_array(found[i]) for i in places]

        own = zip(arrays, retrace(call), strict=True)
        return tuple(None if g is None or not _is_float(a) else g.astype(a.dtype) for a, g in own)

    function = jax.custom_vjp(lambda *given: run(*given)[0])
    function.defvjp(run, backward)
    outputs = function(*arrays)
    return unflatten(structures["outputs"], [wrap(a) for a in outputs])


def _forward(kind: Any, args: tuple[Any, ...], needs: tuple[bool, ...] = ()) -> tuple[Any, FunctionContext]:
    """The result, and the context that `forward` or `setup_context` has filled."""
    context = FunctionContext(needs or (False,) * len(args))
    with torch.no_grad():
        if kind.setup_context is not torch.autograd.Function.setup_context:
            out = kind.forward(*args)
            kind.setup_context(context, args, out)
        else:
            out = kind.forward(context, *args)
    return out, context


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))
