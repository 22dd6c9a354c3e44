"""Adapters of parameters and of experts beside peft's."""

from __future__ import annotations

import json
import logging

import numpy as np
import optax
import peft
import pytest
import torch
from adapted_models import IDS, WITHOUT_PEFTS_WARNINGS, base, logits, with_peft
from safetensors.torch import save_file
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig

from hfax import InvalidInputError, LoraConfig, UnsupportedOptionError, make_train_step

pytestmark = [
    *WITHOUT_PEFTS_WARNINGS,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # peft's
SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2},
}
MODELS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, pad_token_id=0),
}
VARIANTS = {
    "all linear layers": ("qwen3_moe", {"r": 2, "lora_alpha": 6, "target_modules": "all-linear"}),
    "all linear layers of Mixtral": ("mixtral", {"r": 2, "target_modules": "all-linear"}),
    "names of old layers": ("qwen3_moe", {"r": 2, "target_modules": ["q_proj", "gate_proj", "up_proj", "gate"]}),
    "a regular expression": ("qwen3_moe", {"r": 2, "target_modules": r".*\.(v_proj|experts\.(gate|up|down)_proj)"}),
    "one stack": ("qwen3_moe", {"r": 3, "target_modules": ["k_proj"], "target_parameters": ["experts.down_proj"]}),
    "both stacks, one layer": (
        "mixtral",
        {
            **{"r": 2, "target_modules": [], "use_rslora": True, "rank_pattern": {"down_proj": 3}},
            "target_parameters": ["layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"],
        },
    ),
    "a matrix": ("qwen3_moe", {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "stacks that are turned": (
        "gpt_oss",
        {"r": 2, "target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_experts_are_adapted_as_in_peft(variant, tmp_path):
    """hfax adapted the attention alone, without a word."""
    model_type, options = VARIANTS[variant]
    plain, model = base(tmp_path / "base", MODELS[model_type])
    without = logits(model)
    adapted = with_peft(plain, options)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = logits(adapted)
    trained = [p.numel() for p in adapted.parameters() if p.requires_grad]
    model.add_adapter(LoraConfig(**options))
    np.testing.assert_allclose(logits(model), without, atol=1e-5)
    assert sorted(model.params[n].size for n in model.adapters.trained(model.params)) == sorted(trained)
    model.delete_adapter("default")

    model.load_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    model.save_adapter(tmp_path / "again")
    again = peft.PeftModel.from_pretrained(base(tmp_path / "base", MODELS[model_type])[0], tmp_path / "again").eval()
    np.testing.assert_allclose(logits(again), expected, atol=1e-5)
    model.merge_adapter()
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    merged = adapted.merge_and_unload().state_dict()
    for name, array in model.params.items():
        np.testing.assert_allclose(np.asarray(array), merged[name].numpy(), atol=1e-5, err_msg=name)
    model.unmerge_adapter()
    model.disable_adapters()
    np.testing.assert_array_equal(logits(model), without)


def test_experts_train_as_in_peft(tmp_path):
    plain, model = base(tmp_path / "base", MODELS["qwen3_moe"])
    adapted = with_peft(plain, {"r": 2, "target_modules": "all-linear"})
    adapted.save_pretrained(tmp_path / "start")
    model.load_adapter(tmp_path / "start")
    adapted.train()
    torch_optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.3)
    step = make_train_step(model, optax.sgd(0.3), remat=True)
    state, ids = step.init(), torch.tensor(IDS)
    for _ in range(4):
        torch_optimizer.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        torch_optimizer.step()
        state, _ = step(state, {"input_ids": IDS, "labels": IDS})
    step.update_model(state)
    np.testing.assert_allclose(logits(model), logits(adapted.eval()), atol=1e-3)


def test_adapters_of_experts_with_different_ranks_are_switched(tmp_path):
    expected = {}
    _, model = base(tmp_path / "base", MODELS["qwen3_moe"])
    for name, options in (
        ("small", {"r": 2, "target_modules": "all-linear"}),
        ("large", {"r": 5, "target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    ):
        adapted = with_peft(base(tmp_path / "base", MODELS["qwen3_moe"])[0], options)
        adapted.save_pretrained(tmp_path / name)
        expected[name] = logits(adapted)
        model.load_adapter(tmp_path / name, name)
    for name in ("small", "large", "small"):
        model.set_adapter(name)
        np.testing.assert_allclose(logits(model), expected[name], atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_an_adapter_of_single_experts_loads(model_type, tmp_path):
    """Saved with transformers 4: one pair of arrays for each expert and projection."""
    plain, model = base(tmp_path / "base", MODELS[model_type])
    box, gate, up, down, inner = {
        "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj", 16),
        "mixtral": ("block_sparse_moe", "w1", "w3", "w2", 24),
    }[model_type]
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}"
        sizes = {f"{prefix}.{box}.gate": (4, 32), f"{prefix}.self_attn.q_proj": (32, 32)}
        for expert in range(4):
            one = f"{prefix}.{box}.experts.{expert}"
            sizes |= {f"{one}.{gate}": (inner, 32), f"{one}.{up}": (inner, 32), f"{one}.{down}": (32, inner)}
        for name, (out, into) in sizes.items():
            tensors[f"{name}.lora_A.weight"] = torch.randn(2, into, generator=generator) * 0.1
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, 2, generator=generator) * 0.1
    (tmp_path / "adapter").mkdir()
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "gate", gate, up, down]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    model.load_adapter(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert np.abs(logits(loaded) - logits(base(tmp_path / "base", MODELS[model_type])[0])).max() > 1e-2
    np.testing.assert_allclose(logits(model), logits(loaded), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"target_modules": ["gate_proj"]}, InvalidInputError, "without the other of gate_proj, up_proj"),
        ({"target_parameters": ["experts.down"]}, InvalidInputError, "does not have"),
        ({"target_parameters": ["self_attn.q_norm.weight"]}, UnsupportedOptionError, "two or three axes"),
        (
            {"target_modules": ["q_proj"], "target_parameters": ["q_proj.weight"]},
            UnsupportedOptionError,
            "no adapter itself",
        ),
        (
            {"target_parameters": ["experts.down_proj"], "init_lora_weights": "pissa"},
            UnsupportedOptionError,
            "'pissa' with target_parameters",
        ),
        ({"target_modules": "all-linear", "lora_dropout": 0.1}, InvalidInputError, "does not go with lora_dropout"),
        ({"target_parameters": ["experts.down_proj"], "use_dora": True}, InvalidInputError, "or use_dora"),
    ],
)
def test_what_peft_or_hfax_cannot_adapt_is_refused(options, error, words, tmp_path):
    _, model = base(tmp_path / "base", MODELS["qwen3_moe"])
    with pytest.raises(error, match=words):
        model.add_adapter(LoraConfig(r=2, **options))


def test_an_expression_without_experts_keeps_its_layers(tmp_path):
    """PEFT 0.21 forgets them, and then adapts all layers; what it saved before still names some."""
    _, model = base(tmp_path / "base", MODELS["qwen3_moe"])
    model.add_adapter(LoraConfig(r=2, target_modules=r".*layers\.1\.self_attn\.q_proj"))
    assert {n.partition(".lora_")[0] for n in model.params if ".lora_" in n} == {"model.layers.1.self_attn.q_proj"}


def test_quantized_experts_are_refused_and_their_absence_is_told(tmp_path, caplog):
    _, model = base(tmp_path / "base", MODELS["qwen3_moe"], quantization="int8")
    with pytest.raises(UnsupportedOptionError, match="is quantized"):
        model.add_adapter(LoraConfig(r=2, target_parameters=["experts.gate_up_proj"]))
    _, model = base(tmp_path / "gpt_oss", MODELS["gpt_oss"])
    with caplog.at_level(logging.WARNING):
        model.add_adapter(LoraConfig(r=2, target_modules="all-linear"))
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], rank_pattern={"p_proj": 3}), "other")
    assert "adapts no experts, as in PEFT: model.layers.0.mlp.experts.gate_up_proj" in caplog.text
    assert "match no adapted layer, as in PEFT: p_proj" in caplog.text
