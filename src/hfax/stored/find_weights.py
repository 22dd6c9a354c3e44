"""Finds each weight of a loaded model in its checkpoint's files, and what was done to it, for the model's record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
import torch

from hfax.errors import CheckpointCorruptError, UnsupportedOptionError
from hfax.kernels.quantized import QuantizedArray
from hfax.load.codes import Quantization, bits_and_group
from hfax.load.conversion import ConversionStep, moves_rows, plan_conversion, run_step
from hfax.load.saved_parts import names_of
from hfax.stored.weights import StoredRows, StoredTensor, StoredWeight

if TYPE_CHECKING:
    from hfax.backends.jax.model import JaxModel
    from hfax.stored.reader import WeightReader


class _Stored(NamedTuple):
    """A tensor of the checkpoint: its place, shape and dtype."""

    tensor: StoredTensor
    shape: tuple[int, ...]
    dtype: np.dtype


def find_weights(
    reader: WeightReader, folder: Path, model: JaxModel, quantization: str | None, *, has_own_names: bool
) -> dict[str, StoredWeight] | None:
    """Where each weight is; None if one of them is not made of the checkpoint's numbers in a way that a record describes.

    Args:
        reader: has the checkpoint's files.
        folder: of the checkpoint.
        model: the model.
        quantization: what its weights were quantized to when they were loaded.
        has_own_names: tensors have the names of the model's weights, and `names_of` those of quantized ones.
    """
    try:
        stored = {
            name: _Stored(StoredTensor(file=index, name=name), info.shape, info.numpy_dtype)
            for index, file in enumerate(reader.files)
            for name, info in file.tensors.items()
        }
    except UnsupportedOptionError:  # numbers of less than a byte
        return None
    method = _quantization_method(folder)
    if has_own_names or method == "hfax":
        found = {name: _as_saved(name, weight, stored) for name, weight in model.params.items()}
    elif method is None:
        kind = next((kind for kind in get_args(Quantization) if kind == quantization), None)
        found = dict(_as_converted(model, stored, kind))
    else:
        return None  # packed by another library
    whole = {name: weight for name, weight in found.items() if weight is not None}
    return whole if whole.keys() == model.params.keys() else None


def _as_saved(name: str, weight: Any, stored: Mapping[str, _Stored]) -> StoredWeight | None:
    """A weight that has its own name in the file, of a quantized one each field."""
    is_packed = isinstance(weight, QuantizedArray)
    names: Mapping[str, str] = names_of(name, weight) if is_packed else {"values": name}
    arrays = {field: getattr(weight, field) if is_packed else weight for field in names}
    if any(
        one is None or (one.shape, one.dtype) != (arrays[field].shape, arrays[field].dtype)
        for field, one in ((field, stored.get(stored_name)) for field, stored_name in names.items())
    ):
        return None
    tensors = {field: stored[stored_name].tensor for field, stored_name in names.items()}
    if not is_packed:
        return StoredWeight(tensors=tensors)
    of_matrix: Any = {"width": weight.width, "is_transposed": weight.is_transposed}
    return StoredWeight(tensors=tensors, encoding=weight.encoding, dtype=weight.dtype.name, **of_matrix)


def _as_converted(
    model: JaxModel, stored: Mapping[str, _Stored], quantization: Quantization | None
) -> Iterator[tuple[str, StoredWeight | None]]:
    """Weights by transformers' conversion of the checkpoint, cast and quantized as they are in the model."""
    for step in plan_conversion(model.skeleton, stored).steps:
        for name, (parts, shape) in _moved(step, stored, model).items():
            if (weight := model.params.get(name)) is not None:
                yield name, _as_changed(weight, parts, shape, stored, quantization)


_Moved = tuple[tuple[StoredRows, ...] | StoredTensor, tuple[int, ...]]
"""The rows of which a weight is made, or the tensor that it is, and its shape."""


def _moved(step: ConversionStep, stored: Mapping[str, _Stored], model: JaxModel) -> dict[str, _Moved]:
    """What a step only moves, by weight; empty if it computes with numbers.

    The step runs on one column that numbers the rows of all its sources; where each number ends up is where a row goes.
    """
    sources = [stored[name] for name, _ in step.sources]
    if step.converter is None:
        return {step.target: (sources[0].tensor, sources[0].shape)}
    width = sources[0].shape[-1:]
    if not moves_rows(step) or not all(
        s.shape and s.shape[-1:] == width and s.dtype == sources[0].dtype for s in sources
    ):
        return {}
    heights = [math.prod(source.shape[:-1]) for source in sources]
    starts = np.cumsum([0, *heights])
    numbers = {
        name: torch.arange(start, start + height).reshape(*source.shape[:-1], 1)
        for (name, _), source, start, height in zip(step.sources, sources, starts, heights, strict=False)
    }
    try:
        converted = dict(run_step(step, numbers.__getitem__, model.skeleton.module))
    except CheckpointCorruptError:  # an operation looks at the number of columns
        return {}
    if any(marks.shape[-1] != 1 for marks in converted.values()):
        return {}
    return {
        name: (tuple(_runs(marks.flatten().numpy(), sources, starts)), (*marks.shape[:-1], *width))
        for name, marks in converted.items()
    }


def _runs(numbers: np.ndarray, sources: list[_Stored], starts: np.ndarray) -> Iterator[StoredRows]:
    """Consecutive rows of one source each."""
    source_of = np.searchsorted(starts, numbers, side="right") - 1
    breaks = np.flatnonzero((np.diff(numbers) != 1) | (np.diff(source_of) != 0)) + 1
    for begin, end in zip([0, *breaks], [*breaks, len(numbers)], strict=True):
        source = source_of[begin]
        first = int(numbers[begin] - starts[source])
        yield StoredRows(tensor=sources[source].tensor, begin=first, end=first + int(end - begin))


def _as_changed(
    weight: Any,
    parts: tuple[StoredRows, ...] | StoredTensor,
    shape: tuple[int, ...],
    stored: Mapping[str, _Stored],
    quantization: Quantization | None,
) -> StoredWeight | None:
    """A weight made of these numbers by a cast and a quantization, if at all."""
    is_tensor = isinstance(parts, StoredTensor)
    dtype = stored[parts.name if is_tensor else parts[0].tensor.name].dtype
    is_cast = weight.dtype != dtype
    if weight.shape != shape or (is_cast and not (_is_float(weight.dtype) and _is_float(dtype))):
        return None
    of_matrix: dict[str, Any] = {}
    if is_quantized := isinstance(weight, QuantizedArray):
        width = shape[-2 if weight.is_transposed else -1]
        if quantization is None or bits_and_group(width, quantization) != (weight.bits, weight.group):
            return None
        of_matrix = {"width": weight.width, "is_transposed": weight.is_transposed}
    return StoredWeight(
        tensors={"values": parts} if is_tensor else {},
        rows=() if is_tensor else parts,
        shape=() if is_tensor else shape,
        dtype=jnp.dtype(weight.dtype).name if is_cast else "",
        quantization=quantization if is_quantized else None,
        **of_matrix,
    )


def _is_float(dtype: Any) -> bool:
    return jnp.dtype(dtype).name in ("float32", "bfloat16", "float16")


def _quantization_method(folder: Path) -> str | None:
    """What a checkpoint was quantized with; None if it was not."""
    config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    given = config.get("quantization_config")
    return None if given is None else str(given.get("quant_method"))
