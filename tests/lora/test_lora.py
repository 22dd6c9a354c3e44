"""Adapters beside peft: what they compute, how they are read and written, and how they train."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import optax
import peft
import pytest
import torch
from adapted_models import IDS, LLAMA, WITHOUT_PEFTS_WARNINGS, base, logits, with_peft
from packed_weights import packed_array, packed_tensor
from safetensors.numpy import load_file
from tiny_models import random_model, save, tiny_llama_config
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Gemma3TextConfig,
    GPT2Config,
)

from hfax import AutoModelForTPU, InvalidInputError, LoraConfig, UnsupportedOptionError, make_train_step

pytestmark = WITHOUT_PEFTS_WARNINGS

VARIANTS = {
    "plain": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all linear": {"r": 3, "target_modules": "all-linear"},
    "regular expression": {"r": 2, "target_modules": r".*layers\.[02]\.mlp\.(up|down)_proj"},
    "ranks": {
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]},
        **{"rank_pattern": {"v_proj": 2, r"layers\.1\..*up_proj": 6}, "alpha_pattern": {"up_proj": 3}},
    },
    "rslora": {"r": 4, "lora_alpha": 16, "use_rslora": True, "target_modules": ["o_proj"]},
    "dora": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    "whole modules": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "some layers": {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [1]},
    "embeddings": {"r": 2, "target_modules": ["embed_tokens", "k_proj"]},
    "excluded": {"r": 2, "target_modules": "all-linear", "exclude_modules": ["gate_proj"]},
    "default layers": {"r": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_of_peft_computes_the_same_and_goes_back(variant, tmp_path):
    plain, model = base(tmp_path / "base")
    without = logits(model)
    adapted = with_peft(plain, VARIANTS[variant])
    adapted.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    expected = logits(adapted)
    assert np.abs(expected - without).max() > 1e-3
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)

    model.save_adapter(tmp_path / "again")
    plain, _ = base(tmp_path / "base")
    back = peft.PeftModel.from_pretrained(plain, tmp_path / "again").eval()
    np.testing.assert_allclose(logits(back), expected, atol=1e-5)

    before = {n: np.asarray(a) for n, a in model.params.items()}
    model.merge_adapter()
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    merged = adapted.merge_and_unload().state_dict()
    for name, array in model.params.items():
        np.testing.assert_allclose(np.asarray(array), merged[name].numpy(), atol=1e-6, err_msg=name)
    model.unmerge_adapter()
    assert set(before) == set(model.params)
    for name, array in model.params.items():
        np.testing.assert_array_equal(np.asarray(array), before[name])
    model.disable_adapters()
    np.testing.assert_array_equal(logits(model), without)
    model.enable_adapters()
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)


def test_layers_that_keep_their_weights_turned(tmp_path):
    """GPT-2's Conv1D."""
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    plain, model = base(tmp_path / "base", config)
    adapted = with_peft(plain, {"r": 3, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True})
    adapted.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(logits(model), logits(adapted), atol=1e-4)
    expected = logits(model)
    model.merge_adapter()
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)


def test_adapters_are_switched_without_another_compilation(tmp_path):
    """Of different ranks and, within what any adapter changes, of different layers."""
    _, model = base(tmp_path / "base")
    for name, options in (("a", VARIANTS["all linear"]), ("b", VARIANTS["plain"]), ("c", {"r": 5, "use_rslora": True})):
        plain, _ = base(tmp_path / "base")
        with_peft(plain, options, seed=hash(name) % 100).save_pretrained(tmp_path / name)
        model.load_adapter(tmp_path / name, name)
    found = {}
    for name in ("a", "b", "c"):
        model.set_adapter(name)
        found[name] = logits(model)
    programs = len(model._programs._programs)
    for name in ("b", "a", "c", "a"):
        model.set_adapter(name)
        np.testing.assert_array_equal(logits(model), found[name])
        plain, _ = base(tmp_path / "base")
        expected = logits(peft.PeftModel.from_pretrained(plain, tmp_path / name).eval())
        np.testing.assert_allclose(found[name], expected, atol=1e-4)
    assert len(model._programs._programs) == programs
    tokens = np.asarray(model.generate(IDS[:1], max_new_tokens=4, do_sample=False))
    expected = peft.PeftModel.from_pretrained(base(tmp_path / "base")[0], tmp_path / "a").eval()
    plain_tokens = expected.generate(input_ids=torch.tensor(IDS[:1]), max_new_tokens=4, do_sample=False)
    np.testing.assert_array_equal(tokens, plain_tokens.numpy())


