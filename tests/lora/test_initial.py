"""`init_lora_weights`: base weights and first values beside peft's."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import optax
import peft
import pytest
import torch
from adapted_models import LLAMA, WITHOUT_PEFTS_WARNINGS, base, logits, with_peft
from tiny_models import tiny_llama_config
from transformers import GPT2Config

from hfax import InvalidInputError, LoraConfig, UnsupportedOptionError, make_train_step

pytestmark = WITHOUT_PEFTS_WARNINGS
GPT2 = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32)
SMALL = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
KINDS = {
    **{str(kind): {**SMALL, "init_lora_weights": kind} for kind in (True, False, "gaussian", "orthogonal", "mica")},
    "pissa": {**SMALL, "init_lora_weights": "pissa"},
    "pissa, rslora, ranks": {
        **{**SMALL, "init_lora_weights": "pissa", "use_rslora": True, "rank_pattern": {"q_proj": 2}}
    },
    "pissa, dora": {**SMALL, "init_lora_weights": "pissa", "use_dora": True},
    "pissa, embeddings": {"r": 2, "target_modules": ["q_proj", "embed_tokens"], "init_lora_weights": "pissa"},
    "olora": {**SMALL, "init_lora_weights": "olora"},
    "olora, modules_to_save": {**SMALL, "init_lora_weights": "olora", "modules_to_save": ["lm_head"]},
    "eva": {**SMALL, "init_lora_weights": "eva"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_adapter_computes_on_the_base_weights_that_peft_loads_it_on(kind, tmp_path):
    """PiSSA and OLoRA change the base weights, on each load: hfax left them, and was wrong without a word."""
    plain, model = base(tmp_path / "base")
    without = logits(model)
    with_peft(plain, KINDS[kind]).save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base(tmp_path / "base")[0], tmp_path / "adapter").eval()
    expected = logits(loaded)
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)

    model.save_adapter(tmp_path / "again")
    again = peft.PeftModel.from_pretrained(base(tmp_path / "base")[0], tmp_path / "again").eval()
    np.testing.assert_allclose(logits(again), expected, atol=1e-4)
    model.merge_adapter()
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    model.unmerge_adapter()
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    model.disable_adapters()
    np.testing.assert_array_equal(logits(model), without)


@pytest.mark.parametrize("kind", ["pissa", "olora", "mica"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_values_from_the_base_weights_are_those_of_peft(kind, dtype, tmp_path):
    """peft rounds the factors to the base weight's dtype."""
    plain, model = base(tmp_path / "base", dtype=dtype)
    without = logits(model)
    adapted = peft.get_peft_model(plain.to(getattr(torch, dtype)), peft.LoraConfig(**KINDS[kind]))
    model.add_adapter(LoraConfig(**KINDS[kind]))
    found = {n: np.asarray(a, np.float32) for n, a in model.params.items()}
    for name, tensor in adapted.get_base_model().state_dict().items():
        if ".base_layer." in name:
            expected = tensor.float().numpy()
            np.testing.assert_allclose(
                found[name.replace(".base_layer", "")], expected, atol=1e-5 + 2e-3 * (dtype == "bfloat16")
            )
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"):
        layer = adapted.get_base_model().get_submodule(path)
        product = (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach().float().numpy()
        own = found[f"{path}.lora_B.weight"] @ found[f"{path}.lora_A.weight"]
        np.testing.assert_allclose(own, product, atol=1e-5 if dtype == "float32" else 3e-4)
    np.testing.assert_allclose(logits(model), without, atol=1e-4 if dtype == "float32" else 0.05)


def test_first_values_of_a_conv1d(tmp_path):
    options = {"r": 4, "target_modules": ["c_attn"], "init_lora_weights": "pissa", "fan_in_fan_out": True}
    plain, model = base(tmp_path / "base", GPT2)
    with_peft(plain, options).save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(base(tmp_path / "base", GPT2)[0], tmp_path / "adapter").eval()
    np.testing.assert_allclose(logits(model), logits(loaded), atol=1e-4)
    with pytest.raises(UnsupportedOptionError, match="'olora' cannot initialise"):
        model.add_adapter(LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights="olora"), "olora")


