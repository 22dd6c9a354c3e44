"""Quantizes weights to 8- or 4-bit integers with scales while a model is loaded.

Turns one tensor in host memory into a `QuantizedArray` on the device; the tensor is not needed afterwards. The module determines
which weights are quantized: linear layer weights, including the output head and an embedding table tied to it, and experts behind
transformers' experts interface. Norms, biases, other embeddings and convolutions are not quantized.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from hfax.errors import CheckpointCorruptError, UnsupportedOptionError
from hfax.kernels.encodings import GROUPS, Encoding, columns_of, padded_width, pays
from hfax.kernels.quantized import QuantizedArray
from hfax.load.codes import Quantization as Quantization
from hfax.load.codes import bits_and_group, in_words, to_codes
from hfax.load.host_arrays import to_numpy
from hfax.load.packed import BITS, PackedLayout, PackedTensor
from hfax.load.placement import place

Quantized = Quantization | Mapping[str, PackedLayout] | None
"""What weights are quantized to, or how a checkpoint's own are packed, by name; None: not at all."""

_WITH_KERNELS = ("cpu", "tpu", "cuda", "gpu")
"""Platforms with kernels for weights packed by others, in all of `GROUPS`; a multiple of a group is split."""


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
    linear = (f"{prefix}.weight".lstrip(".") for prefix, m in module.named_modules() if isinstance(m, torch.nn.Linear))
    found = {tied.get(name, name) for name in linear} | {name for name, _ in experts_weights(module)}
    return {name for name in found if name in shapes and shapes[name].ndim in (2, 3)}