def test_training_an_adapter_follows_peft(tmp_path):
    plain, model = base(tmp_path / "base")
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "modules_to_save": ["lm_head"]}
    adapted = with_peft(plain, options)
    adapted.save_pretrained(tmp_path / "start")
    model.load_adapter(tmp_path / "start")
    frozen = {n: np.asarray(a) for n, a in model.params.items() if "lora" not in n and n != "lm_head.weight"}
    adapted.train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    torch_optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.05)
    trainable = [n for n in model.params if "lora_A" in n or "lora_B" in n or n == "lm_head.weight"]
    step = make_train_step(model, optax.adamw(1e-3, weight_decay=0.05), trainable=trainable)
    state, expected, found = step.init(), [], []
    data = np.random.default_rng(0).integers(1, 96, (10, 4, 12))
    for number in range(50):
        ids = data[number % len(data)]
        loss = adapted(input_ids=torch.tensor(ids), labels=torch.tensor(ids)).loss
        torch_optimizer.zero_grad()
        loss.backward()
        torch_optimizer.step()
        expected.append(loss.item())
        state, metrics = step(state, {"input_ids": ids, "labels": ids})
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert found[-1] < found[9] - 0.1
    step.update_model(state)
    np.testing.assert_allclose(logits(model), logits(adapted.eval()), atol=1e-3)
    model.save_adapter(tmp_path / "trained")
    again = peft.PeftModel.from_pretrained(base(tmp_path / "base")[0], tmp_path / "trained").eval()
    np.testing.assert_allclose(logits(again), logits(model), atol=1e-4)
    for name, array in frozen.items():
        np.testing.assert_array_equal(np.asarray(model.params[name]), array)


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_new_adapter_changes_nothing_and_gets_gradients(use_dora, tmp_path):
    _, model = base(tmp_path / "base")
    without = logits(model)
    model.add_adapter(LoraConfig(r=4, target_modules="all-linear", use_dora=use_dora, lora_dropout=0.2))
    np.testing.assert_allclose(logits(model), without, atol=1e-5)
    step = make_train_step(model, optax.adam(1e-2))
    assert all(".lora_" in name for name in step.trainable)
    state = step.init()
    inputs = {"input_ids": IDS, "labels": IDS}
    losses = []
    for _ in range(8):
        state, metrics = step(state, inputs)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    once, twice = (float(step(step.init(seed=3), inputs)[1]["loss"]) for _ in range(2))
    other = float(step(jax.tree.map(lambda a: a, step.init(seed=4)), inputs)[1]["loss"])
    assert once == twice
    assert np.isfinite(other)


def test_an_adapter_trains_beside_int8_weights(tmp_path):
    _, model = base(tmp_path / "base", quantization="int8", dtype="bfloat16")
    model.add_adapter(LoraConfig(r=4, target_modules="all-linear"))
    step = make_train_step(model, optax.adam(1e-2))
    state, losses = step.init(), []
    for _ in range(10):
        state, metrics = step(state, {"input_ids": IDS, "labels": IDS})
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    step.update_model(state)
    before = np.asarray(model(input_ids=IDS).logits, np.float32)
    model.save_adapter(tmp_path / "adapter")
    _, again = base(tmp_path / "base", quantization="int8", dtype="bfloat16")
    again.load_adapter(tmp_path / "adapter")
    np.testing.assert_array_equal(np.asarray(again(input_ids=IDS).logits, np.float32), before)
    with pytest.raises(UnsupportedOptionError, match="is quantized"):
        model.merge_adapter()


def test_adapters_that_do_not_fit_say_so(tmp_path):
    plain, model = base(tmp_path / "base")
    with_peft(plain, VARIANTS["plain"]).save_pretrained(tmp_path / "llama")
    other = GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2)
    _, gpt2 = base(tmp_path / "gpt2", other)
    with pytest.raises(InvalidInputError, match="matches no layer of GPT2LMHeadModel"):
        gpt2.load_adapter(tmp_path / "llama")
    _, wide = base(tmp_path / "wide", tiny_llama_config(**{**LLAMA, "hidden_size": 64}))
    with pytest.raises(InvalidInputError, match="with shape"):
        wide.load_adapter(tmp_path / "llama")
    _, deep = base(tmp_path / "deep", tiny_llama_config(**{**LLAMA, "num_hidden_layers": 4}))
    with pytest.raises(InvalidInputError, match="arrays are missing"):
        deep.load_adapter(tmp_path / "llama")
    assert logits(deep).shape  # it works on
    config = json.loads((tmp_path / "llama" / "adapter_config.json").read_text())
    for change, words in (({"peft_type": "IA3"}, "has peft_type IA3"), ({"lora_bias": True}, "lora_bias=True")):
        (tmp_path / "llama" / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UnsupportedOptionError, match=words):
            model.load_adapter(tmp_path / "llama")
    (tmp_path / "llama" / "adapter_config.json").write_text("{")
    with pytest.raises(Exception, match="is not an adapter config"):
        model.load_adapter(tmp_path / "llama")
    with pytest.raises(Exception, match="There is no adapter"):
        model.load_adapter(tmp_path / "nothing")
    with pytest.raises(InvalidInputError, match="There is no adapter 'x'"):
        model.set_adapter("x")


