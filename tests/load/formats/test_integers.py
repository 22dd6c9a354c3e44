"""GPTQ and AWQ: weights packed as their specifications say are read bit for bit."""

import packers
import pytest
import torch
from agreement import check, plain_reference

from hfax import AutoModelForTPU
from hfax.errors import CheckpointCorruptError, UnsupportedModelError


def both(tmp_path, plain, kind, pack, options):
    tensors, config = plain(kind)
    stored, numbers = packers.quantized(tensors, pack)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    return packers.write(tmp_path / "packed", stored, config, options), reference


GPTQ = {
    "sym": {},
    "sym_labelled_v1_stored_v2": {"label_only": True},
    "v2": {"version": 2},
    "v2_stored_v1": {"version": 2, "label_only": True},
    "asymmetric": {"asymmetric": True},
    "asymmetric_v2": {"asymmetric": True, "version": 2},
    "act_order": {"act_order": True, "asymmetric": True},
    "2_bits": {"bits": 2, "asymmetric": True},
    "3_bits": {"bits": 3, "asymmetric": True},
    "3_bits_sym": {"bits": 3},
    "8_bits": {"bits": 8, "asymmetric": True},
    "8_bits_act_order": {"bits": 8, "act_order": True},
}


@pytest.mark.parametrize("variant", GPTQ)
def test_gptq(tmp_path, plain, variant):
    """Some files label zeros of the second version as the first; three bits cross words; act-order permutes columns."""
    made = GPTQ[variant]
    options = {
        "quant_method": "gptq",
        "bits": made.get("bits", 4),
        "group_size": 32,
        "sym": not made.get("asymmetric", False),
        "desc_act": made.get("act_order", False),
        "checkpoint_format": "gptq_v2" if made.get("version") == 2 else "gptq",
    }
    check(
        *both(tmp_path, plain, "llama", lambda module, weight: packers.gptq(weight, **made), options),
        tokens=6 * (variant == "act_order"),
    )


def test_gptq_zeros_that_borrow(tmp_path, plain):
    """Producers of the first version subtract 1 from whole words: a zero of 0 borrows from the next code."""

    def pack(module, weight):
        parts, _ = packers.gptq(weight, asymmetric=True, version=2)
        _, scale, zero = packers.groups_of(weight, 32, 4, asymmetric=True)
        codes = packers.groups_of(weight, 32, 4, asymmetric=True)[0]
        zero[::3] = 0
        parts["qzeros"] = packers.to_words(zero.T, 4) - 0x11111111
        spread = scale.float().repeat_interleave(32, -1)
        return parts, (codes.float() - zero.repeat_interleave(32, -1)) * spread

    options = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    check(*both(tmp_path, plain, "llama", pack, options))


def test_gptq_whole_rows_and_without_g_idx(tmp_path, plain):
    """A group size of -1 is a scale for each row; old files have no g_idx."""

    def pack(module, weight):
        parts, numbers = packers.gptq(weight, size=weight.shape[1])
        del parts["g_idx"]
        return parts, numbers

    options = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True, "desc_act": False}
    check(*both(tmp_path, plain, "qwen3", pack, options), tokens=6)


def test_gptq_modules_with_options_of_their_own(tmp_path, plain):
    """`dynamic` gives modules other bits, and leaves some unquantized."""

    def pack(module, weight):
        if "down_proj" in module:
            return {"weight": weight}, weight
        return packers.gptq(weight, **({"bits": 8, "size": 16} if "layers.0.self_attn" in module else {}))

    dynamic = {r"-:.*down_proj": {}, r"+:.*\.layers\.0\.self_attn\..*": {"bits": 8, "group_size": 16}}
    options = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "dynamic": dynamic}
    check(*both(tmp_path, plain, "llama", pack, options))


@pytest.mark.parametrize("version", ["gemm", "GEMM", "gemv"])
def test_awq(tmp_path, plain, version):
    """gemm interleaves outputs, gemv pads zeros; neither stores zeros less one."""
    options = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": version}
    check(*both(tmp_path, plain, "llama", lambda module, weight: packers.awq(weight, version=version.lower()), options))


def test_awq_experts_are_stacked(tmp_path, plain):
    options = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    check(*both(tmp_path, plain, "mixtral", lambda module, weight: packers.awq(weight), options), tokens=6)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "5 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "8 bits"),
    ],
)
def test_unknown_variants_are_refused(tmp_path, plain, options, match):
    tensors, config = plain("llama")
    stored, _ = packers.quantized(tensors, lambda module, weight: packers.gptq(weight))
    with pytest.raises(UnsupportedModelError, match=match):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, options), strict=False)


def test_activation_scales_of_old_awq_models_are_refused(tmp_path, plain):
    tensors, config = plain("llama")
    stored, _ = packers.quantized(tensors, lambda module, weight: packers.awq(weight))
    stored["model.layers.0.mlp.act.scales"] = torch.ones(128)
    options = {"quant_method": "awq", "bits": 4, "group_size": 32}
    with pytest.raises(UnsupportedModelError, match=r"mlp\.act\.scales"):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, options))


@pytest.mark.parametrize(("ending", "change"), [("qzeros", None), ("scales", 1), ("qweight", None), ("g_idx", 1)])
def test_parts_that_are_missing_or_cut_are_named(tmp_path, plain, ending, change):
    tensors, config = plain("llama")
    stored, _ = packers.quantized(tensors, lambda module, weight: packers.gptq(weight))
    name = f"model.layers.1.mlp.up_proj.{ending}"
    part = stored.pop(name)
    if change is not None:
        stored[name] = part[change:]
    options = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    with pytest.raises(CheckpointCorruptError, match=name.replace(".", r"\.")):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, options), strict=False)
