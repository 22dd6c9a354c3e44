"""compressed-tensors: weights packed as its specification says are read bit for bit."""

import packers
import pytest
import torch
from agreement import check, plain_reference

from hfax import AutoModelForTPU
from hfax.errors import CheckpointCorruptError, UnsupportedModelError


def scheme(stored_as, **weights):
    """A config with one group for all linear layers."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "type": "int", **weights}}
    options = {"quant_method": "compressed-tensors", "format": stored_as, "ignore": ["lm_head"]}
    return options | {"config_groups": {"group_0": group}}


def agree(tmp_path, plain, kind, pack, options, tokens=0):
    tensors, config = plain(kind)
    stored, numbers = packers.quantized(tensors, pack)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    return check(packers.write(tmp_path / "packed", stored, config, options), reference, tokens=tokens)


PACKED = {
    "groups": {},
    "float16 scales": {"dtype": torch.float16},
    "whole rows": {"size": None},
    "asymmetric": {"asymmetric": True},
    "8 bits": {"bits": 8, "asymmetric": True},
    "3 bits": {"bits": 3},
    "3 bits in padded words": {"bits": 3, "padded": True},
    "act order": {"act_order": True},
}


@pytest.mark.parametrize("variant", PACKED)
def test_pack_quantized(tmp_path, plain, variant):
    """Codes are a dense stream plus half their range; 3 bits had two layouts under one name; act-order permutes columns."""
    made = {"size": 32, "bits": 4, **PACKED[variant]}
    options = scheme(
        "pack-quantized",
        num_bits=made["bits"],
        group_size=made["size"],
        strategy="group" if made["size"] else "channel",
        symmetric=not made.get("asymmetric", False),
        actorder="group" if made.get("act_order") else None,
    )
    pack = lambda module, weight: packers.pack_quantized(weight, **made)  # noqa: E731
    agree(tmp_path, plain, "llama", pack, options, tokens=6 * (variant == "groups"))


def test_experts_are_stacked(tmp_path, plain):
    options = scheme("pack-quantized", num_bits=4, group_size=32, strategy="group")
    agree(tmp_path, plain, "qwen3_moe", lambda module, weight: packers.pack_quantized(weight), options, tokens=6)


@pytest.mark.parametrize("made", [{}, {"size": 32}, {"asymmetric": True}], ids=["rows", "groups", "zero points"])
def test_int_quantized(tmp_path, plain, made):
    options = scheme("int-quantized", num_bits=8, symmetric=not made.get("asymmetric", False))
    agree(tmp_path, plain, "llama", lambda module, weight: packers.int_quantized(weight, **made), options)


@pytest.mark.parametrize("shape", ["tensor", "rows", "blocks"])
def test_float_quantized(tmp_path, plain, shape):
    """A scale may be one number, one a row, or one for each block; activations' scales are not weights."""

    def pack(module, weight):
        rows, width = weight.shape
        block = {"tensor": (rows, width), "rows": (1, width), "blocks": (32, 32)}[shape]
        values, scale, numbers = packers.fp8(weight, block)
        scale = scale.reshape(1) if shape == "tensor" else scale
        return {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}, numbers

    block = {"block_structure": [32, 32]} if shape == "blocks" else {}
    agree(tmp_path, plain, "llama", pack, scheme("float-quantized", num_bits=8, type="float", **block))


def test_fp4(tmp_path, plain):
    """NVFP4's second scale divides; MXFP4's scales are exponents. Each group of the config has a format of its own."""

    def pack(module, weight):
        if "self_attn" in module:
            packed, exponents, numbers = packers.mxfp4(weight)
            return {"weight_packed": packed, "weight_scale": exponents}, numbers
        packed, scale, whole, _ = packers.nvfp4(weight)
        real = scale.float() / (1 / whole)
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        numbers = packers.FP4[codes.long()] * real.repeat_interleave(16, -1)
        parts = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": (1 / whole).reshape(1)}
        return parts, numbers

    options = scheme("mixed-precision", num_bits=4, type="float")
    weights = {"num_bits": 4, "type": "float", "symmetric": True}
    options["config_groups"] = {
        "attention": {"targets": ["re:.*self_attn.*"], "weights": weights, "format": "mxfp4-pack-quantized"},
        "others": {"targets": ["Linear"], "weights": weights, "format": "nvfp4-pack-quantized"},
    }
    agree(tmp_path, plain, "llama", pack, options)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"format": "marlin-24"}, "marlin-24"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path, plain, changes, match):
    tensors, config = plain("llama")
    stored, _ = packers.quantized(tensors, lambda module, weight: packers.pack_quantized(weight))
    options = scheme("pack-quantized", num_bits=4, group_size=32, strategy="group") | changes
    with pytest.raises(UnsupportedModelError, match=match):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, options))


@pytest.mark.parametrize("ending", ["weight_scale", "weight_packed", "weight_zero_point"])
def test_a_part_that_is_missing_is_named(tmp_path, plain, ending):
    tensors, config = plain("llama")
    stored, _ = packers.quantized(tensors, lambda module, weight: packers.pack_quantized(weight, asymmetric=True))
    del stored[f"model.layers.1.mlp.up_proj.{ending}"]
    options = scheme("pack-quantized", num_bits=4, group_size=32, strategy="group", symmetric=False)
    with pytest.raises(CheckpointCorruptError, match=rf"up_proj\.{ending}"):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, options), strict=False)
