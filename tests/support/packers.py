"""Quantized checkpoints of tiny models: weights packed as the formats' specifications say, beside the numbers that they are.

It knows torch and transformers, not hfax. The packers are the inverse of what readers do, written from the formats' descriptions.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def plain_tensors(folder: Path, model) -> tuple[dict[str, torch.Tensor], dict]:
    """A model's tensors as its unquantized checkpoint stores them, and its config."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict, quantization: dict | None = None) -> Path:
    """A checkpoint's folder."""
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    extra = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | extra))
    return folder


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether published checkpoints quantize the tensor."""
    kept = ("embed", "lm_head", "norm", ".gate.", "router")
    return tensor.ndim == 2 and not any(part in name for part in kept)


def quantized(tensors, pack) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Checkpoint tensors with linear layers packed, and with the numbers in their place.

    Args:
        tensors: of the plain checkpoint.
        pack: takes a module's name and weight; returns its tensors by ending, and the numbers that they are.
    """
    stored, numbers = {}, {}
    for name, tensor in tensors.items():
        if is_linear(name, tensor):
            module = name.removesuffix(".weight")
            parts, numbers[name] = pack(module, tensor)
            stored |= {f"{module}.{ending}": part for ending, part in parts.items()}
        else:
            stored[name] = numbers[name] = tensor
    return stored, numbers


def to_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] codes as [rows, n * bits / 32] int32 in a dense stream, one bit at a time."""
    stream = (codes[..., None].long() >> torch.arange(bits) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 32))
    words = (stream << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def groups_of(weight: torch.Tensor, size: int, bits: int, asymmetric: bool, dtype=torch.float16):
    """Round to integers with scales of groups: codes from 0 up, [out, in]; scales and zeros, [out, groups]."""
    groups = weight.float().unflatten(-1, (-1, size))
    top = 2**bits - 1
    if asymmetric:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / top).to(dtype)
        zero = (-low / scale.float()).round().clamp(1, top)
    else:
        scale = (groups.abs().amax(-1) / (2 ** (bits - 1) - 1)).to(dtype)
        zero = torch.full_like(scale.float(), 2 ** (bits - 1))
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    return codes.flatten(-2).to(torch.uint8), scale, zero.to(torch.uint8)


def gptq(weight, *, bits=4, size=32, asymmetric=False, act_order=False, version=1, label_only=False):
    """A weight in GPTQ's format, and its numbers.

    Args:
        weight: [out, in].
        bits: of a code.
        size: columns in a group.
        asymmetric: with zeros that differ.
        act_order: groups are of columns in another order.
        version: 1 stores zeros less one.
        label_only: zeros are stored as in the other version.
    """
    rows, width = weight.shape
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width)) if act_order else torch.arange(width)
    codes, scale, zero = groups_of(weight[:, order], size, bits, asymmetric)
    numbers = torch.empty(rows, width)
    numbers[:, order] = (codes.float() - zero.repeat_interleave(size, -1)) * scale.float().repeat_interleave(size, -1)
    g_idx = torch.empty(width, dtype=torch.int32)
    g_idx[order] = (torch.arange(width) // size).int()
    in_order = torch.empty_like(codes)
    in_order[:, order] = codes
    less = (version == 1) != label_only
    parts = {
        "qweight": to_words(in_order, bits).T,
        "qzeros": to_words(zero.T - int(less), bits),
        "scales": scale.T,
        "g_idx": g_idx,
    }
    return parts, numbers


def awq(weight, *, size=32, version="gemm"):
    """A weight in AWQ's format, and its numbers."""
    codes, scale, zero = groups_of(weight, size, 4, asymmetric=True)
    numbers = (codes.float() - zero.repeat_interleave(size, -1)) * scale.float().repeat_interleave(size, -1)
    if version == "gemv":
        padding = (0, -zero.shape[-1] % 16)
        pad = torch.nn.functional.pad
        return {
            "qweight": to_words(codes, 4),
            "qzeros": to_words(pad(zero, padding), 4),
            "scales": pad(scale, padding),
        }, numbers

    def words(rows):
        return to_words(rows.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 4)

    return {"qweight": words(codes.T), "qzeros": words(zero.T), "scales": scale.T}, numbers


