"""Weights as other libraries' quantized checkpoints store them, in one form: codes with scales and offsets.

A reader in `hfax.load.formats` finds the weights among one format's stored tensors, under the names of the unquantized
checkpoint; each is read as a `PackedTensor` in host memory, or as numbers where no such form fits. Whether a kernel multiplies
with the codes or they are dequantized is decided in `hfax.load.quantize`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from hfax.kernels.encodings import BITS as BITS
from hfax.kernels.encodings import FP4_VALUES, Encoding, columns_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """How a weight is packed, known before its tensors are read.

    Args:
        encoding: of its codes.
        group: columns that share a scale.
        shape: of the matrix, [..., out, in].
        is_transposed: the weight is the transpose, [..., in, out].
        scale_bytes: of a scale.
        offset_bytes: of an offset; 0: there are none.
    """

    encoding: Encoding
    group: int
    shape: tuple[int, ...]
    is_transposed: bool = False
    scale_bytes: int = 2
    offset_bytes: int = 0

    @property
    def num_columns(self) -> int:
        """Columns of the codes on a device, padding included."""
        return columns_of(self.shape[-1], self.encoding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """A matrix, [..., out, in], as codes: column i of a row is `value(code) * scale + offset`, with its group's scale and offset.

    Args:
        encoding: of `codes`.
        codes: [..., out, in], one code in each element: int8 from -8 to 7 for "int4", int8 for "int8", uint8 below 16 for "fp4",
            float8_e4m3fn for "fp8".
        scale: [..., out, in / group], bfloat16, float16 or float32.
        offset: [..., out, in / group] in a floating-point dtype; None: 0.
        columns: [in] int64, the weight's column that each column of `codes` is; None: the same.
        is_transposed: the weight is the transpose, [..., in, out].
    """

    encoding: Encoding
    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    is_transposed: bool = False

    @property
    def layout(self) -> PackedLayout:
        """How it is packed."""
        return PackedLayout(
            encoding=self.encoding,
            group=self.codes.shape[-1] // self.scale.shape[-1],
            shape=tuple(self.codes.shape),
            is_transposed=self.is_transposed,
            scale_bytes=self.scale.element_size(),
            offset_bytes=0 if self.offset is None else self.offset.element_size(),
        )

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        return (self.codes.mT if self.is_transposed else self.codes).shape

    def dequantize(self) -> torch.Tensor:
        """The weight in float32."""
        if self.encoding == "fp4":
            numbers = torch.tensor(FP4_VALUES)[self.codes.long()]
        else:
            numbers = self.codes.float()
        groups = numbers.unflatten(-1, (self.scale.shape[-1], -1)) * self.scale.float()[..., None]
        if self.offset is not None:
            groups += self.offset.float()[..., None]
        matrix = groups.flatten(-2)
        if self.columns is not None:
            stored, matrix = matrix, torch.empty_like(matrix)
            matrix[..., self.columns] = stored
        return matrix.mT if self.is_transposed else matrix


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A weight that a quantized checkpoint stores in several tensors, or in another form than numbers.

    Args:
        parts: names of the stored tensors that make it up.
        shape: of the weight.
        layout: how it is packed; None if `read` returns numbers, since codes, scales and offsets cannot express the format.
        read: reads it: a `PackedTensor` of that layout, or a floating-point tensor.
    """

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    layout: PackedLayout | None
    read: Callable[[], PackedTensor | torch.Tensor]
