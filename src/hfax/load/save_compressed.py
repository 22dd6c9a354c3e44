"""Quantized weights as compressed-tensors stores them, which transformers and vLLM load: integers packed ("pack-quantized"), float8
as it is ("float-quantized").

Turns a model's `QuantizedArray`s into the stored tensors and the `quantization_config` beside them, without rounding again: codes
and scales stay as they are. `hfax.load.formats.compressed_tensors` reads the result. Embedding tables and output heads become plain
numbers, since other libraries do not look rows up in packed ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import torch
from transformers.core_model_loading import revert_weight_conversion

from hfax.errors import InvalidInputError
from hfax.kernels.quantized import QuantizedArray
from hfax.load.skeleton import Skeleton

HostTensor = Callable[[jax.Array], torch.Tensor]
_WORD_BITS = 32
_Field = dict[str, torch.Tensor]
_FIELDS = ("codes", "scale", "zeros", "columns")


@dataclasses.dataclass(frozen=True, order=True)
class Scheme:
    """How a weight is stored; those with the same scheme are a group of the config.

    Args:
        bits: of a code.
        group_size: columns that share a scale; 0: a whole row.
        symmetric: there are no zero points.
        has_order: columns are in another order.
        is_float: codes are float8.
        rows: that share a scale.
    """

    bits: int
    group_size: int
    symmetric: bool
    has_order: bool
    is_float: bool = False
    rows: int = 1

    @staticmethod
    def of(bits: int, parts: _Field) -> Scheme:
        """That of a weight's parts."""
        width, groups, scale = parts["codes"].shape[-1], parts["scale"].shape[-1], parts["scale"]
        size, rows, is_float = width // groups, 1, parts["codes"].is_floating_point()
        if is_float and torch.equal(scale, scale[:, :1].expand_as(scale)):
            size = 0
        elif is_float and torch.equal(scale, scale[::size].repeat_interleave(size, 0)[: len(scale)]):
            rows = size
        return Scheme(
            bits, size, symmetric="zeros" not in parts, has_order="columns" in parts, is_float=is_float, rows=rows
        )

    @property
    def format(self) -> str:
        """compressed-tensors' name of the format."""
        return "float-quantized" if self.is_float else "pack-quantized"

    def arguments(self) -> dict[str, Any]:
        """The fields `weights` of a group of the config."""
        strategy = "channel" if not self.group_size else "group" if self.rows == 1 else "block"
        return {
            "num_bits": self.bits,
            "type": "float" if self.is_float else "int",
            "symmetric": self.symmetric,
            "strategy": strategy,
            "group_size": self.group_size if strategy == "group" else None,
            "block_structure": [self.rows, self.group_size] if strategy == "block" else None,
            "actorder": "group" if self.has_order else None,
            "dynamic": False,
        }


