"""Quantizes weights to 8- or 4-bit integers with scales while a model is loaded.

Turns one tensor in host memory into a `QuantizedArray` on the device; the tensor is not needed afterwards. The module determines
which weights are quantized: linear layer weights, including the output head and an embedding table tied to it, and experts behind
transformers' experts interface. Norms, biases, other embeddings and convolutions are not quantized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from hfax.errors import CheckpointCorruptError, UnsupportedOptionError
from hfax.kernels.quantized import INT4_GROUP, QuantizedArray
from hfax.load.packed import BITS, PackedLayout, PackedTensor
from hfax.load.placement import place

Quantization = Literal["int8", "int4"]

Quantized = Quantization | Mapping[str, PackedLayout] | None
"""What weights are quantized to, or how a checkpoint's own are packed, by name; None: not at all."""

_GROUPS = {"int8": (128, 64, 32), "int4": (INT4_GROUP,)}
"""Group sizes (columns per scale); the first that divides the row width is used."""


SCALE_SUFFIX = "_scale"
"""Appended to a weight's name to form the name of its scales in a saved checkpoint."""


def check_name(quantization: str | None) -> None:
    """Raise if the quantization is unknown.

    Raises:
        UnsupportedOptionError: lists the supported ones.
    """
    if quantization is not None and quantization not in get_args(Quantization):
        raise UnsupportedOptionError(
            f"quantization={quantization!r} is not supported.",
            "hfax quantizes weights to 8 or 4 bits; activations stay floating-point.",
            'Use quantization="int8", "int4" or None.',
        )


def weights_to_quantize(module: torch.nn.Module, shapes: dict[str, torch.Tensor], tied: dict[str, str]) -> set[str]:
    """Names in `shapes` of linear layer and expert weights."""
    found = set()
    for prefix, part in module.named_modules():
        if isinstance(part, torch.nn.Linear):
            name = f"{prefix}.weight".lstrip(".")
            found.add(tied.get(name, name))
        elif getattr(part, "is_transposed", None) is False:  # transformers' experts interface, [experts, out, in]
            found |= {f"{prefix}.{name}" for name in ("gate_up_proj", "up_proj", "down_proj")}
    return {name for name in found if name in shapes and shapes[name].ndim in (2, 3)}


def quantize(tensor: torch.Tensor, quantization: Quantization, where: Sharding) -> QuantizedArray | None:
    """Quantize a matrix, [out, in], or a stack of them, [n, out, in]; None if rows do not divide into groups.

    8 bits: each group's largest magnitude maps to 127. 4 bits: it maps to -8, so that all 16 values are used. If rows do not
    divide into 4-bit groups, 8 bits are used.
    """
    width = tensor.shape[-1]
    group = _group(width, quantization)
    if group is None:
        return quantize(tensor, "int8", where) if quantization == "int4" else None
    values, scale = _int8(tensor, group) if quantization == "int8" else _int4(tensor)
    return restore(values, scale, tensor.dtype, where)


def pack(tensor: PackedTensor, dtype: torch.dtype, where: Sharding) -> QuantizedArray | None:
    """A weight of another library's checkpoint with the codes it has; None if no kernel multiplies with them.

    Args:
        tensor: the weight.
        dtype: of the dequantized values.
        where: its sharding.
    """
    if not can_keep(tensor.layout):
        return None
    exact = tensor.scale.to(torch.bfloat16)
    if tensor.offset is not None or tensor.columns is not None or not torch.equal(exact.float(), tensor.scale.float()):
        return None
    values = tensor.codes if tensor.encoding == "int8" else _in_words(tensor.codes.add(8).view(torch.uint8))
    return restore(values, exact, dtype, where)


def can_keep(layout: PackedLayout) -> bool:
    """Whether weights stay packed as they are stored."""
    encodings: dict[str, Any] = _GROUPS
    return layout.group in encodings.get(layout.encoding, ()) and layout.shape[-1] % layout.group == 0


