"""Quantized models through the public calls: close to the original, smaller, saved and loaded again."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from packed_weights import packed_array, packed_tensor

from hfax import AutoModelForTPU
from hfax.errors import CheckpointCorruptError, UnsupportedOptionError
from hfax.kernels.quantized import QuantizedArray

IDS = torch.tensor([[3, 17, 5, 40, 41, 9, 60, 22]])
SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=True, initializer_range=0.1, eos_token_id=None)
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def logits(folder):
    return AutoModelForTPU.from_pretrained(folder)(input_ids=IDS).logits


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.06), ("int4", 0.6)])
def test_logits_stay_near(folder, logits, kind, most):
    model = AutoModelForTPU.from_pretrained(folder, quantization=kind)
    got = model(input_ids=IDS).logits
    assert ((got - logits).pow(2).mean().sqrt() / logits.pow(2).mean().sqrt()).item() < most
    packed = {name for name, p in model.params.items() if isinstance(p, QuantizedArray)}
    assert "model.layers.0.mlp.gate_proj.weight" in packed
    assert "model.embed_tokens.weight" in packed  # the head's
    assert "model.norm.weight" not in packed


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_saved_and_loaded_again_bit_for_bit(folder, tmp_path, kind):
    model = AutoModelForTPU.from_pretrained(folder, quantization=kind)
    model.save_pretrained(tmp_path / "packed")
    again = AutoModelForTPU.from_pretrained(tmp_path / "packed")
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(again.generate(IDS, **options), model.generate(IDS, **options))
    sizes = [sum(f.stat().st_size for f in p.glob("*.safetensors")) for p in (tmp_path / "packed", folder)]
    assert sizes[0] < sizes[1] * (0.3 if kind == "int8" else 0.17)


def test_a_packed_checkpoint_is_not_packed_again(folder, tmp_path):
    AutoModelForTPU.from_pretrained(folder, quantization="int8").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedOptionError, match="is already quantized"):
        AutoModelForTPU.from_pretrained(tmp_path, quantization="int4")


def test_a_packed_checkpoint_of_another_model_is_an_error(folder, tmp_path):
    AutoModelForTPU.from_pretrained(folder, quantization="int8").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(CheckpointCorruptError, match="missing"):
        AutoModelForTPU.from_pretrained(tmp_path)


def test_unknown_kinds_are_refused(folder):
    with pytest.raises(UnsupportedOptionError, match="int3"):
        AutoModelForTPU.from_pretrained(folder, quantization="int3")


def test_the_demo_model_still_knows_its_text():
    """The loss on held-out text may grow by a hundredth with 8 bits and by a tenth with 4."""
    texts = json.loads((Path(__file__).parent / "demo" / "held_out_sample.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder())

    rows = tokenizer(texts[:6], padding=True, padding_side="right", return_tensors="pt")
    labels = rows.input_ids.masked_fill(rows.attention_mask == 0, -100)

    def loss(kind):
        model = AutoModelForTPU.from_pretrained("demo", quantization=kind)
        return float(model(**rows, labels=labels).loss)

    plain = loss(None)
    assert loss("int8") < plain * 1.01
    assert loss("int4") < plain * 1.10


def demo_folder():
    from hfax.load.source import resolve_checkpoint

    return resolve_checkpoint("demo").folder


def test_experts_are_packed_too():
    config = transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, initializer_range=0.1
    )
    model = AutoModelForTPU.from_config(config, dtype="float32", quantization="int8")
    assert isinstance(model.params["model.layers.0.mlp.experts.gate_up_proj"], QuantizedArray)
    model.generation_config.eos_token_id = None
    assert model.generate(IDS, max_new_tokens=5, do_sample=False).shape == (1, 13)


@pytest.mark.parametrize(("kind", "most", "of_weight"), [("int8", 0.06, 0.01), ("int4", 0.6, 0.12)])
def test_transposed_experts_are_packed_too(tmp_path, kind, most, of_weight):
    """gpt-oss holds them as [experts, in, out]; rows of 160 columns have no whole words of 4 bits."""
    sizes = SIZES | {"hidden_size": 160, "intermediate_size": 96}
    config = transformers.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.1)
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    plain = AutoModelForTPU.from_pretrained(tmp_path)
    model = AutoModelForTPU.from_pretrained(tmp_path, quantization=kind)
    logits, expected = model(input_ids=IDS).logits, plain(input_ids=IDS).logits
    assert ((logits - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()).item() < most
    name = "model.layers.0.mlp.experts.gate_up_proj"
    packed, numbers = model.params[name], plain.params[name]
    assert isinstance(packed, QuantizedArray)
    assert packed.shape == numbers.shape
    assert packed.nbytes < 2 * int(kind[3:]) / 8 * numbers.size
    error = np.asarray(packed.dequantize()) - np.asarray(numbers)
    assert np.sqrt(np.mean(error**2)) < of_weight * np.std(np.asarray(numbers))
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(AutoModelForTPU.from_pretrained(tmp_path / "packed")(input_ids=IDS).logits, logits)


def with_stored_weights(model, form, *, permuted=False):
    """Replaces the weights of the first layer by codes at random, as other libraries store them."""
    for name, array in model.params.items():
        if ".layers.0." in name and array.ndim == 2:
            tensor = packed_tensor(*form, tuple(array.shape), permuted=permuted)
            model.params[name] = packed_array(tensor, getattr(torch, array.dtype.name))
    assert model.quantization == form[0]
    return model


@pytest.mark.parametrize("format", ["safetensors", "orbax"])
@pytest.mark.parametrize(
    "form",
    [
        ("int8", 64, "float32", True),
        ("int4", 32, "float16", True),
        ("fp4", 32, "bfloat16", False),
        ("fp8", 128, "float32", False),
    ],
    ids=str,
)
def test_stored_weights_are_saved_and_loaded_again_bit_for_bit(folder, tmp_path, form, format):
    """What the codes mean, offsets and the order of columns too."""
    model = with_stored_weights(AutoModelForTPU.from_pretrained(folder), form, permuted=True)
    model.save_pretrained(tmp_path, format=format)
    again = AutoModelForTPU.from_pretrained(tmp_path)
    for name, array in model.params.items():
        assert jax.tree.structure(again.params[name]) == jax.tree.structure(array)
        for got, expected in zip(jax.tree.leaves(again.params[name]), jax.tree.leaves(array), strict=True):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
    logits = model(input_ids=IDS).logits
    assert logits.isfinite().all()
    assert torch.equal(again(input_ids=IDS).logits, logits)