@pytest.mark.parametrize("kind", [True, False, "gaussian", "orthogonal"])
def test_drawn_first_values_have_the_spread_of_peft(kind, tmp_path):
    """Standard deviations of 3 x 32 x 32 values of each array: equal to within 10%, or both zero."""
    options = {"r": 32, "target_modules": ["q_proj"], "init_lora_weights": kind}
    plain, model = base(tmp_path / "base")
    adapted = peft.get_peft_model(plain, peft.LoraConfig(**options))
    model.add_adapter(LoraConfig(**options))
    for part in ("lora_A", "lora_B"):
        expected = torch.cat([p.flatten() for n, p in adapted.named_parameters() if part in n]).std().item()
        found = np.concatenate([np.asarray(a).ravel() for n, a in model.params.items() if part in n]).std()
        np.testing.assert_allclose(found, expected, rtol=0.1)
    if kind == "orthogonal":
        for i in range(3):
            a, b = (model.params[f"model.layers.{i}.self_attn.q_proj.lora_{x}.weight"] for x in "AB")
            np.testing.assert_allclose(np.asarray(b @ a), 0, atol=1e-4)


def test_mica_trains_only_one_half(tmp_path):
    plain, model = base(tmp_path / "base")
    adapted = peft.get_peft_model(plain, peft.LoraConfig(**KINDS["mica"]))
    model.add_adapter(LoraConfig(**KINDS["mica"]))
    trained = {
        n.removeprefix("base_model.model.").replace(".default", "")
        for n, p in adapted.named_parameters()
        if p.requires_grad
    }
    assert set(make_train_step(model, optax.sgd(1.0)).trainable) == trained


def test_each_adapter_has_base_weights_of_its_own(tmp_path):
    """In peft, a second adapter would compute on the rest that the first one left."""
    _, model = base(tmp_path / "base")
    found = {}
    for name in ("pissa", "True"):
        with_peft(base(tmp_path / "base")[0], KINDS[name]).save_pretrained(tmp_path / name)
        model.load_adapter(tmp_path / name, name)
    for name in ("True", "pissa", "True"):
        model.set_adapter(name)
        found[name] = logits(model)
        alone = peft.PeftModel.from_pretrained(base(tmp_path / "base")[0], tmp_path / name).eval()
        np.testing.assert_allclose(found[name], logits(alone), atol=1e-4)
    model.delete_adapter("pissa")
    np.testing.assert_array_equal(logits(model), found["True"])


@pytest.mark.parametrize("kind", ["pissa_niter_4", "corda", "loftq", "lora_ga"])
def test_an_initialisation_that_cannot_be_repeated_is_refused(kind, tmp_path):
    plain, model = base(tmp_path / "base")
    with_peft(plain, SMALL).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "init_lora_weights": kind}))
    with pytest.raises(UnsupportedOptionError, match=f"init_lora_weights='{kind}'(.|\n)*path_initial_model"):
        model.load_adapter(tmp_path / "adapter")
    with pytest.raises(UnsupportedOptionError, match=f"init_lora_weights='{kind}'"):
        model.add_adapter(LoraConfig(r=2, init_lora_weights=kind))


def test_a_converted_adapter_loads(tmp_path):
    """What the refusal advises."""
    plain, model = base(tmp_path / "base")
    adapted = peft.get_peft_model(plain, peft.LoraConfig(**{**SMALL, "init_lora_weights": "pissa_niter_4"}))
    adapted.save_pretrained(tmp_path / "first")
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=tmp_path / "first")
    model.load_adapter(tmp_path / "plain")
    np.testing.assert_allclose(logits(model), logits(adapted.eval()), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"init_lora_weights": "eva"}, UnsupportedOptionError, "initialize_lora_eva_weights"),
        ({"init_lora_weights": "pisa"}, InvalidInputError, "no such initialisation"),
        ({"init_lora_weights": "orthogonal", "r": 3}, InvalidInputError, "odd rank"),
        ({"init_lora_weights": "mica", "use_dora": True}, UnsupportedOptionError, "no such variant"),
        ({"init_lora_weights": "pissa", "r": 33}, InvalidInputError, "smaller r"),
    ],
)
def test_what_cannot_be_initialised_is_refused(options, error, words, tmp_path):
    _, model = base(tmp_path / "base")
    with pytest.raises(error, match=words):
        model.add_adapter(LoraConfig(**{"target_modules": ["q_proj"], **options}))
    assert model.active_adapters() == []


def test_weights_that_cannot_change_are_not_taken_apart(tmp_path):
    _, packed = base(tmp_path / "base", quantization="int8")
    with pytest.raises(UnsupportedOptionError, match="is quantized"):
        packed.add_adapter(LoraConfig(r=2, init_lora_weights="pissa"))
    _, tied = base(tmp_path / "tied", tiny_llama_config(**LLAMA, tie_word_embeddings=True))
    with pytest.raises(UnsupportedOptionError, match="tied"):
        tied.add_adapter(LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights="olora"))
    assert jnp.isfinite(np.asarray(logits(tied))).all()