def layouts(
    module: torch.nn.Module,
    shapes: dict[str, torch.Tensor],
    tied: dict[str, str],
    quantization: Quantized,
) -> dict[str, PackedLayout]:
    """How each quantized weight is packed, by name.

    Args:
        module: of the skeleton.
        shapes: of the skeleton.
        tied: of the skeleton.
        quantization: what to quantize the weights to, or how the checkpoint's own are packed.
    """
    if not isinstance(quantization, str):
        return dict(quantization or {})
    found: dict[str, PackedLayout] = {}
    for name in weights_to_quantize(module, shapes, tied):
        shape = tuple(shapes[name].shape)
        if (kind := bits_and_group(shape[-1], quantization)) is not None:
            found[name] = PackedLayout(encoding="int8" if kind[0] == 8 else "int4", group=kind[1], shape=shape)
    return found


def bits_and_group(width: int, quantization: Quantization) -> tuple[int, int] | None:
    """Bits per weight and group size for rows of this width; None if they are not quantized."""
    if (group := _group(width, quantization)) is not None:
        return (8 if quantization == "int8" else 4), group
    return bits_and_group(width, "int8") if quantization == "int4" else None


def bytes_of(layout: PackedLayout) -> int:
    """Size of a quantized matrix, including scales of 16 bits, in bytes."""
    numbers = math.prod(layout.shape)
    return numbers * BITS[layout.encoding] // 8 + numbers // layout.group * 2


def _group(width: int, quantization: Quantization) -> int | None:
    return next((g for g in _GROUPS[quantization] if width % g == 0), None)


def restore(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, where: Sharding) -> QuantizedArray:
    """Build a `QuantizedArray` from stored integers (int8, or uint8 for 4 bits) and scales, both sharded as `where`.

    Raises:
        CheckpointCorruptError: unexpected dtypes.
    """
    bits = {torch.int8: 8, torch.uint8: 4}.get(values.dtype)
    if bits is None or scale.dtype != torch.bfloat16 or values.ndim != scale.ndim:
        raise CheckpointCorruptError(
            f"A quantized weight is stored as {values.dtype} with {scale.dtype} scales.",
            "hfax stores int8, or uint8 for 4 bits, with bfloat16 scales.",
            "Save the quantized model again.",
        )
    name = str(dtype).removeprefix("torch.")
    return QuantizedArray(
        values=place(values, where),
        scale=place(scale, where),
        bits=bits,
        dtype=jnp.dtype(name),
        spec=spec_of(where),
    )


def spec_of(where: Sharding) -> P | None:
    """The weight's partition spec on a mesh; None if it is not sharded."""
    return where.spec if isinstance(where, NamedSharding) and where.mesh.size > 1 else None


def _int8(tensor: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = tensor.float().reshape(*tensor.shape[:-1], -1, group)
    scale = (groups.abs().amax(-1) / 127).to(torch.bfloat16)
    values = (groups / _nonzero(scale)).round_().clamp_(-127, 127).to(torch.int8)
    return values.reshape(tensor.shape), scale


def _int4(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = tensor.float().reshape(*tensor.shape[:-1], -1, INT4_GROUP)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
    scale = (largest / -8).to(torch.bfloat16)
    values = (groups / _nonzero(scale)).round_().clamp_(-8, 7).to(torch.int8).add_(8).view(torch.uint8)
    return _in_words(values.reshape(tensor.shape)), scale


def _in_words(codes: torch.Tensor) -> torch.Tensor:
    """[..., in] uint8 codes of 4 bits as [..., in / 2] uint8, in the order of `QuantizedArray.values`."""
    quarters = codes.reshape(*codes.shape[:-1], -1, 4, 32).unbind(-2)
    low, high = quarters[0] | quarters[1] << 4, quarters[2] | quarters[3] << 4
    return torch.stack([low, high], dim=-1).reshape(*codes.shape[:-1], -1)


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """[..., groups, 1] float32; 1 where a group is all zeros."""
    return torch.where(scale == 0, torch.ones_like(scale), scale).float()[..., None]
