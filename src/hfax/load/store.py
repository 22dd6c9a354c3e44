"""A uniform tensor store over a checkpoint's weight files, for all formats. It knows nothing about models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.core_model_loading import WeightTransform

from hfax.load.flax_msgpack import read_flax_index
from hfax.load.flax_names import torch_arrays
from hfax.load.packed import PackedLayout, PackedTensor, StoredWeight
from hfax.load.pytorch_bin import read_pytorch_bin
from hfax.load.safetensors_file import SafetensorsFile, as_torch
from hfax.load.source import CheckpointSource

if TYPE_CHECKING:
    import jax


def _no_packed(name: str) -> PackedTensor:
    raise KeyError(name)


def _unknown_dtype(name: str) -> torch.dtype | None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorStore:
    """Stored tensors by name.

    Args:
        names: names of all tensors.
        read: returns a tensor in unshared host memory.
        read_slice: returns part of a tensor, given one slice per axis, without reading the rest.
        shape: returns a tensor's shape.
        float_dtype: dtype of the floating-point tensors; None if there are none.
        dtype: returns the dtype that a tensor is stored in; None if it is unknown.
        is_flax: written by a Flax class, which does not store some of the PyTorch class's weights.
        packed: how weights are packed, by name; `read` dequantizes them.
        read_packed: reads a weight that is in `packed`.
        rules: transformers' conversion rules for a model of this config, for a format with names of its own; None: the rules of the
            model's class.
        assembled: names of weights that are made of several tensors, so that part of one costs as much as all of it.
        metadata: free-form texts of the files, by name; those of all files together.
    """

    names: Iterable[str]
    read: Callable[[str], torch.Tensor]
    read_slice: Callable[[str, tuple[slice, ...]], torch.Tensor]
    shape: Callable[[str], tuple[int, ...]]
    float_dtype: torch.dtype | None
    dtype: Callable[[str], torch.dtype | None] = _unknown_dtype
    is_flax: bool = False
    packed: Mapping[str, PackedLayout] = dataclasses.field(default_factory=dict)
    read_packed: Callable[[str], PackedTensor] = _no_packed
    rules: Callable[[PretrainedConfig], list[WeightTransform]] | None = None
    assembled: Collection[str] = frozenset()
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def described(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the tensors whose dtype is known, by name."""
        import jax  # the environment of torch_xla has none

        dtypes = {name: self.dtype(name) for name in self.names}
        return {
            name: jax.ShapeDtypeStruct(self.shape(name), str(dtype).removeprefix("torch."))
            for name, dtype in dtypes.items()
            if dtype is not None
        }

    def with_weights(self, weights: Mapping[str, StoredWeight], *, without: Collection[str] = ()) -> TensorStore:
        """The store in which tensors that belong together are one weight each.

        Args:
            weights: by name.
            without: names of tensors that it does not have.
        """
        parts = {part for weight in weights.values() for part in weight.parts} | set(without)

        def read(name: str) -> torch.Tensor:
            if name not in weights:
                return self.read(name)
            found = weights[name].read()
            return found.dequantize() if isinstance(found, PackedTensor) else found

        def read_packed(name: str) -> PackedTensor:
            found = weights[name].read()
            assert isinstance(found, PackedTensor), f"{name} has a layout, and was read as numbers"
            return found

        return dataclasses.replace(
            self,
            names=(*(name for name in self.names if name not in parts), *weights),
            read=read,
            read_slice=lambda name, index: read(name)[index] if name in weights else self.read_slice(name, index),
            shape=lambda name: weights[name].shape if name in weights else self.shape(name),
            packed={name: weight.layout for name, weight in weights.items() if weight.layout is not None},
            read_packed=read_packed,
            assembled=frozenset(weights),
        )


def open_store(source: CheckpointSource) -> TensorStore:
    """Index the checkpoint's weight files.

    Raises:
        CheckpointCorruptError: a file is damaged or not in its format.
    """
    if source.format == "pytorch_bin":
        tensors = read_pytorch_bin(source.weight_files)
        dtypes = [t.dtype for t in tensors.values() if t.is_floating_point()]
        return TensorStore(
            names=tuple(tensors),
            read=lambda name: tensors[name].clone(),
            read_slice=lambda name, index: tensors[name][index].clone(),
            shape=lambda name: tuple(tensors[name].shape),
            float_dtype=next(iter(dtypes), None),
            dtype=lambda name: tensors[name].dtype,
        )
    if source.format == "flax":
        return _open_flax(source)
    if source.format == "gguf":
        return _open_gguf(source)
    files = [SafetensorsFile(path) for path in source.safetensors_files]
    where = {name: file for file in files for name in file.tensors}
    dtypes = (file.tensors[name].dtype for name, file in where.items())
    stored = next((_TORCH_DTYPES[dtype] for dtype in dtypes if dtype in _TORCH_DTYPES), None)
    return TensorStore(
        names=tuple(where),
        read=lambda name: as_torch(where[name].read(name)),
        read_slice=lambda name, index: as_torch(where[name].read_slice(name, index)),
        shape=lambda name: where[name].tensors[name].shape,
        float_dtype=stored,
        dtype=lambda name: where[name].tensors[name].torch_dtype,
        metadata={name: text for file in files for name, text in file.metadata.items()},
    )


def _open_gguf(source: CheckpointSource) -> TensorStore:
    from hfax.load.gguf.architectures import COMPUTED, check_architecture, conversion_rules
    from hfax.load.gguf.model import GgufModel

    model = GgufModel(source.weight_files)
    check_architecture(model.architecture)
    model.check_types()
    return TensorStore(
        names=tuple(name for name in model.names if name not in COMPUTED),
        read=model.read,
        read_slice=model.read_slice,
        shape=model.shape,
        float_dtype=model.float_dtype,
        packed=model.layouts(),
        read_packed=model.read_packed,
        rules=lambda config: conversion_rules(model.architecture, config),
    )


def _open_flax(source: CheckpointSource) -> TensorStore:
    arrays = {}
    for path in source.weight_files:
        arrays |= {name: rest for name, *rest in torch_arrays(read_flax_index(path))}
    floats = (dtype for _, dtype, _ in arrays.values() if dtype.kind not in "biu")

    def read_slice(name: str, index: tuple[slice, ...]) -> torch.Tensor:
        return as_torch(np.array(arrays[name][2]()[index]))

    first = next(floats, None)
    return TensorStore(
        names=tuple(arrays),
        read=lambda name: as_torch(np.array(arrays[name][2](), order="C")),
        read_slice=read_slice,
        shape=lambda name: arrays[name][0],
        float_dtype=None if first is None else getattr(torch, first.name, torch.float32),
        is_flax=True,
    )


_TORCH_DTYPES = {"F64": torch.float32, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
