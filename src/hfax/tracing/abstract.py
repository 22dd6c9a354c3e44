"""Abstract models without weights: traceable skeletons from a config, and the shapes of weights and inputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import PretrainedConfig

from hfax.errors import UnsupportedOptionError
from hfax.load.formats import without_quantization
from hfax.load.host_arrays import to_numpy
from hfax.load.skeleton import Skeleton, build_skeleton, resolve_dtype, resolve_model_class
from hfax.patches.masks import ADDITIVE_NAME, ATTENTION_NAME
from hfax.synthetic.images import feature_counts
from hfax.synthetic.inputs import make_inputs
from hfax.tracing import geometry
from hfax.tracing.torchax import register_interfaces
from hfax.tracing.traced_model import TracedModel

_NARROW = {"int64": "int32", "float64": "float32"}


def open_skeleton(
    config: PretrainedConfig,
    *,
    task: str | None = None,
    dtype: str | torch.dtype = "auto",
    stored_dtype: torch.dtype | None = None,
    attn_implementation: str | None = None,
    code_folder: str | None = None,
) -> Skeleton:
    """The structure of a model without its weights, with hfax's attention and experts.

    Args:
        config: the model's config.
        task: as in `AutoModelForTPU.from_pretrained`.
        dtype: as in `AutoModelForTPU.from_pretrained`.
        stored_dtype: dtype of the checkpoint's floating-point tensors.
        attn_implementation: as in `AutoModelForTPU.from_pretrained`.
        code_folder: folder to import custom modelling code from; None if such code is not trusted.

    Raises:
        InvalidInputError: XLA devices do not support the dtype.
        UnsupportedModelError: there is no class for the model, or it is quantized in a format that hfax does not read.
        UnsupportedOptionError: the model does not support the task, or hfax does not support the attention implementation.
    """
    if attn_implementation not in (None, "eager"):
        raise UnsupportedOptionError(
            f"attn_implementation={attn_implementation!r} is not supported.",
            "Kernels written for torch devices do not run on XLA; hfax has its own attention.",
            'Remove it, or pass "eager" for transformers\' reference implementation.',
        )
    config = without_quantization(config)
    register_interfaces()
    model_class = resolve_model_class(config, task, code_folder=code_folder)
    own = {"sdpa": ATTENTION_NAME, "eager": ADDITIVE_NAME}
    resolved = resolve_dtype(dtype, config, stored_dtype)
    return build_skeleton(model_class, config, resolved, attention=attn_implementation or own, experts=ATTENTION_NAME)


def without_weights(skeleton: Skeleton) -> tuple[TracedModel, dict[str, jax.ShapeDtypeStruct]]:
    """The traced model, and the shapes of its weights by name."""
    buffers = {name: jnp.asarray(to_numpy(buffer)) for name, buffer in skeleton.buffers.items()}
    shapes = {name: _weight_shape(tensor) for name, tensor in skeleton.shapes.items()}
    return TracedModel(skeleton, skeleton.tied, buffers), shapes


def example_inputs(
    traced: TracedModel, params: dict[str, Any]
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Any]]:
    """Shapes of small example inputs of forward, and concrete values for inputs that determine shapes.

    Args:
        traced: the traced model from `without_weights`.
        params: the weight shapes from `without_weights`.

    Raises:
        NotImplementedError: no rule matches the module's inputs.
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
    # positions that depend on values, and other inputs computed on the host
    inputs = {
        name: _array_shape(value) if hasattr(value, "dtype") else value
        for name, value in traced.prepare(forward).items()
    }
    arrays = {name: value for name, value in inputs.items() if isinstance(value, jax.ShapeDtypeStruct)}
    return arrays, {name: value for name, value in inputs.items() if name not in arrays}


def _array_shape(tensor: Any) -> jax.ShapeDtypeStruct:
    array = tensor if isinstance(tensor, np.ndarray) else to_numpy(tensor)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _weight_shape(tensor: Any) -> jax.ShapeDtypeStruct:
    if tensor.device.type != "meta":
        return _array_shape(tensor)
    dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
    return jax.ShapeDtypeStruct(tuple(tensor.shape), _NARROW.get(dtype.name, dtype.name))
