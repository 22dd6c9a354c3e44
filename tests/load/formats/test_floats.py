"""FP8 and FP4 checkpoints, with the operations by which transformers itself dequantizes them as the reference."""

import json
import re

import packers
import pytest
import torch
import transformers
from agreement import check, plain_reference
from tiny_models import tiny_llama

from hfax import AutoModelForTPU
from hfax.cli.app import run
from hfax.errors import CheckpointCorruptError, InvalidInputError, UnsupportedModelError

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def fp8_tensors(tensors, *, block=(32, 32), ending="weight_scale_inv", exponents=False, scale_dtype=None):
    def pack(module, weight):
        size = weight.shape if block is None else block
        values, scale, numbers = packers.fp8(weight, tuple(size), exponents)
        if scale_dtype is not None:
            scale = scale.to(scale_dtype)
        scale = scale.reshape(()) if block is None else scale
        return {"weight": values, ending: scale}, numbers

    return packers.quantized(tensors, pack)


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_a_quantized_checkpoint_is_converted(tmp_path, plain, to):
    """Its config went along and named a quantization that the new weights do not have."""
    tensors, config = plain("llama")
    stored, numbers = fp8_tensors(tensors)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    folder = packers.write(tmp_path / "packed", stored, config, FP8)
    assert run(["convert", str(folder), str(tmp_path / "to"), "--to", to]) == 0
    check(tmp_path / "to", reference)
    if to == "safetensors":
        found = plain_reference(tmp_path / "to").state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in reference.state_dict().items())


def test_saved_and_loaded_again(tmp_path, plain):
    tensors, config = plain("qwen3_moe")
    stored, numbers = fp8_tensors(tensors)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    model = check(packers.write(tmp_path / "packed", stored, config, FP8), reference)
    model.save_pretrained(tmp_path / "saved")
    check(tmp_path / "saved", reference)


def test_rounding_again_says_by_how_much(tmp_path, plain, caplog):
    tensors, config = plain("llama")
    stored, _ = fp8_tensors(tensors)
    folder = packers.write(tmp_path, stored, config, FP8)
    AutoModelForTPU.from_pretrained(folder, dtype="float32", quantization="int8")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    percent = float(re.search(r"adds an error of ([\d.]+)%", said)[1])
    assert 0 < percent < 1


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_fp8_blocks_agree_with_transformers(tmp_path, plain, kind):
    tensors, config = plain(kind)
    stored, _ = fp8_tensors(tensors, block=(16, 16))
    folder = packers.write(tmp_path / "packed", stored, config, FP8 | {"weight_block_size": [16, 16]})
    dequantize = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=dequantize
    )
    check(folder, reference.eval(), tokens=6)


@pytest.mark.parametrize(
    "variant",
    [
        {"block": (48, 40)},  # partial last blocks
        {"block": None},
        {"block": None, "ending": "qscale_weight"},
        {"ending": "scale"},
        {"exponents": True, "scale_dtype": torch.float8_e8m0fnu},
        {"block": (1, 32), "exponents": True, "scale_dtype": torch.float8_e8m0fnu},
        {"scale_dtype": torch.bfloat16, "exponents": True},
    ],
    ids=["partial", "tensor", "mistral", "deepseek_v4", "ue8m0", "mxfp8", "bfloat16"],
)
def test_fp8_variants(tmp_path, plain, variant):
    tensors, config = plain("llama")
    stored, numbers = fp8_tensors(tensors, **variant)
    block = variant.get("block", (32, 32))
    options = FP8 | {"weight_block_size": None if block is None else list(block)}
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    check(packers.write(tmp_path / "packed", stored, config, options), reference)


def test_fp8_exponents_as_bytes(tmp_path, plain):
    tensors, config = plain("llama")
    stored, numbers = fp8_tensors(tensors, exponents=True)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        stored[name] = (stored[name].log2() + 127).to(torch.uint8)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    check(packers.write(tmp_path / "packed", stored, config, FP8 | {"scale_fmt": "ue8m0"}), reference)


