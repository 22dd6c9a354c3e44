"""torchao's safetensors and HQQ: weights stored as their libraries write them are read as the numbers that they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import packers
import pytest
import torch
from agreement import check, numbers_of, plain_reference
from safetensors.torch import save_file

from hfax import AutoModelForTPU
from hfax.errors import CheckpointCorruptError, UnsupportedModelError
from hfax.kernels.quantized import QuantizedArray

TORCHAO = {
    "int8": {"kind": "Int8Tensor", "bits": 8, "size": 64},
    "int8_asymmetric": {"kind": "Int8Tensor", "bits": 8, "size": 32, "asymmetric": True},
    "intx_4": {},
    "intx_4_asymmetric": {"asymmetric": True},
    "intx_3": {"bits": 3},
    "intx_6": {"bits": 6},
    "float8": {"kind": "Float8Tensor", "bits": 8, "size": 64},
}


def write_torchao(
    folder: Path, plain: Any, made: dict[str, Any], change: Any = lambda stored, metadata: None
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint's folder, and its numbers."""
    tensors, config = plain("llama")
    stored, numbers, metadata = dict[str, torch.Tensor](), dict[str, torch.Tensor](), {"format": "pt"}
    for name, tensor in tensors.items():
        if packers.is_linear(name, tensor):
            parts, metadata[name], numbers[name] = packers.torchao(name, tensor, **made)
            stored |= parts
        else:
            stored[name] = numbers[name] = tensor
            metadata[name] = json.dumps({"_type": "Tensor"})
    metadata["tensor_names"] = json.dumps(list(tensors))
    change(stored, metadata)
    options = {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": {}}}}
    packers.write(folder, stored, config, options)
    save_file({n: t.contiguous() for n, t in stored.items()}, folder / "model.safetensors", metadata)
    return folder, numbers


@pytest.mark.parametrize("variant", TORCHAO)
def test_torchao(tmp_path: Path, plain: Any, variant: str) -> None:
    folder, numbers = write_torchao(tmp_path / "packed", plain, TORCHAO[variant])
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, plain("llama")[1]))
    model = check(folder, reference)
    assert any(isinstance(weight, QuantizedArray) for weight in model.params.values())


def _without_scale(stored: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    del stored["model.layers.0.mlp.up_proj._weight_scale"]


def _with_other_blocks(stored: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    metadata[name] = metadata[name].replace("[1, 32]", "[1, 48]")


def _with_another_class(stored: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    metadata[name] = metadata[name].replace("IntxUnpackedToInt8Tensor", "Int4TilePackedTo4dTensor")


def _with_scaled_activations(stored: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    metadata[name] = metadata[name].replace('"zero_point"', '"zero_point", "act_pre_scale"')


def _with_cut_metadata(stored: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata["model.layers.0.mlp.up_proj.weight"] = '{"_type": "Intx'


def _without_metadata(stored: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    metadata.clear()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_without_scale, CheckpointCorruptError, r"up_proj\._weight_scale"),
        (_with_other_blocks, CheckpointCorruptError, r"blocks of \[1, 48\]"),
        (_with_cut_metadata, CheckpointCorruptError, "metadata that cannot be read"),
        (_with_another_class, UnsupportedModelError, "Int4TilePackedTo4dTensor"),
        (_with_scaled_activations, UnsupportedModelError, "act_pre_scale"),
        (_without_metadata, UnsupportedModelError, "describe no weight"),
    ],
)
def test_what_torchao_s_metadata_gets_wrong_is_named(
    tmp_path: Path, plain: Any, change: Any, error: type[Exception], message: str
) -> None:
    folder, _ = write_torchao(tmp_path, plain, {}, change)
    with pytest.raises(error, match=message):
        AutoModelForTPU.from_pretrained(folder, strict=False)


HQQ = {
    "4_bits": {},
    "8_bits": {"bits": 8},
    "3_bits": {"bits": 3, "size": 16},
    "2_bits": {"bits": 2, "size": 16},
    "1_bit": {"bits": 1, "size": 32},
    "far_apart": {"axis": 0},
    "far_apart_3_bits": {"axis": 0, "bits": 3},
    "longer_than_a_row": {"size": 256},
    "stored_as_float": {"as_float": True},
}
OPTIONS = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {}}, "skip_modules": ["lm_head"]}


@pytest.mark.parametrize("variant", HQQ)
def test_hqq(tmp_path: Path, plain: Any, variant: str) -> None:
    tensors, config = plain("llama")
    stored, numbers = packers.quantized(tensors, lambda module, weight: packers.hqq(weight, **HQQ[variant]))
    model = AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, OPTIONS), dtype="float32")
    for name, found in numbers_of(model).items():
        if (expected := numbers.get(name)) is not None:
            largest = float(expected.abs().max())  # a zero is no whole number, so a code near it cancels
            np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-7 * largest, err_msg=name)


@pytest.mark.parametrize(("ending", "change"), [("W_q", 1), ("scale", 1), ("zero", None), ("nbits", None)])
def test_parts_of_hqq_that_are_missing_or_cut_are_named(
    tmp_path: Path, plain: Any, ending: str, change: int | None
) -> None:
    tensors, config = plain("llama")
    stored, _ = packers.quantized(tensors, lambda module, weight: packers.hqq(weight))
    part = stored.pop(name := f"model.layers.1.mlp.up_proj.{ending}")
    if change is not None:
        stored[name] = part[change:]
    with pytest.raises(CheckpointCorruptError, match=name.replace(".", r"\.")):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, OPTIONS), strict=False)


def test_other_widths_of_hqq_are_refused(tmp_path: Path, plain: Any) -> None:
    tensors, config = plain("llama")
    stored, _ = packers.quantized(tensors, lambda module, weight: packers.hqq(weight))
    stored["model.layers.1.mlp.up_proj.nbits"] = torch.tensor(5, dtype=torch.int32)
    with pytest.raises(UnsupportedModelError, match="HQQ weights of 5 bits"):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, OPTIONS))