def test_a_model_is_saved_without_its_adapter(tmp_path):
    plain, model = base(tmp_path / "base")
    model.add_adapter(LoraConfig(r=2, modules_to_save=["lm_head"]))
    model.params = {**model.params, "lm_head.weight": model.params["lm_head.weight"] + 1}
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
def test_weights_that_an_adapter_stores_in_full_are_trained_by_default(bias, tmp_path):
    """`modules_to_save` were left out: a head stayed as it was, and was saved so."""
    plain, model = base(tmp_path / "base", tiny_llama_config(**LLAMA, attention_bias=True))
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"], "bias": bias}
    adapted = with_peft(plain, options)
    adapted.save_pretrained(tmp_path / "start")
    model.load_adapter(tmp_path / "start")
    adapted.train()
    torch_optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.3)
    step = make_train_step(model, optax.sgd(0.3))
    state, ids = step.init(), torch.tensor(IDS)
    for _ in range(5):
        torch_optimizer.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        torch_optimizer.step()
        state, _ = step(state, {"input_ids": IDS, "labels": IDS})
    step.update_model(state)
    assert model.num_parameters(only_trainable=True) == adapted.get_nb_trainable_parameters()[0]
    np.testing.assert_allclose(logits(model), logits(adapted.eval()), atol=1e-3)
    model.save_adapter(tmp_path / "trained")
    adapted.save_pretrained(tmp_path / "expected")
    found, expected = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("trained", "expected"))
    assert set(found) == {n for n in expected if "original_module" not in n}
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "TOKEN_CLS"])
def test_a_classifier_trains_its_head(task_type, tmp_path):
    """PEFT adds both names that heads have; a model has one of them."""
    auto = {"SEQ_CLS": AutoModelForSequenceClassification, "TOKEN_CLS": AutoModelForTokenClassification}[task_type]
    task = {"SEQ_CLS": "text-classification", "TOKEN_CLS": "token-classification"}[task_type]
    config = tiny_llama_config(**LLAMA, num_labels=3, pad_token_id=0)
    save(tmp_path / "base", random_model(config, auto=auto))
    model = AutoModelForTPU.from_pretrained(tmp_path / "base", task=task)
    targets = {"SEQ_CLS": "all-linear", "TOKEN_CLS": ["q_proj"]}[task_type]  # peft refuses "all-linear" with TOKEN_CLS
    options = {"r": 2, "target_modules": targets, "task_type": task_type}
    adapted = peft.get_peft_model(auto.from_pretrained(tmp_path / "base"), peft.LoraConfig(**options))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(logits(model), logits(adapted.eval()), atol=1e-4)
    model.add_adapter(LoraConfig(**options), "new")
    assert "score.weight" in make_train_step(model, optax.sgd(0.1), lambda apply, batch: 0.0).trainable


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_a_tied_weight_changes_one_layer_and_is_not_merged(target, tmp_path):
    """peft's merge changes the embedding and the head, with a warning: other logits than before."""
    plain, model = base(tmp_path / "base", tiny_llama_config(**LLAMA, tie_word_embeddings=True))
    adapted = with_peft(plain, {"r": 2, "target_modules": [target, "q_proj"]})
    adapted.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    expected = logits(adapted)
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    with pytest.raises(UnsupportedOptionError, match="is tied to"):
        model.merge_adapter()
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    assert np.abs(logits(adapted.merge_and_unload()) - expected).max() > 1e-2  # in peft


def test_an_adapter_of_a_table_that_scales_its_rows(tmp_path):
    config = Gemma3TextConfig(
        **{
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        **{"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    )
    plain, model = base(tmp_path / "base", config)
    adapted = with_peft(plain, {"r": 2, "target_modules": ["embed_tokens"]})
    adapted.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(logits(model), logits(adapted), atol=1e-4)
    expected = logits(model)
    model.merge_adapter()
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    model.unmerge_adapter()
    with pytest.raises(UnsupportedOptionError, match="without use_dora on embeddings"):
        model.add_adapter(LoraConfig(r=2, target_modules=["embed_tokens"], use_dora=True), "dora")


@pytest.mark.parametrize(
    "form",
    [
        ("int4", 32, "float16", True),
        ("int8", 32, "float16", True),
        ("fp8", 128, "float32", False),
        ("fp4", 32, "bfloat16", False),
    ],
    ids=str,
)
def test_an_adapter_trains_beside_stored_weights_as_beside_their_numbers(form):
    """With offsets and columns in another order: losses are those of the same weights as numbers."""
    config = tiny_llama_config(hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    packed = AutoModelForTPU.from_config(config, dtype="float32")
    plain = AutoModelForTPU.from_config(config, dtype="float32")
    for name, array in packed.params.items():
        plain.params[name] = array
        if "proj" in name:
            tensor = packed_tensor(*form, tuple(array.shape), permuted=True)
            smaller = None if tensor.offset is None else tensor.offset / 256
            packed.params[name] = packed_array(dataclasses.replace(tensor, scale=tensor.scale / 256, offset=smaller))
            plain.params[name] = packed.params[name].dequantize()
    losses = []
    for model in (packed, plain):
        model.add_adapter(LoraConfig(r=4, target_modules="all-linear"))
        step = make_train_step(model, optax.adam(1e-2))
        state = step.init(seed=0)
        for _ in range(3):
            state, metrics = step(state, {"input_ids": IDS, "labels": IDS})
            losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    np.testing.assert_allclose(losses[:3], losses[3:], rtol=1e-5)