def to_fp4(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The codes of [..., groups, n] numbers, nearest after division by [..., groups] scales."""
    return (groups[..., None] / scale[..., None, None] - FP4).abs().argmin(-1).to(torch.uint8)


def in_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in each byte, the first in its low half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def mxfp4(weight: torch.Tensor):
    """Blocks of 32: bytes, exponents, and the numbers that they are."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1).log2().floor() - 2 + 127).to(torch.uint8)
    scale = torch.exp2(exponent.float() - 127)
    codes = to_fp4(groups, scale)
    return in_bytes(codes.flatten(-2)), exponent, (FP4[codes.long()] * scale[..., None]).flatten(-2)


def nvfp4(weight: torch.Tensor):
    """Blocks of 16: bytes, float8 scales, the scale that multiplies them, and the numbers that they are."""
    groups = weight.float().unflatten(-1, (-1, 16))
    whole = groups.abs().max() / 2688
    scale = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    real = scale.float() * whole
    codes = to_fp4(groups, real)
    return in_bytes(codes.flatten(-2)), scale, whole, (FP4[codes.long()] * real[..., None]).flatten(-2)


def fp8(weight: torch.Tensor, block: tuple[int, int], exponents: bool = False):
    """Blocks of float8: values, [⌈out / rows⌉, ⌈in / columns⌉] scales, and the numbers that they are."""
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -width % block[1], 0, -rows % block[0]))
    grid = padded.unflatten(0, (-1, block[0])).unflatten(-1, (-1, block[1]))
    scale = grid.abs().amax((1, 3)) / 448
    if exponents:
        scale = torch.exp2(scale.log2().ceil())
    spread = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :width]
    values = (weight.float() / spread).to(torch.float8_e4m3fn)
    return values, scale, values.float() * spread


