"""A model's GGUF files, one or several, as one set of tensors. It knows ggml's names, and nothing about architectures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hfax.errors import CheckpointCorruptError
from hfax.load.gguf.blocks import PLAIN, check_type, dequantize, layout_of, pack
from hfax.load.gguf.file import GgufFile
from hfax.load.packed import PackedLayout, PackedTensor

_NUMBERS_AT_A_TIME = 4 << 20
"""Of a packed tensor, whose codes are read in parts."""


class GgufModel:
    """Tensors of GGUF files by name.

    Args:
        paths: the file, or all files of a split one, in order.

    Attributes:
        metadata: of the first file.
        architecture: llama.cpp's name of the model's architecture.
        files: the files.

    Raises:
        CheckpointCorruptError: a file is damaged, or the files do not belong together.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [GgufFile(path) for path in paths]
        self.metadata: dict[str, Any] = self.files[0].metadata
        self._where = {name: file for file in self.files for name in file.tensors}
        announced = self.metadata.get("split.count", 1) or 1
        if announced != len(paths) or len(self._where) != sum(len(file.tensors) for file in self.files):
            raise CheckpointCorruptError(
                f"{paths[0]} is one of {announced} files, and {len(paths)} were found; they hold {len(self._where)} tensors.",
                "The files of a split model lie in one folder, named …-00001-of-0000N.gguf, and share no tensor.",
                "Download all files of the model again, under the names that they had.",
            )
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointCorruptError(
                f"{paths[0]} does not say which architecture it holds.",
                f"Its metadata have general.architecture={architecture!r}.",
                "Make the file again with llama.cpp's convert_hf_to_gguf.py.",
            )
        self.architecture: str = architecture

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._where)

    @property
    def float_dtype(self) -> torch.dtype:
        """bfloat16 if any tensor is quantized or bfloat16; else float16 if any tensor is; else float32."""
        kinds = {info.type for file in self.files for info in file.tensors.values()}
        if any(kind not in PLAIN for kind in kinds) or 30 in kinds:
            return torch.bfloat16
        return torch.float16 if 1 in kinds else torch.float32

    def check_types(self) -> None:
        """Raise `UnsupportedModelError` if the type of a tensor cannot be read."""
        for name, file in self._where.items():
            check_type(file.tensors[name].type, name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, in torch's order."""
        return self._where[name].tensors[name].shape

    def layouts(self) -> dict[str, PackedLayout]:
        """How the tensors that `read_packed` reads are packed."""
        infos = {name: file.tensors[name] for name, file in self._where.items()}
        found = {name: layout_of(info.type, info.shape) for name, info in infos.items()}
        return {name: layout for name, layout in found.items() if layout is not None}

    def read(self, name: str) -> torch.Tensor:
        """A tensor in the floating-point type that the file stores; float32 if it is quantized."""
        shape = self.shape(name)
        return self._rows(name, 0, math.prod(shape[:-1])).reshape(shape)

    def read_slice(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Part of a tensor; only the needed part of its first axis is read."""
        shape = self.shape(name)
        if len(shape) < 2:
            return self.read(name)[index]
        first, last, step = index[0].indices(shape[0])
        inner = math.prod(shape[1:-1])
        rows = self._rows(name, first * inner, max(first, last) * inner).reshape(-1, *shape[1:])
        return rows[(slice(None, None, step), *index[1:])]

    def read_packed(self, name: str) -> PackedTensor:
        """A tensor with its codes, scales and offsets."""
        shape = self.shape(name)
        kind, rows = self._where[name].tensors[name].type, math.prod(shape[:-1])
        step = max(1, _NUMBERS_AT_A_TIME // shape[-1])  # blocks are taken apart into several times their size
        whole: PackedTensor | None = None
        for first in range(0, max(rows, 1), step):
            part = pack(kind, self._bytes(name, first, min(rows, first + step)))
            if whole is None:
                fields = {field: getattr(part, field) for field in ("codes", "scale", "offset")}
                empty = {f: None if a is None else a.new_empty((rows, a.shape[-1])) for f, a in fields.items()}
                whole = dataclasses.replace(part, **empty)
            for field in ("codes", "scale", "offset"):
                if (to := getattr(whole, field)) is not None:
                    to[first : first + step] = getattr(part, field)
        assert whole is not None

        def shaped(part: torch.Tensor) -> torch.Tensor:
            return part.reshape(*shape[:-1], part.shape[-1])

        return PackedTensor(
            encoding=whole.encoding,
            codes=shaped(whole.codes),
            scale=shaped(whole.scale),
            offset=None if whole.offset is None else shaped(whole.offset),
        )

    def _rows(self, name: str, first: int, last: int) -> torch.Tensor:
        return dequantize(self._where[name].tensors[name].type, self._bytes(name, first, last))

    def _bytes(self, name: str, first: int, last: int) -> torch.Tensor:
        return torch.from_numpy(self._where[name].read_rows(name, first, last))
