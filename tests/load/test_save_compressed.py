"""`save_pretrained(format="compressed-tensors")` and `dequantize=True`: codes and scales stay as they are, and others load them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
import transformers
from agreement import IDS, numbers_of
from tiny_models import SIZES, random_model

from hfax import AutoModelForTPU
from hfax.errors import InvalidInputError
from hfax.matrix.architectures import Architecture, small_config

_SIZES = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
_MOE = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}


def _configs() -> dict[str, transformers.PretrainedConfig]:
    return {
        "llama": transformers.LlamaConfig(**_SIZES),
        "tied": transformers.Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True),
        "of two schemes": transformers.LlamaConfig(**{**_SIZES, "intermediate_size": 192}),
        "experts": transformers.Qwen3MoeConfig(**_SIZES, **_MOE),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain checkpoints in float32."""
    made = {}
    for name, config in _configs().items():
        made[name] = tmp_path_factory.mktemp("plain")
        random_model(config).save_pretrained(made[name])
    return made


def _assert_same_numbers(one: Any, other: Any) -> None:
    theirs = numbers_of(other)
    for name, numbers in numbers_of(one).items():
        assert np.array_equal(numbers, theirs[name]), name


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("kind", _configs())
def test_hfax_reads_what_it_wrote(kind: str, quantization: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForTPU.from_pretrained(folders[kind], quantization=quantization)
    model.save_pretrained(tmp_path, format="compressed-tensors")
    again = AutoModelForTPU.from_pretrained(tmp_path)
    _assert_same_numbers(model, again)
    assert again.quantization == quantization
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert "lm_head" in config["ignore"]
    sizes = {g["weights"]["group_size"] for g in config["config_groups"].values()}
    assert sizes == ({128, 64} if kind == "of two schemes" else {128})


@pytest.mark.sweep
@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("kind", _configs())
def test_transformers_reads_what_hfax_wrote(
    kind: str, quantization: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """With the package compressed-tensors, which unpacks weights in the first call; experts at once, in bfloat16."""
    model = AutoModelForTPU.from_pretrained(folders[kind], quantization=quantization)
    model.save_pretrained(tmp_path, format="compressed-tensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs(IDS)
    weights = theirs.state_dict()
    for name, numbers in numbers_of(model).items():
        assert torch.equal(torch.tensor(numbers).to(weights[name].dtype), weights[name]), name
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), theirs.generate(IDS, **options))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("clip", "CLIPModel"), ("whisper", "WhisperForConditionalGeneration"), ("phi3", "Phi3ForCausalLM")],
)
def test_models_of_other_kinds(model_type: str, name: str, tmp_path: Path) -> None:
    """Without an embedding table that the class knows, with an encoder, and with weights that are fused in the checkpoint."""
    config = small_config(Architecture(mapping="causal-lm", model_type=model_type, class_name=name))
    getattr(transformers, name)(config).save_pretrained(tmp_path / "plain")
    model = AutoModelForTPU.from_pretrained(tmp_path / "plain", quantization="int8")
    model.save_pretrained(tmp_path / "packed", format="compressed-tensors")
    _assert_same_numbers(model, AutoModelForTPU.from_pretrained(tmp_path / "packed"))


OF_OTHERS = {
    "gptq": lambda weight: packers.gptq(weight, asymmetric=True),
    "gptq in act-order": lambda weight: packers.gptq(weight, act_order=True),
    "8 bits with zero points": lambda weight: packers.gptq(weight, bits=8, asymmetric=True),
    "awq": packers.awq,
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_what_others_packed_is_written_without_rounding_again(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    tensors, config = packers.plain_tensors(
        tmp_path / "plain", transformers.LlamaForCausalLM.from_pretrained(folders["llama"])
    )
    stored, _ = packers.quantized(tensors, lambda module, weight: OF_OTHERS[name](weight))
    options: dict[str, Any] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "version": "gemm",
        "zero_point": True,
    }
    if name != "awq":
        options = {
            "quant_method": "gptq",
            "bits": 8 if "8 bits" in name else 4,
            "group_size": 32,
            "sym": False,
            "desc_act": "act" in name,
        }
    packed = packers.write(tmp_path / "packed", stored, config, options)
    model = AutoModelForTPU.from_pretrained(packed)
    model.save_pretrained(tmp_path / "again", format="compressed-tensors")
    _assert_same_numbers(model, AutoModelForTPU.from_pretrained(tmp_path / "again"))
    assert any(n.endswith("weight_g_idx") for n in _names(tmp_path / "again")) == (name == "gptq in act-order")


def _names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


BLOCKS = {"blocks": ((128, 128), "block"), "rows": ((1, 128), "group"), "whole rows": ((1, 256), "channel")}


@pytest.mark.parametrize("name", BLOCKS)
def test_float8_is_written_with_the_scales_that_it_has(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    block, strategy = BLOCKS[name]
    tensors, config = packers.plain_tensors(
        tmp_path / "plain", transformers.LlamaForCausalLM.from_pretrained(folders["llama"])
    )

    def fp8(module: str, weight: torch.Tensor) -> Any:
        values, scale, numbers = packers.fp8(weight, (block[0], min(block[1], weight.shape[1])))
        return {"weight": values, "weight_scale_inv": scale}, numbers

    stored, _ = packers.quantized(tensors, fp8)
    options = {"quant_method": "fp8", "weight_block_size": list(block)}
    model = AutoModelForTPU.from_pretrained(packers.write(tmp_path / "fp8", stored, config, options))
    model.save_pretrained(tmp_path / "again", format="compressed-tensors")
    again = AutoModelForTPU.from_pretrained(tmp_path / "again")
    _assert_same_numbers(model, again)
    assert again.quantization == "fp8"
    written = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert written["format"] == "float-quantized"
    assert strategy in {group["weights"]["strategy"] for group in written["config_groups"].values()}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    mine = np.asarray(again(input_ids=IDS).logits)
    others = theirs(IDS).logits.detach().numpy()
    assert np.abs(mine - others).max() < 1e-4 * np.abs(others).max()


def test_plain_numbers_for_every_library(folders: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForTPU.from_pretrained(folders["experts"], quantization="int4")
    model.save_pretrained(tmp_path, dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    for name, numbers in numbers_of(model).items():
        assert np.array_equal(numbers, theirs.state_dict()[name].numpy()), name


def test_what_the_format_cannot_express_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    plain = AutoModelForTPU.from_pretrained(folders["llama"])
    with pytest.raises(InvalidInputError, match="no quantized weights"):
        plain.save_pretrained(tmp_path / "out", format="compressed-tensors")
    tensors, config = packers.plain_tensors(
        tmp_path / "plain", transformers.LlamaForCausalLM.from_pretrained(folders["llama"])
    )

    def nvfp4(module: str, weight: torch.Tensor) -> Any:
        codes, scale, whole, numbers = packers.nvfp4(weight)
        return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": (1 / whole)[None]}, numbers

    stored, _ = packers.quantized(tensors, nvfp4)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "nvfp4-pack-quantized"}}
    options = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    floats = AutoModelForTPU.from_pretrained(packers.write(tmp_path / "fp4", stored, config, options))
    with pytest.raises(InvalidInputError, match="codes of fp4"):
        floats.save_pretrained(tmp_path / "out", format="compressed-tensors")
    assert not (tmp_path / "out").exists()