def compress(
    skeleton: Skeleton, params: Mapping[str, jax.Array | QuantizedArray], to_host: HostTensor
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A model's weights as a checkpoint stores them.

    Args:
        skeleton: the module that the weights belong to.
        params: weights by name, tied weights once.
        to_host: fetches an array from its devices.

    Returns:
        The tensors by stored name, and the `quantization_config`.

    Raises:
        InvalidInputError: no weight is quantized, or one has codes or offsets that the format cannot express.
    """
    tensors, schemes = compress_part(skeleton, params, to_host)
    if not schemes:
        raise InvalidInputError(
            "The model has no quantized weights to save as compressed-tensors.",
            "They have the model's dtype.",
            'Load it with quantization="int8" or "int4", or save it with format="safetensors".',
        )
    return tensors, quantization_config(skeleton, tensors, schemes)


def compress_part(
    skeleton: Skeleton, params: Mapping[str, jax.Array | QuantizedArray], to_host: HostTensor
) -> tuple[dict[str, torch.Tensor], dict[str, Scheme]]:
    """Some of a model's weights as a checkpoint stores them: those of a layer, say, which transformers' rules keep together.

    Args:
        skeleton: the module that the weights belong to.
        params: weights by name.
        to_host: fetches an array from its devices.

    Returns:
        The tensors by stored name, and the schemes of the quantized ones by the name of their linear layer.

    Raises:
        InvalidInputError: a weight has codes or offsets that the format cannot express.
    """
    module = skeleton.module
    whole = _looked_up(skeleton)
    plain: _Field = {}
    packed: dict[int, dict[str, QuantizedArray]] = {}
    for name, array in params.items():
        if not isinstance(array, QuantizedArray):
            plain[name] = to_host(array)
        elif name in whole:
            plain[name] = to_host(array.dequantize())
        else:
            packed.setdefault(array.bits, {})[name] = array
    tensors = revert_weight_conversion(module, plain) if plain else {}
    schemes: dict[str, Scheme] = {}
    for bits, arrays in packed.items():
        for prefix, parts in _by_module(
            module, {name: _parts(name, of, to_host) for name, of in arrays.items()}
        ).items():
            schemes[prefix] = scheme = Scheme.of(bits, parts)
            tensors |= {f"{prefix}.{ending}": tensor for ending, tensor in _stored(parts, scheme).items()}
    return tensors, schemes


def _looked_up(skeleton: Skeleton) -> set[str]:
    """Names of the embedding table and the output head."""
    found: set[str] = set()
    for get in (skeleton.module.get_input_embeddings, skeleton.module.get_output_embeddings):
        with contextlib.suppress(NotImplementedError, AttributeError):  # of models of two towers
            table = get()
            found |= {f"{prefix}.weight" for prefix, module in skeleton.module.named_modules() if module is table}
    return found | {skeleton.tied[name] for name in found if name in skeleton.tied}


def _parts(name: str, array: QuantizedArray, to_host: HostTensor) -> _Field:
    """A weight's codes, as uint8 from 0 or as float8, in the weight's order of columns, its scales, and zero points as codes."""
    if array.is_transposed:
        raise _inexpressible(name, "has experts that are stored as [in, out]")
    if array.encoding == "fp8" and array.offset is None and array.columns is None:
        return {"codes": to_host(array.values), "scale": to_host(array.scale)}
    if array.encoding not in ("int8", "int4"):
        raise _inexpressible(name, f"has codes of {array.encoding}")
    half = 1 << (array.bits - 1)
    width = array.shape[-1]
    codes = to_host(array.numbers())[..., :width].short().add_(half).to(torch.uint8)
    parts = {"codes": codes, "scale": to_host(array.scale)[..., : width // array.group]}
    if array.offset is not None:
        offset, scale = to_host(array.offset)[..., : width // array.group].float(), parts["scale"].float()
        zeros = torch.where(scale == 0, torch.zeros_like(scale), (-offset / scale).round()) + half
        expected = (half - zeros) * scale
        if not torch.equal(expected, offset) or zeros.min() < 0 or zeros.max() > 2 * half - 1:
            raise _inexpressible(name, "has offsets that are no whole number of its scales")
        parts["zeros"] = zeros.to(torch.uint8)
    if array.columns is not None:
        order = to_host(array.columns).long()
        parts["codes"] = torch.empty_like(codes)
        parts["codes"][..., order] = codes
        parts["columns"] = torch.empty(len(order), dtype=torch.int32)
        parts["columns"][order] = torch.arange(len(order), dtype=torch.int32) // array.group
    return parts


def _inexpressible(name: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name!r} cannot be saved as compressed-tensors: it {why}.",
        "Its formats have integer codes with a scale and a whole zero point for each group, or float8 with scales.",
        'Load with quantization="int8" or "int4", which rounds the weights again; or save with dequantize=True.',
    )


def _by_module(module: torch.nn.Module, weights: Mapping[str, _Field]) -> dict[str, _Field]:
    """The parts of each linear layer's weight under the checkpoint's name of the layer: fused weights and experts come apart."""
    found: dict[str, _Field] = {}
    for field in _FIELDS:
        of_field = {name: parts[field] for name, parts in weights.items() if field in parts}
        for name, tensor in (revert_weight_conversion(module, of_field) if of_field else {}).items():  # pyright: ignore[reportArgumentType]
            prefix, _, ending = name.rpartition(".")
            if ending != "weight" or tensor.ndim > 2 or (field == "columns" and prefix not in found):
                raise _inexpressible(name, "is no linear layer's weight of its own")
            found.setdefault(prefix, {})[field] = tensor
    return found


def _stored(parts: _Field, scheme: Scheme) -> _Field:
    """A weight's tensors by the endings of their names."""
    codes = parts["codes"]
    if scheme.is_float:
        scale = parts["scale"][:: scheme.rows, : None if scheme.group_size else 1]
        return {"weight": codes.contiguous(), "weight_scale": scale.contiguous()}
    found = {
        "weight_packed": _words(codes, scheme.bits),
        "weight_scale": parts["scale"].contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }
    if "zeros" in parts:  # packed along the rows
        zeros = parts["zeros"].T
        rows = -zeros.shape[-1] % (_WORD_BITS // scheme.bits)
        found["weight_zero_point"] = _words(torch.nn.functional.pad(zeros, (0, rows)), scheme.bits).T.contiguous()
    if "columns" in parts:
        found["weight_g_idx"] = parts["columns"]
    return found


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, columns] uint8 codes as [n, columns * bits / 32] int32, the lowest bits first."""
    if bits == 4:
        pairs = codes.unflatten(-1, (-1, 2))
        codes = pairs[..., 0] | pairs[..., 1] << 4
    return codes.contiguous().view(torch.int32)


def quantization_config(
    skeleton: Skeleton, tensors: Mapping[str, Any], schemes: Mapping[str, Scheme]
) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint: layers of one scheme are named by their class, those of several by their names.

    Args:
        skeleton: the module that the weights belong to.
        tensors: all that are stored, by name.
        schemes: of the quantized ones, by the name of their linear layer.
    """
    matrices = {n.removesuffix(".weight") for n, of in tensors.items() if len(of.shape) == 2 and n.endswith(".weight")}
    heads = {name.removesuffix(".weight") for name in _looked_up(skeleton)}
    kinds = sorted(set(schemes.values()))
    targets = {
        kind: ["Linear"] if len(kinds) == 1 else sorted(name for name, of in schemes.items() if of == kind)
        for kind in kinds
    }
    formats = {kind.format for kind in kinds}
    groups = {
        f"group_{n}": {
            "targets": targets[kind],
            "weights": kind.arguments(),
            "input_activations": None,
            "output_activations": None,
            "format": kind.format,
        }
        for n, kind in enumerate(kinds)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted((matrices | heads) - schemes.keys()),
    }
