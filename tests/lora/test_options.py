"""Every field of peft's `LoraConfig` is honoured, changes nothing in peft either, or is refused by name."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import peft
import pytest
from adapted_models import LLAMA, WITHOUT_PEFTS_WARNINGS, base, logits, with_peft
from tiny_models import tiny_llama_config

from hfax import InvalidInputError, LoraConfig, UnsupportedOptionError
from hfax.lora.options import INERT

pytestmark = [
    *WITHOUT_PEFTS_WARNINGS,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # peft's
FIELDS = [f.name for f in dataclasses.fields(peft.LoraConfig)]
OWN = [f.name for f in dataclasses.fields(LoraConfig)]
HONOURED = {
    "r": 3,
    "lora_alpha": 5,
    "lora_dropout": 0.1,
    "target_modules": ["k_proj"],
    "exclude_modules": ["layers.1.self_attn.q_proj"],
    "layers_to_transform": [2],
    "layers_pattern": "layers",
    "rank_pattern": {"q_proj": 7},
    "alpha_pattern": {"q_proj": 7},
    "use_rslora": True,
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "init_lora_weights": "pissa",
    "target_parameters": ["layers.0.mlp.up_proj.weight"],
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "another",
}
"""Values other than the default, of all fields that are honoured."""
NOTHING = {
    "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
    "peft_version": "0.1",
    "revision": "main",
    "inference_mode": False,
    "fan_in_fan_out": True,
    "megatron_core": "another",
    "qalora_group_size": 2,
    "loftq_config": {"loftq_bits": 2},
    "eva_config": {"rho": 1.5},
    "corda_config": {"corda_method": "kpm"},
    "lora_ga_config": {"stable_gamma": 8},
    "runtime_config": {"ephemeral_gpu_offload": True},
}
"""Values of the fields that change nothing."""
REFUSED = {
    "lora_bias": True,
    "use_qalora": True,
    "layer_replication": [[0, 2], [1, 3]],
    "trainable_token_indices": [1, 2],
    "alora_invocation_tokens": [1],
    "arrow_config": {"top_k": 1},
    "use_bdlora": {"nblocks": 2},
    "kasa_config": {"beta": 1e-4},
    "velora_config": {"num_groups": 2},
    "monteclora_config": {"num_samples": 2},
    "megatron_config": {"hidden_size": 2},
    "ensure_weight_tying": True,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint, and an adapter of it."""
    root = tmp_path_factory.mktemp("options")
    plain, _ = base(root / "base", tiny_llama_config(**LLAMA, attention_bias=True))
    options = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    with_peft(plain, options).save_pretrained(root / "adapter")
    return root


def both(folders):
    return base(folders / "base", tiny_llama_config(**LLAMA, attention_bias=True))


def change(folders, name, value):
    """The adapter's config file with one other value."""
    path = folders / "adapter" / "adapter_config.json"
    before = json.loads(path.read_text())
    path.write_text(json.dumps({**before, name: value}))
    return lambda: path.write_text(json.dumps(before))


def test_every_field_of_peft_is_in_one_table():
    tables = [HONOURED, NOTHING, REFUSED]
    assert {*FIELDS} - {"peft_type"} <= {name for table in tables for name in table}
    assert sum(map(len, tables)) == len({name for table in tables for name in table})
    assert set(OWN) == set(HONOURED)


@pytest.mark.parametrize("name", HONOURED)
def test_a_field_is_honoured(name, folders, tmp_path):
    """The adapter of a config with this value computes as peft's, and another model than without where the value matters."""
    plain, model = both(folders)
    value = HONOURED[name]
    options = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], name: value}
    options |= {"layers_to_transform": [2]} if name == "layers_pattern" else {}
    adapted = with_peft(plain, options)
    adapted.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    model.load_adapter(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(both(folders)[0], tmp_path / "adapter").eval()
    np.testing.assert_allclose(logits(model), logits(loaded), atol=1e-4)
    given = model.adapters.configs["default"].to_dict()[name]
    assert (sorted(given) if isinstance(given, list) else given) == value
    model.delete_adapter("default")
    model.add_adapter(peft.LoraConfig(**options))
    trained = {n.removeprefix("base_model.model.") for n, p in adapted.named_parameters() if p.requires_grad}
    for part in (".default", ".base_layer", ".modules_to_save"):
        trained = {n.replace(part, "") for n in trained}
    if name == "target_parameters":
        trained = {n.replace("layers.0.mlp.up_proj.lora", "layers.0.mlp.up_proj.weight.lora") for n in trained}
    assert set(model.adapters.trained(model.params)) == trained


@pytest.mark.parametrize("name", NOTHING)
def test_a_field_that_changes_nothing_in_peft_is_accepted(name, folders):
    assert name in INERT
    plain, model = both(folders)
    model.load_adapter(folders / "adapter")
    before = logits(model)
    restore = change(folders, name, NOTHING[name])
    try:
        _, again = both(folders)
        again.load_adapter(folders / "adapter")
        expected = logits(peft.PeftModel.from_pretrained(plain, folders / "adapter").eval())
    finally:
        restore()
    np.testing.assert_array_equal(logits(again), before)
    np.testing.assert_allclose(before, expected, atol=1e-4)


@pytest.mark.parametrize(("name", "value"), [*REFUSED.items(), ("a_field_of_the_future", 16)])
def test_a_field_that_hfax_does_not_have_is_refused(name, value, folders):
    _, model = both(folders)
    restore = change(folders, name, value)
    try:
        with pytest.raises(UnsupportedOptionError, match=f"sets {name}="):
            model.load_adapter(folders / "adapter")
    finally:
        restore()
    restore = change(folders, name, None)
    try:
        model.load_adapter(folders / "adapter")
    finally:
        restore()
    assert model.active_adapters() == ["default"]


def test_a_config_of_peft_is_taken(folders):
    plain, model = both(folders)
    given = peft.LoraConfig(r=3, target_modules=["o_proj", "q_proj"], task_type=peft.TaskType.CAUSAL_LM)
    adapted = peft.get_peft_model(plain, given)
    model.add_adapter(given)
    shapes = {n: a.shape for n, a in model.params.items() if ".lora_" in n and "scaling" not in n}
    expected = {
        n.replace(".default", ""): tuple(p.shape)
        for n, p in adapted.get_base_model().named_parameters()
        if "lora_" in n
    }
    assert shapes == expected


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (peft.IA3Config(), UnsupportedOptionError, "peft_type IA3"),
        (peft.AdaLoraConfig(total_step=10), UnsupportedOptionError, "peft_type ADALORA"),
        (peft.LoraConfig(lora_bias=True), UnsupportedOptionError, "lora_bias=True"),
        ([LoraConfig(), LoraConfig()], InvalidInputError, "one LoraConfig"),
        ({"r": 8}, InvalidInputError, "A dict is not an adapter config"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_config_is_refused(given, error, words, folders):
    _, model = both(folders)
    with pytest.raises(error, match=words):
        model.add_adapter(given)


def test_names_of_several_adapters_are_refused(folders):
    _, model = both(folders)
    model.add_adapter(LoraConfig(r=2))
    with pytest.raises(InvalidInputError, match="not an adapter's name"):
        model.set_adapter(["default", "other"])
    with pytest.raises(InvalidInputError, match="A list is not an adapter"):
        model.load_adapter([folders / "adapter", folders / "adapter"])
    with pytest.raises(InvalidInputError, match="cannot be named"):
        model.add_adapter(LoraConfig(r=2), ["a", "b"])