@pytest.mark.parametrize("method", ["fbgemm_fp8", "quark"])
def test_fp8_rows_under_other_names(tmp_path, plain, method):
    """FBGEMM and Quark say weight_scale; Quark has a scale for each row without a second axis."""
    tensors, config = plain("llama")

    def pack(module, weight):
        values, scale, numbers = packers.fp8(weight, (1, weight.shape[1]))
        return {"weight": values, "weight_scale": scale if method == "fbgemm_fp8" else scale[:, 0]}, numbers

    stored, numbers = packers.quantized(tensors, pack)
    options = {"quant_method": method, "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    check(packers.write(tmp_path / "packed", stored, config, options), reference)


def test_fp4_experts_beside_fp8_layers(tmp_path, plain):
    """DeepSeek-V4 stores experts as two FP4 values in each int8."""
    tensors, config = plain("qwen3_moe")

    def pack(module, weight):
        if "experts" not in module:
            values, scale, numbers = packers.fp8(weight, (32, 32))
            return {"weight": values, "weight_scale_inv": scale}, numbers
        packed, exponents, numbers = packers.mxfp4(weight)
        return {"weight": packed.view(torch.int8), "scale": exponents.view(torch.float8_e8m0fnu)}, numbers

    stored, numbers = packers.quantized(tensors, pack)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    check(packers.write(tmp_path / "packed", stored, config, FP8 | {"expert_dtype": "fp4"}), reference)


def test_static_scales_of_activations_and_caches_are_not_unexpected(tmp_path, plain):
    tensors, config = plain("llama")
    stored, numbers = fp8_tensors(tensors)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        stored[name.replace("weight_scale_inv", "activation_scale")] = torch.tensor(0.5)
    for layer in range(2):
        stored |= {f"model.layers.{layer}.self_attn.{name}_scale": torch.tensor(0.5) for name in "kv"}
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    check(packers.write(tmp_path / "packed", stored, config, FP8 | {"activation_scheme": "static"}), reference)


def test_gpt_oss_agrees_with_transformers(tmp_path, plain):
    """Blocks are [experts, out, in / 32, 16], and the module's matrices their transpose, gate and up interleaved.

    The codes are kept, also in hfax's own format.
    """
    tensors, config = plain("gpt_oss")
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            packed, exponents, _ = packers.mxfp4(tensor.transpose(1, 2))
            stored |= {f"{name}_blocks": packed.unflatten(-1, (-1, 16)), f"{name}_scales": exponents}
        else:
            stored[name] = tensor
    folder = packers.write(tmp_path, stored, config, {"quant_method": "mxfp4"})
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    model = check(folder, reference.eval(), tokens=6)
    experts = [name for name in model.params if name.endswith(("gate_up_proj", "down_proj"))]
    for format in ("safetensors", "orbax"):
        model.save_pretrained(tmp_path / format, format=format)
        again = check(tmp_path / format, reference, tokens=6)
        for name in experts:
            assert again.params[name].encoding == model.params[name].encoding == "fp4"
            assert again.params[name].nbytes == model.params[name].nbytes
    with pytest.raises(InvalidInputError, match=r"\[in, out\]"):
        model.save_pretrained(tmp_path / "compressed", format="compressed-tensors")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    packers.write(tmp_path, stored, config, {"quant_method": "mxfp4"})
    with pytest.raises(CheckpointCorruptError, match="down_proj_scales"):
        AutoModelForTPU.from_pretrained(tmp_path, strict=False)


def test_modelopt(tmp_path, plain):
    """NVFP4's second scale multiplies; other layers may be in FP8."""
    tensors, config = plain("llama")

    def pack(module, weight):
        if "self_attn" in module:
            values, scale, numbers = packers.fp8(weight, tuple(weight.shape))
            return {"weight": values, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.1)}, numbers
        packed, scale, whole, numbers = packers.nvfp4(weight)
        parts = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.1)}
        return parts, numbers

    stored, numbers = packers.quantized(tensors, pack)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    options = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    folder = packers.write(tmp_path / "packed", stored, config, options)
    check(folder, reference)
    stored["model.layers.0.mlp.up_proj.pre_quant_scale"] = torch.ones(64)
    packers.write(folder, stored, config, options)
    with pytest.raises(UnsupportedModelError, match="pre_quant_scale"):
        AutoModelForTPU.from_pretrained(folder)


def test_a_scale_that_is_missing_or_cut_is_named(tmp_path, plain):
    tensors, config = plain("llama")
    stored, _ = fp8_tensors(tensors)
    name = "model.layers.1.self_attn.q_proj.weight_scale_inv"
    scale = stored.pop(name)
    with pytest.raises(CheckpointCorruptError, match=r"q_proj\.weight' is stored as torch\.float8_e4m3fn"):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, FP8), strict=False)
    stored[name] = scale[1:].repeat(3, 1)
    with pytest.raises(CheckpointCorruptError, match=r"q_proj\.weight_scale_inv"):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, FP8), strict=False)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quant_method": "aqlm"}, "aqlm"),
        ({}, "does not name"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, "int4"),
    ],
)
def test_unknown_methods_are_refused(tmp_path, options, match):
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    with pytest.raises(UnsupportedModelError, match=match):
        AutoModelForTPU.from_pretrained(tmp_path)
