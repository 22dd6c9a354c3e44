"""A model's weights as a whole: counted, cast, replaced, and given to torch.

Functions of the flat dict of arrays by checkpoint name. They know neither programs nor adapters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Sharding

from hfax.backends.jax.results import as_torch_tree
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.kernels.quantized import QuantizedArray
from hfax.load.packed import PackedLayout
from hfax.load.quantize import matrix_sharding, part_sharding, spec_of, splits_columns
from hfax.load.rules import dtype_rule
from hfax.load.skeleton import Skeleton

Weights = Mapping[str, jax.Array]


def quantization_of(weights: Weights) -> str | None:
    """The encoding of quantized weights, of the one with the fewest bits if there are several; None: no weight is quantized."""
    found = {(array.bits, array.encoding) for array in weights.values() if isinstance(array, QuantizedArray)}
    return min(found)[1] if found else None


def packed_layouts(weights: Weights) -> dict[str, PackedLayout]:
    """How each quantized weight is packed, by name."""
    found: dict[str, PackedLayout] = {}
    for name, array in weights.items():
        if isinstance(array, QuantizedArray):
            *lead, rows, columns = array.shape
            shape = (*lead, columns, rows) if array.is_transposed else array.shape
            found[name] = PackedLayout(
                encoding=array.encoding, group=array.group, shape=shape, is_transposed=array.is_transposed
            )
    return found


def count_numbers(
    weights: Weights, module: torch.nn.Module, *, among: Collection[str] | None = None, exclude_embeddings: bool = False
) -> int:
    """Numbers in the weights, without buffers.

    Args:
        weights: the weights.
        module: the module that they are of.
        among: names of the weights to count; None: all.
        exclude_embeddings: exclude the embedding tables.
    """
    left_out = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if among is not None:
        left_out |= set(weights) - set(among)
    if exclude_embeddings:
        left_out |= {f"{path}.weight" for path, part in module.named_modules() if isinstance(part, torch.nn.Embedding)}
    return sum(p.size for name, p in weights.items() if name not in left_out)


def as_state_dict(weights: Weights, tied: Mapping[str, str], class_name: str) -> dict[str, torch.Tensor]:
    """The weights as torch tensors on the CPU, tied weights under each of their names.

    Args:
        weights: the weights.
        tied: alias mapped to name, for weights that share an array.
        class_name: class of the model, for the error.

    Raises:
        UnsupportedOptionError: the weights are quantized.
    """
    if (kind := quantization_of(weights)) is not None:
        raise UnsupportedOptionError(
            f"{class_name} has no state_dict(): its weights are quantized ({kind}).",
            "No torch module loads integers with hfax's scales.",
            "Use model.params, or load the checkpoint without quantization.",
        )
    names = list(weights)
    found = dict(zip(names, as_torch_tree([weights[name] for name in names]), strict=True))
    return found | {alias: found[name] for alias, name in tied.items()}


def moved(weight: Any, where: Sharding) -> Any:
    """A weight with another sharding. A packed one with an order of columns of its own is dequantized where columns are split."""
    if not isinstance(weight, QuantizedArray):
        return jax.device_put(weight, where)
    if weight.columns is not None and splits_columns(where, weight.shape):
        return jax.device_put(weight.dequantize(), where)
    where = matrix_sharding(where, weight.ndim, weight.is_transposed)
    fields = {f: a for f in ("values", "scale", "offset", "columns") if (a := getattr(weight, f)) is not None}
    placed = {field: jax.device_put(array, part_sharding(field, where)) for field, array in fields.items()}
    return dataclasses.replace(weight, **placed, spec=spec_of(where))


def cast(weights: Weights, skeleton: Skeleton, dtype: torch.dtype) -> dict[str, jax.Array]:
    """The weights in another dtype, but for those that the model keeps in float32.

    Args:
        weights: the weights.
        skeleton: of the module in the new dtype.
        dtype: the new dtype.
    """
    rule = dtype_rule(skeleton.module, dtype)
    dtypes = {name: rule(name, meta) for name, meta in skeleton.shapes.items()}
    wanted = {name: jnp.dtype(str(dtype).removeprefix("torch.")) for name, dtype in dtypes.items()}
    return {
        name: dataclasses.replace(a, dtype=wanted[name]) if isinstance(a, QuantizedArray) else a.astype(wanted[name])
        for name, a in weights.items()
    }


def replaced(weights: Weights, new: Mapping[str, Any], class_name: str) -> dict[str, jax.Array]:
    """The weights with some of them replaced, in their dtypes.

    Args:
        weights: the weights.
        new: arrays by name.
        class_name: class of the model, for the error.

    Raises:
        InvalidInputError: there is no weight of a given name, or its shape differs.
    """
    for name, array in new.items():
        if name not in weights or tuple(array.shape) != tuple(weights[name].shape):
            raise InvalidInputError(
                f"{name!r} with shape {tuple(array.shape)} is not a weight of {class_name}.",
                f"The model's weight has shape {tuple(weights[name].shape)}."
                if name in weights
                else "The model has no weight of that name.",
                "Pass weights with the names and shapes of `model.params`.",
            )
    return {**weights, **{n: a.astype(weights[n].dtype) for n, a in new.items()}}
