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
from hfax.kernels.encodings import FP4_VALUES, Encoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """How a weight is packed, known before its tensors are read.

    Args:
        encoding: of its codes.
        group: columns that share a scale.
        shape: of the weight, [..., out, in].
    """

    encoding: Encoding
    group: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """A weight, [..., out, in], as codes: column i of a row is `value(code) * scale + offset`, with its group's scale and offset.

    Args:
        encoding: of `codes`.
        codes: [..., out, in], one code in each element: int8 from -8 to 7 for "int4", int8 for "int8", uint8 below 16 for "fp4",
            float8_e4m3fn for "fp8".
        scale: [..., out, in / group], bfloat16, float16 or float32.
        offset: [..., out, in / group] in a floating-point dtype; None: 0.
        columns: [in] int64, the weight's column that each column of `codes` is; None: the same.
    """

    encoding: Encoding
    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    @property
    def layout(self) -> PackedLayout:
        """Its encoding, group and shape."""
        group = self.codes.shape[-1] // self.scale.shape[-1]
        return PackedLayout(encoding=self.encoding, group=group, shape=tuple(self.codes.shape))

    def dequantize(self) -> torch.Tensor:
        """[..., out, in] float32, in the weight's order of columns."""
        if self.encoding == "fp4":
            numbers = torch.tensor(FP4_VALUES)[self.codes.long()]
        else:
            numbers = self.codes.float()
        groups = numbers.unflatten(-1, (self.scale.shape[-1], -1)) * self.scale.float()[..., None]
        if self.offset is not None:
            groups += self.offset.float()[..., None]
        weight = groups.flatten(-2)
        if self.columns is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[..., self.columns] = weight
        return ordered


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
