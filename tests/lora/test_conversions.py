"""Adapters of other types, saved by peft, which are read as LoRA: what they compute, and what they become."""

from __future__ import annotations

import json

import numpy as np
import peft
import pytest
import torch
from adapted_models import WITHOUT_PEFTS_WARNINGS, base, logits
from transformers import GPT2Config

from hfax import UnsupportedOptionError
from hfax.errors import CheckpointCorruptError

pytestmark = WITHOUT_PEFTS_WARNINGS

LAYERS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "adalora": (peft.AdaLoraConfig, {"init_r": 5, "target_r": 3, "lora_alpha": 12, "total_step": 10}),
    "vera": (peft.VeraConfig, {"r": 16}),
    "loha": (peft.LoHaConfig, {"r": 3, "alpha": 5}),
    "loha with ranks": (
        peft.LoHaConfig,
        {"r": 3, "alpha": 5, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 7}},
    ),
    "lokr": (peft.LoKrConfig, {"r": 2, "alpha": 3}),
    "lokr with two decomposed factors": (
        peft.LoKrConfig,
        {"r": 1, "alpha": 3, "decompose_both": True, "decompose_factor": 4},
    ),
    "lokr with whole factors": (peft.LoKrConfig, {"r": 32, "alpha": 3}),
}


def with_peft(plain, kind, **more):
    """The model with an adapter of a type that changes something."""
    made, options = KINDS[kind]
    adapted = peft.get_peft_model(
        plain, made(**{"target_modules": LAYERS, "task_type": "CAUSAL_LM", **options, **more})
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if any(mark in name for mark in ("lora_", "vera_lambda", "hada_", "lokr_")) and "ranknum" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return adapted.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_peft(kind, tmp_path):
    plain, model = base(tmp_path / "base")
    before = logits(model)
    adapted = with_peft(plain, kind)
    adapted.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    expected = logits(adapted)
    assert np.abs(expected - before).max() > 1e-3
    np.testing.assert_allclose(logits(model), expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["adalora", "loha"])
def test_it_is_saved_as_lora(kind, tmp_path):
    plain, model = base(tmp_path / "base")
    adapted = with_peft(plain, kind)
    adapted.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    model.save_adapter(tmp_path / "lora")
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    plain = base(tmp_path / "again")[0]
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "lora").eval()
    np.testing.assert_allclose(logits(again), logits(adapted), atol=2e-4)
    model.merge_adapter()
    np.testing.assert_allclose(logits(model), logits(adapted), atol=2e-4)


def test_ranks_that_adalora_pruned(tmp_path):
    plain, model = base(tmp_path / "base")
    adapted = with_peft(plain, "adalora")
    kept = {
        name: [bool(i % 2) for i in range(5)] if "q_proj" in name else [False] * 5
        for name, _ in adapted.base_model.model.named_parameters()
        if name.endswith("lora_E.default") and "v_proj" not in name
    }
    adapted.peft_config["default"].rank_pattern = kept
    adapted.base_model.resize_modules_by_rank_pattern(kept, "default")
    adapted.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(logits(model), logits(adapted), atol=2e-4)
    assert {
        model.adapters.configs["default"].rank(path) for path in model.adapters.configs["default"].target_modules
    } == {2, 5}


def test_layers_that_are_stored_turned(tmp_path):
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    plain, model = base(tmp_path / "base", config)
    adapted = with_peft(plain, "adalora", target_modules=["c_attn"], fan_in_fan_out=True)
    adapted.save_pretrained(tmp_path / "adapter")
    model.load_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(logits(model), logits(adapted), atol=2e-4)


def test_what_changes_more_is_refused(tmp_path):
    plain, model = base(tmp_path / "base")
    with_peft(plain, "loha", modules_to_save=["lm_head"]).save_pretrained(tmp_path / "whole")
    with pytest.raises(UnsupportedOptionError, match="modules_to_save"):
        model.load_adapter(tmp_path / "whole")
    plain, _ = base(tmp_path / "base-2")
    with_peft(plain, "vera", save_projection=False).save_pretrained(tmp_path / "drawn")
    with pytest.raises(UnsupportedOptionError, match="save_projection=True"):
        model.load_adapter(tmp_path / "drawn")
    config = tmp_path / "drawn" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "peft_type": "LOHA", "alpha": 4, "new_field": 3}))
    with pytest.raises(UnsupportedOptionError, match="new_field=3"):
        model.load_adapter(tmp_path / "drawn")


def test_an_adapter_of_another_model_is_named(tmp_path):
    plain, _ = base(tmp_path / "base")
    with_peft(plain, "loha").save_pretrained(tmp_path / "adapter")
    _, other = base(tmp_path / "other", GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    with pytest.raises(CheckpointCorruptError, match="has no layer model"):
        other.load_adapter(tmp_path / "adapter")
