"""Functions in which a row's results do not depend on the number of rows, bit for bit.

XLA chooses the order of a sum by its shape, so it adds a row's numbers in another order among 64 rows than among 4; and its
exponentials differ in the last bit between vectors and what fills none. hfax's CPU kernels do neither. A function is traced, its
sums and exponentials are given to the kernels, and what else sums floating-point numbers is refused. What remains is computed
element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

from hfax.errors import UnsupportedModelError
from hfax.kernels.cpu import calls, library
from hfax.sharding.layout import Layout

_SUMMING = frozenset(
    {
        "conv_general_dilated",
        "cumlogsumexp",
        "cumprod",
        "cumsum",
        "dot_general",
        "fft",
        "ragged_dot_general",
        "reduce",
        "reduce_prod",
        "reduce_sum",
        "reduce_window",
        "reduce_window_sum",
    }
)
_FLOATS = (jnp.float32, jnp.bfloat16)
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters of the primitives that call a function; those of loops and branches have others beside them."""
_LOOPS = frozenset({"cond", "scan", "while"})


def why_not(layout: Layout) -> str | None:
    """Why programs of this layout cannot be batch-invariant; None: they can, unless a step's trace has other sums."""
    if layout.device.platform != "cpu":
        return f"Only hfax's CPU kernels sum in one order for any number of rows; this model is on {layout.device.platform}."
    if len(layout.devices) > 1:
        return "It is available on one device; sums over several devices are XLA's."
    if (problem := library.problem()) is not None:
        return f"It requires hfax's CPU kernels: {problem}"
    return None


def batch_invariant(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a row's results independent of the number of rows, for programs on CPU with kernels.

    Raises:
        UnsupportedModelError: when traced, if XLA would have to add floating-point numbers.
    """

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        jaxpr, is_read = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        given = [value for value, read in zip(jax.tree.leaves(args), is_read, strict=True) if read]
        return jax.tree.unflatten(jax.tree.structure(shapes), _evaluate(jaxpr, closed.consts, given))

    return run


def _evaluate(jaxpr: Any, consts: Any, args: list[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for equation in jaxpr.eqns:
        given = [x.val if isinstance(x, core.Literal) else values[x] for x in equation.invars]
        values.update(zip(equation.outvars, _apply(equation, given), strict=True))
    return [x.val if isinstance(x, core.Literal) else values[x] for x in jaxpr.outvars]


def _apply(equation: Any, given: list[Any]) -> list[Any]:
    primitive, params = equation.primitive, equation.params
    if (
        primitive.name not in _LOOPS
        and (inner := next((params[name] for name in _CALLS if name in params), None)) is not None
    ):
        return _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given)
    if primitive.name == "reduce_sum" and _is_summing(equation):
        return [_sum(given[0], params["axes"])]
    if primitive.name == "dot_general" and _is_linear(equation) and _is_summing(equation):
        x, matrix = given
        return [_linear(x, matrix, params["dimension_numbers"][0], equation.outvars[0].aval)]
    if primitive.name == "exp" and equation.outvars[0].aval.dtype in _FLOATS:
        x = jnp.asarray(given[0])
        return [calls.exp(x.astype(jnp.float32).reshape(-1)).reshape(x.shape).astype(x.dtype)]
    for summing in _summing_in(equation):
        shapes = " and ".join(str(x.aval) for x in summing.invars[:2])
        raise UnsupportedModelError(
            f"The model does not support batch_invariant: {summing.primitive.name} of {shapes} is computed by XLA.",
            "The order of XLA's sums depends on the number of rows; hfax's CPU kernels, whose order does not, lack this operation.",
            "Load the model in float32 or bfloat16, or leave batch_invariant out.",
        )
    found = primitive.bind(*given, **primitive.get_bind_params(params))
    return list(found) if primitive.multiple_results else [found]


def _sum(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    rows = jnp.transpose(x.astype(jnp.float32), (*kept, *axes)).reshape(math.prod(x.shape[axis] for axis in kept), -1)
    return calls.row_sums(rows).reshape([x.shape[axis] for axis in kept]).astype(x.dtype)


def _is_linear(equation: Any) -> bool:
    """Whether a product is one of rows and a matrix."""
    (axes, _), (batch, _) = equation.params["dimension_numbers"]
    x, matrix, out = (v.aval for v in (*equation.invars, *equation.outvars))
    is_fit = x.dtype == matrix.dtype and x.dtype in _FLOATS and out.dtype in _FLOATS and matrix.ndim == 2
    return is_fit and not batch and len(axes) == 1


def _linear(x: jax.Array, matrix: jax.Array, axes: Any, out: Any) -> jax.Array:
    (axis,), (of_matrix,) = axes
    rows = jnp.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
    weight = matrix if of_matrix == 1 else matrix.T
    return calls.linear(rows, weight, out.dtype).reshape(out.shape)


def _summing_in(equation: Any) -> Iterator[Any]:
    """The equation, if it adds floating-point numbers, and those in its functions."""
    if _is_summing(equation):
        yield equation
    for leaf in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr):
        if _is_jaxpr(leaf):
            for inner in getattr(leaf, "jaxpr", leaf).eqns:
                yield from _summing_in(inner)


def _is_summing(equation: Any) -> bool:
    if equation.primitive.name not in _SUMMING or not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.inexact):
        return False
    if equation.primitive.name == "dot_general":  # a single product has no order
        ((axes, _), _) = equation.params["dimension_numbers"]
    elif equation.primitive.name == "reduce_sum":
        axes = equation.params["axes"]
    else:
        return True
    return math.prod(equation.invars[0].aval.shape[axis] for axis in axes) > 1


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
