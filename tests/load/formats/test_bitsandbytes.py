"""bitsandbytes: NF4 and int8 weights packed as its functions do are read as the numbers that they are."""

import packers
import pytest
import torch
from agreement import check, plain_reference

from hfax import AutoModelForTPU
from hfax.errors import CheckpointCorruptError

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def nf4_tensors(tensors, **made):
    stored, numbers = {}, {}
    for name, tensor in tensors.items():
        if packers.is_linear(name, tensor):
            stored[name], parts, numbers[name] = packers.bitsandbytes4(tensor, **made)
            stored |= {f"{name}.{ending}": part for ending, part in parts.items()}
        else:
            stored[name] = numbers[name] = tensor
    return stored, numbers


@pytest.mark.parametrize(
    "made", [{}, {"nested": True}, {"storage": torch.bfloat16}], ids=["plain", "nested", "storage"]
)
def test_nf4(tmp_path, plain, made):
    """The first of two codes is in a byte's high half; scales may be quantized, too; bytes may be stored as another dtype."""
    tensors, config = plain("llama")
    stored, numbers = nf4_tensors(tensors, **made)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    check(packers.write(tmp_path / "packed", stored, config, NF4), reference, tokens=6)


def test_int8_rows(tmp_path, plain):
    """A row's scale is its largest magnitude; codes are times it over 127."""
    tensors, config = plain("llama")

    def pack(module, weight):
        largest = weight.float().abs().amax(-1)
        codes = (weight.float() * (127 / largest)[:, None]).round().to(torch.int8)
        numbers = codes.float() * (largest * 7.874015718698502e-3)[:, None]
        return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}, numbers

    stored, numbers = packers.quantized(tensors, pack)
    reference = plain_reference(packers.write(tmp_path / "plain", numbers, config))
    options = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    check(packers.write(tmp_path / "packed", stored, config, options), reference, tokens=6)


@pytest.mark.parametrize("ending", ["absmax", "quant_map", "quant_state.bitsandbytes__nf4"])
def test_a_part_that_is_missing_is_named(tmp_path, plain, ending):
    """Without its state a weight would be read as bytes."""
    tensors, config = plain("llama")
    stored, _ = nf4_tensors(tensors)
    del stored[f"model.layers.1.mlp.up_proj.weight.{ending}"]
    with pytest.raises(CheckpointCorruptError, match=r"up_proj\.weight"):
        AutoModelForTPU.from_pretrained(packers.write(tmp_path, stored, config, NF4), strict=False)