def to_padded_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, n] codes as int32 words with `32 // bits` codes in each, the rest of its bits unused."""
    each = 32 // bits
    places = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    words = (places << torch.arange(each) * bits).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def pack_quantized(weight, *, bits=4, size=32, asymmetric=False, act_order=False, padded=False, dtype=torch.bfloat16):
    """A weight in compressed-tensors' format "pack-quantized", and its numbers.

    Args:
        weight: [out, in].
        bits: of a code.
        size: columns in a group; None: whole rows.
        asymmetric: with zeros that differ.
        act_order: groups are of columns in another order.
        padded: codes do not cross from word to word, as versions before 0.14 wrote.
        dtype: of the scales.
    """
    rows, width = weight.shape
    size = size or width
    order = torch.randperm(width, generator=torch.Generator().manual_seed(width)) if act_order else torch.arange(width)
    codes, scale, zero = groups_of(weight[:, order], size, bits, asymmetric, dtype)
    numbers = torch.empty(rows, width)
    numbers[:, order] = (codes.float() - zero.repeat_interleave(size, -1)) * scale.float().repeat_interleave(size, -1)
    in_order = torch.empty_like(codes)
    in_order[:, order] = codes
    words = to_padded_words if padded else to_words
    parts = {"weight_packed": words(in_order, bits), "weight_scale": scale, "weight_shape": torch.tensor([rows, width])}
    if asymmetric:
        parts["weight_zero_point"] = words(zero.T, bits).T
    if act_order:
        parts["weight_g_idx"] = torch.empty(width, dtype=torch.int32)
        parts["weight_g_idx"][order] = (torch.arange(width) // size).int()
    return parts, numbers


def int_quantized(weight, *, size=None, asymmetric=False):
    """A weight in compressed-tensors' format "int-quantized", and its numbers."""
    size = size or weight.shape[1]
    codes, scale, zero = groups_of(weight, size, 8, asymmetric, torch.bfloat16)
    signed, at = codes.short() - 128, zero.short() - 128
    numbers = (signed.float() - at.float().repeat_interleave(size, -1)) * scale.float().repeat_interleave(size, -1)
    parts = {"weight": signed.to(torch.int8), "weight_scale": scale}
    return parts | ({"weight_zero_point": at.to(torch.int8)} if asymmetric else {}), numbers


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def bitsandbytes4(weight: torch.Tensor, *, block: int = 64, nested: bool = False, storage: torch.dtype = torch.uint8):
    """A weight in bitsandbytes' NF4, without the weight's own tensor's name, and its numbers.

    Args:
        weight: [out, in].
        block: numbers that share a scale.
        nested: scales are quantized, too, in blocks of 256.
        storage: dtype that the bytes are stored in.
    """
    table = torch.tensor(NF4)
    flat = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % block)).unflatten(0, (-1, block))
    scale = flat.abs().amax(-1)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    parts = {"absmax": scale, "quant_map": table}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(scale.mean())}
        left = scale - state["nested_offset"]
        whole = torch.nn.functional.pad(left, (0, -len(left) % 256)).unflatten(0, (-1, 256)).abs().amax(-1)
        each = whole.repeat_interleave(256)[: len(left)]
        levels = torch.linspace(-1, 1, 256)
        codes = ((left / each)[:, None] - levels).abs().argmin(-1).to(torch.uint8)
        scale = levels[codes.long()] * each + state["nested_offset"]
        parts |= {"absmax": codes, "nested_absmax": whole, "nested_quant_map": levels}
    codes = (flat[..., None] / scale[:, None, None] - table).abs().argmin(-1).to(torch.uint8).flatten()
    numbers = (table[codes.long()].unflatten(0, (-1, block)) * scale[:, None]).flatten()[: weight.numel()]
    codes = codes[: weight.numel()]
    packed = (codes[::2] << 4 | codes[1::2]).view(storage)[:, None]
    parts["quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return packed, parts, numbers.reshape(weight.shape)


def torchao(name: str, weight: torch.Tensor, *, kind: str = "IntxUnpackedToInt8Tensor", bits: int = 4, size: int = 32,
            asymmetric: bool = False, **changes):  # fmt: skip
    """A weight as torchao's safetensors have it: its tensors by name, its entry in the file's metadata, and its numbers.

    Args:
        name: of the weight, such as "layer.weight".
        weight: [out, in].
        kind: the class of tensor.
        bits: of a code; 8 for float8.
        size: columns in a group.
        asymmetric: with zeros that differ.
        changes: fields of the metadata in place of these.
    """
    module, _, last = name.rpartition(".")
    if kind == "Float8Tensor":
        scale = weight.float().unflatten(-1, (-1, size)).abs().amax(-1) / 448
        codes = (weight.float() / scale.repeat_interleave(size, -1)).to(torch.float8_e4m3fn)
        parts, numbers = {"qdata": codes, "scale": scale}, codes.float() * scale.repeat_interleave(size, -1)
    else:
        half = 1 << (bits - 1)
        codes, scale, zero = groups_of(weight, size, bits, asymmetric, torch.bfloat16)
        codes, zero = codes.short() - half, zero.short() - half
        numbers = (codes - zero.repeat_interleave(size, -1)).float() * scale.float().repeat_interleave(size, -1)
        parts = {"qdata": codes.to(torch.int8), "scale": scale, "zero_point": zero.to(torch.int8)}
    fields = {"block_size": [1, size], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}
    if kind == "IntxUnpackedToInt8Tensor":
        fields["target_dtype"] = {"_type": "torch.dtype", "_data": f"int{bits}"}
    entry = {"_type": kind, "_data": fields | changes, "_tensor_data_names": list(parts)}
    return {f"{module}._{last}_{part}": tensor for part, tensor in parts.items()}, json.dumps(entry), numbers


def hqq(weight: torch.Tensor, *, bits: int = 4, size: int = 64, axis: int = 1, as_float: bool = False):
    """A weight as hqq's `HQQLinear` stores it, and its numbers.

    Args:
        weight: [out, in].
        bits: of a code.
        size: numbers in a group.
        axis: 1 for groups of neighbouring columns, 0 for those of numbers far apart.
        as_float: the codes' bytes are stored in a floating-point dtype.
    """
    groups = weight.float().reshape((-1, size) if axis == 1 else (size, -1))
    low, high = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True)
    top = 2**bits - 1
    scale = ((high - low) / top).bfloat16()
    zero = (-low / scale.float()).bfloat16()
    codes = (groups / scale.float() + zero.float()).round().clamp(0, top).to(torch.int32)
    numbers = ((codes.double() - zero.double()) * scale.double()).reshape(weight.shape).float()
    per_word = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    stacks = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % per_word)).unflatten(0, (per_word, -1))
    words = sum(stack << bits * (per_word - 1 - i) for i, stack in enumerate(stacks))
    words = words if bits == 3 else words.to(torch.uint8)
    parts = {
        "W_q": words.view(torch.bfloat16) if as_float else words,
        "scale": scale,
        "zero": zero,
        "shape": torch.tensor(weight.shape),
        **{
            name: torch.tensor(value, dtype=torch.int32)
            for name, value in (("nbits", bits), ("group_size", size), ("axis", axis))
        },
        **{
            name: torch.tensor(1, dtype=torch.uint8)
            for name in ("encoded_state_dict", "stores_quant_config", "channel_wise")
        },
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
    }
    return parts, numbers