def experts_weights(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Names that weights of experts behind transformers' interface have, with the module that they are of."""
    for prefix, part in module.named_modules():
        if getattr(part, "is_transposed", None) is not None:
            for name in ("gate_up_proj", "up_proj", "down_proj"):
                yield f"{prefix}.{name}", part


def transposed_weights(module: torch.nn.Module) -> set[str]:
    """Names of experts' weights that are [experts, in, out]."""
    return {name for name, part in experts_weights(module) if part.is_transposed}


def quantize(
    tensor: torch.Tensor, quantization: Quantization, where: Sharding, *, is_transposed: bool = False
) -> QuantizedArray | None:
    """Quantize a weight by `to_codes`; None if rows do not divide into groups.

    Args:
        tensor: [out, in], or a stack of such, [n, out, in]; their transposes if `is_transposed`.
        quantization: what to.
        where: its sharding.
        is_transposed: rows of the matrix are the weight's columns.
    """
    matrix = tensor.mT if is_transposed else tensor
    if (found := to_codes(to_numpy(matrix), quantization)) is None:
        return None
    where = matrix_sharding(where, tensor.ndim, is_transposed)
    codes, scale = (place(part, where) for part in found)
    encoding = encoding_of(codes.dtype.name)
    assert encoding is not None
    return QuantizedArray(
        values=codes,
        scale=scale,
        encoding=encoding,
        dtype=jnp.dtype(str(tensor.dtype).removeprefix("torch.")),
        width=padded_width(matrix.shape[-1], encoding),
        is_transposed=is_transposed,
        spec=spec_of(where),
    )


def matrix_sharding(where: Sharding, ndim: int, is_transposed: bool) -> Sharding:
    """The sharding of a weight's matrix, [..., out, in], from the weight's."""
    if not is_transposed or not isinstance(where, NamedSharding):
        return where
    *lead, rows, columns = (*where.spec, *[None] * ndim)[:ndim]
    return NamedSharding(where.mesh, P(*lead, columns, rows))


def pack(tensor: PackedTensor, dtype: torch.dtype, where: Sharding) -> QuantizedArray | None:
    """A weight of another library's checkpoint with the codes it has; None if no kernel multiplies with them.

    Args:
        tensor: the weight.
        dtype: of the dequantized values.
        where: its sharding.
    """
    platform = next(iter(where.device_set)).platform
    layout = kept_layout(tensor.layout, platform)
    if layout is None or (tensor.columns is not None and splits_columns(where, tensor.shape)) or _has_nan(tensor):
        return None

    def of_groups(numbers: torch.Tensor) -> torch.Tensor:
        repeated = numbers.repeat_interleave(tensor.layout.group // layout.group, dim=-1)
        repeated = torch.nn.functional.pad(repeated, (0, layout.num_columns // layout.group - repeated.shape[-1]))
        return (
            repeated.float() if platform == "tpu" and numbers.dtype == torch.float16 else repeated
        )  # it has no float16

    parts = {"scale": of_groups(tensor.scale)}
    if tensor.offset is not None:
        parts["offset"] = of_groups(tensor.offset)
    if tensor.columns is not None:
        parts["columns"] = tensor.columns.to(torch.int32)
    of_weight: Any = {"shape": tuple(tensor.shape), "is_transposed": tensor.is_transposed}
    if BITS[tensor.encoding] == 8:
        return restore({"values": tensor.codes, **parts}, dtype, where, **of_weight)
    words = torch.from_numpy(in_words(to_numpy(tensor.codes), tensor.encoding))
    return restore({"values": words, **parts}, dtype, where, **of_weight, encoding=tensor.encoding)


def kept_layout(layout: PackedLayout, platform: str) -> PackedLayout | None:
    """How a stored weight is packed on devices of a platform, where a large group is several; None: it is dequantized."""
    group = _kept_group(layout, platform)
    return None if group is None else dataclasses.replace(layout, group=group)


def _kept_group(layout: PackedLayout, platform: str) -> int | None:
    width = layout.shape[-1]
    if width % layout.group or (BITS[layout.encoding] == 4 and not pays(width)):
        return None
    if platform not in _WITH_KERNELS:
        return None
    return next((g for g in GROUPS if layout.group % g == 0), None)


def splits_columns(where: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether devices hold different columns, which a permutation would mix."""
    return where.shard_shape(shape)[-1] != shape[-1]


def _has_nan(tensor: PackedTensor) -> bool:
    """Whether a code of 8 bits stands for no number, which the kernels do not look for."""
    return tensor.encoding == "fp8" and bool((tensor.codes.view(torch.uint8).bitwise_and(0x7F) == 0x7F).any())


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
    transposed = transposed_weights(module)
    for name in weights_to_quantize(module, shapes, tied):
        is_transposed = name in transposed
        shape = tuple((shapes[name].mT if is_transposed else shapes[name]).shape)
        if (kind := bits_and_group(shape[-1], quantization)) is not None:
            encoding: Encoding = "int8" if kind[0] == 8 else "int4"
            found[name] = PackedLayout(encoding=encoding, group=kind[1], shape=shape, is_transposed=is_transposed)
    return found


def bytes_of(layout: PackedLayout) -> int:
    """Size of a quantized matrix with its scales and offsets, in bytes."""
    numbers = math.prod(layout.shape[:-1]) * layout.num_columns
    return numbers * BITS[layout.encoding] // 8 + numbers // layout.group * (layout.scale_bytes + layout.offset_bytes)


def restore(
    parts: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    where: Sharding,
    *,
    shape: tuple[int, ...],
    is_transposed: bool = False,
    encoding: Encoding | None = None,
) -> QuantizedArray:
    """Build a `QuantizedArray` from its arrays in host memory.

    Args:
        parts: by field; `values` and `scale` at least.
        dtype: of the dequantized values.
        where: sharding of the weight.
        shape: of the weight.
        is_transposed: the codes are of its transpose.
        encoding: of the codes; None: int8, int4 or fp8, by their dtype.

    Raises:
        CheckpointCorruptError: unexpected dtypes or shapes.
    """
    values, scale = parts["values"], parts["scale"]
    encoding = encoding or encoding_of(str(values.dtype).removeprefix("torch."))
    of_groups = [part for name, part in parts.items() if name in ("scale", "offset")]
    fits = all(part.dtype in _SCALE_DTYPES and part.shape == scale.shape for part in of_groups)
    if encoding is None or not fits or values.shape[:-1] != scale.shape[:-1]:
        raise CheckpointCorruptError(
            f"A quantized weight is stored as {values.dtype} {tuple(values.shape)} with {scale.dtype} scales"
            f" {tuple(scale.shape)}.",
            "hfax stores int8, float8_e4m3fn, or uint8 for 4 bits, with floating-point scales of at most 32 bits.",
            "Save the quantized model again.",
        )
    where = matrix_sharding(where, len(shape), is_transposed)
    placed = {field: place(part, part_sharding(field, where)) for field, part in parts.items()}
    return QuantizedArray(
        **placed,
        encoding=encoding,
        dtype=jnp.dtype(str(dtype).removeprefix("torch.")),
        width=width_in(shape, values.shape[-1], encoding, is_transposed=is_transposed),
        is_transposed=is_transposed,
        spec=spec_of(where),
    )


def width_in(shape: tuple[int, ...], stored: int, encoding: Encoding, *, is_transposed: bool) -> int | None:
    """`QuantizedArray.width` of a weight whose codes have been stored.

    Args:
        shape: of the weight.
        stored: last axis of the codes.
        encoding: of the codes.
        is_transposed: rows of the codes are the weight's columns.
    """
    width = shape[-2 if is_transposed else -1]
    is_padded = stored * 8 // BITS[encoding] == columns_of(width, encoding)
    return padded_width(width, encoding) if is_padded else None  # else the array's shape is not the weight's


_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def encoding_of(dtype: str) -> Encoding | None:
    """The encoding of codes stored in this dtype, if it is not "fp4"."""
    found: dict[str, Encoding] = {"int8": "int8", "uint8": "int4", "float8_e4m3fn": "fp8"}
    return found.get(dtype)


def part_sharding(field: str, where: Sharding) -> Sharding:
    """The sharding of a field of a `QuantizedArray`: the weight's, but every device has the order of columns."""
    return NamedSharding(where.mesh, P()) if field == "columns" and isinstance(where, NamedSharding) else where


def spec_of(where: Sharding) -> P | None:
    """The weight's partition spec on a mesh; None if it is not sharded."""
    return where.spec if isinstance(where, NamedSharding) and where.mesh.size > 1 else None
