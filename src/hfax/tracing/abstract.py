"""Models without weights: what a trace needs of a skeleton, and of inputs, where nothing is computed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.backends import geometry
from hfax.backends.traced_model import TracedModel
from hfax.example_inputs.images import feature_counts
from hfax.example_inputs.inputs import make_inputs
from hfax.load.host_arrays import to_numpy
from hfax.load.skeleton import Skeleton

_NARROW = {"int64": "int32", "float64": "float32"}


def without_weights(skeleton: Skeleton) -> tuple[TracedModel, dict[str, jax.ShapeDtypeStruct]]:
    """The traced model, and the shapes that stand for its weights, by name."""
    buffers = {name: jnp.asarray(to_numpy(buffer)) for name, buffer in skeleton.buffers.items()}
    shapes = {name: _weight_shape(tensor) for name, tensor in skeleton.shapes.items()}
    return TracedModel(skeleton, skeleton.tied, buffers), shapes


def example_inputs(
    traced: TracedModel, params: dict[str, Any]
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Any]]:
    """Shapes of small inputs of the module's forward, and those that stay as they are, since they decide shapes.

    Args:
        traced: of `without_weights`.
        params: likewise.

    Raises:
        NotImplementedError: no rule fits the module's inputs.
    """

    def count_features(module: Any, images: dict[str, Any]) -> list[int]:
        arrays = {n: _array_shape(v) for n, v in images.items() if not geometry.is_geometry(n) and hasattr(v, "dtype")}
        rest = geometry.keep_on_host({n: v for n, v in images.items() if n not in arrays})
        found: list[int] = []

        def read(params: Any, arrays: Any) -> None:
            traced.inspect(params, lambda module, arrays: found.extend(feature_counts(module, arrays)), arrays, rest)

        jax.eval_shape(read, params, arrays)
        return found

    forward = make_inputs(traced.module, "base", count_features).forward
    forward = {name: to_numpy(value) if hasattr(value, "dtype") else value for name, value in forward.items()}
    # positions that depend on values, and what else is decided on the host
    inputs = {name: _abstract(name, value) for name, value in traced.prepare(forward).items()}
    arrays = {name: value for name, value in inputs.items() if isinstance(value, jax.ShapeDtypeStruct)}
    return arrays, {name: value for name, value in inputs.items() if name not in arrays}


def _abstract(name: str, value: Any) -> Any:
    if geometry.is_geometry(name) or not hasattr(value, "dtype"):
        return value
    return _array_shape(value)


def _array_shape(tensor: Any) -> jax.ShapeDtypeStruct:
    array = tensor if isinstance(tensor, np.ndarray) else to_numpy(tensor)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _weight_shape(tensor: Any) -> jax.ShapeDtypeStruct:
    if tensor.device.type != "meta":
        return _array_shape(tensor)
    dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
    return jax.ShapeDtypeStruct(tuple(tensor.shape), _NARROW.get(dtype.name, dtype.name))
