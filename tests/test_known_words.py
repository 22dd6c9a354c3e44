"""Names that people know from transformers, peft and torch: each works here in the sense that it has there, or says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from tiny_models import random_model, save, tiny_llama_config
from transformers import AutoModelForCausalLM

import hfax
from hfax import AutoModelForTPU, GRPOTrainer, LoraConfig, Trainer, TrainingArguments, known_words
from hfax.errors import HfaxError, InvalidInputError, UnsupportedAttributeError, UnsupportedOptionError
from hfax.train.recipe import make_recipe

CONFIG = tiny_llama_config(hidden_size=32, tie_word_embeddings=True)
IDS = torch.tensor([[3, 5, 7, 11]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint of transformers with tied embeddings."""
    return save(tmp_path_factory.mktemp("plain"), random_model(CONFIG))


@pytest.fixture(scope="module")
def plain(folder: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def model(folder: Any) -> Any:
    return AutoModelForTPU.from_pretrained(folder)


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": torch.bfloat16}, torch.bfloat16),
        ({"device_map": "auto"}, torch.float32),
        ({"attn_implementation": "sdpa"}, torch.float32),
        ({"low_cpu_mem_usage": True, "use_safetensors": True}, torch.float32),
    ],
)
def test_loading_takes_the_names_that_mean_the_same(folder: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    assert AutoModelForTPU.from_pretrained(folder, **options).dtype == dtype
    assert AutoModelForTPU.from_config(CONFIG, **options).dtype == dtype


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"torch_dtype": "bfloat16", "dtype": "float32"}, "conflicts with dtype"),
        ({"device_map": "cpu"}, "device_map='cpu'"),
        ({"device_map": "auto", "parallelism": {"tensor": 1}}, "device_map='auto'"),
        ({"low_cpu_mem_usage": False}, "low_cpu_mem_usage"),
        ({"num_labels": 0}, "num_labels=0"),
        ({"dtyp": "float32"}, "Did you mean 'dtype'"),
        ({"attn_implementation": "flash_attention_2"}, "flash_attention_2"),
    ],
)
def test_loading_refuses_what_does_not(folder: Any, options: dict[str, Any], what: str) -> None:
    with pytest.raises(HfaxError, match=what):
        AutoModelForTPU.from_pretrained(folder, **options)


CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "from_pretrained": lambda options: AutoModelForTPU.from_pretrained("demo", **options),
    "TrainingArguments": lambda options: TrainingArguments("run", **options),
    "Trainer": lambda options: Trainer(None, None, **options),
    "GRPOTrainer": lambda options: GRPOTrainer(None, None, None, **options),
    "recipe": lambda options: make_recipe({"model": "demo", "train_data": "rows", "output_dir": "run", **options}),
    "generate": lambda options: AutoModelForTPU.from_config(CONFIG).generate(IDS, max_new_tokens=1, **options),
}


@pytest.mark.parametrize(
    ("call", "word"), [(c, w) for c, words in known_words.words()["arguments"].items() for w in words]
)
def test_an_argument_that_is_not_there_says_why_and_what_instead(call: str, word: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=rf"{word}\.") as caught:
        CALLS[call]({word: object()})
    entry = known_words.words()["arguments"][call][word]
    assert (caught.value.why, caught.value.fix) == (entry["why"], entry["fix"])


@pytest.mark.parametrize("word", known_words.words()["attributes"])
def test_an_attribute_that_is_not_there_says_why_and_what_instead(hfax_llama: Any, word: str) -> None:
    assert not hasattr(hfax_llama, word)
    with pytest.raises(UnsupportedAttributeError, match=f"LlamaForCausalLM has no {word}") as caught:
        getattr(hfax_llama, word)
    assert caught.value.fix


def test_any_other_attribute_is_an_ordinary_error(hfax_llama: Any) -> None:
    with pytest.raises(AttributeError, match="'LlamaForCausalLM' object has no attribute 'generat'"):
        _ = hfax_llama.generat


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.bfloat16().float(), torch.float32),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.to("cpu", "bfloat16"), torch.bfloat16),
    ],
)
def test_a_cast_model_computes_as_one_that_was_loaded_so(
    folder: Any, model: Any, cast: Any, dtype: torch.dtype
) -> None:
    before = model(input_ids=IDS).logits
    if dtype == torch.float32:  # rounded on the way
        rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
        expected = rounded(input_ids=IDS).logits.detach()
    else:
        expected = AutoModelForTPU.from_pretrained(folder, dtype=dtype)(input_ids=IDS).logits
    assert cast(model) is model
    assert model.dtype == dtype
    got = model(input_ids=IDS).logits
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(got.float(), before)
    assert model.generate(IDS, max_new_tokens=2).shape == (1, 6)


def test_a_cast_keeps_in_float32_what_loading_keeps_there(tmp_path: Path) -> None:
    """T5's "wo" is float32 beside float16: cast from bfloat16 it had stayed bfloat16."""
    config = transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    loaded = AutoModelForTPU.from_pretrained(tmp_path, dtype="float16")
    cast = AutoModelForTPU.from_pretrained(tmp_path, dtype="bfloat16").half()
    expected = {name: array.dtype for name, array in loaded.params.items()}
    assert len(set(expected.values())) == 2
    assert {name: array.dtype for name, array in cast.params.items()} == expected


def test_from_config_names_itself_and_its_own_arguments() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"from_config\(\) does not take load_in_8bit"):
        AutoModelForTPU.from_config(CONFIG, load_in_8bit=True)
    with pytest.raises(UnsupportedOptionError, match=r"from_config\(\) got an unknown argument 'plan'") as caught:
        AutoModelForTPU.from_config(CONFIG, plan="plan.json")
    assert "Did you mean 'plan'" not in caught.value.fix


def test_moving_a_model_and_casting_one_with_adapters_are_refused(model: Any) -> None:
    for device in ("tpu", "cuda:0", torch.device("cuda")):
        with pytest.raises(UnsupportedOptionError, match="cannot be moved"):
            model.to(device)
    assert model.to("cpu") is model
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedOptionError, match="adapters cannot be cast"):
        model.half()


def test_counts_and_weights_are_those_of_transformers(model: Any, plain: Any) -> None:
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)
    assert model.get_memory_footprint(return_buffers=False) == plain.get_memory_footprint(return_buffers=False)
    expected = plain.state_dict()
    got = model.state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    transformers.LlamaForCausalLM(CONFIG).load_state_dict(got)


def test_transition_scores_are_those_of_transformers(hfax_llama: Any, plain_llama: Any) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    mine, theirs = hfax_llama.generate(IDS, **options), plain_llama.generate(IDS, **options)
    for normalize in (False, True):
        got = hfax_llama.compute_transition_scores(mine.sequences, mine.scores, normalize_logits=normalize)
        expected = plain_llama.compute_transition_scores(theirs.sequences, theirs.scores, normalize_logits=normalize)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_an_adapter_is_counted_merged_and_forgotten(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    trained = 2 * 2 * (32 + 32)  # two layers, A and B of rank 2, 32 wide on both sides
    assert model.num_parameters(only_trainable=True) == trained
    model.print_trainable_parameters()
    total = CONFIG.vocab_size and model.num_parameters() - 2  # without the adapters' scales
    assert capsys.readouterr().out.startswith(f"trainable params: {trained:,} || all params: {total:,} || trainable%: ")
    names = [name for name in model.params if name.endswith("lora_B")]
    model.params = {**model.params, **{name: model.params[name] + 0.1 for name in names}}
    expected = model(input_ids=IDS).logits
    assert model.merge_and_unload() is model
    assert model.active_adapters() == []
    assert not any("lora" in name for name in model.params)
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, atol=1e-5, rtol=1e-5)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))  # the name is free again


def test_a_model_inside_of_jit_says_to_use_apply(hfax_llama: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"model\.apply\(params, input_ids=ids\)"):
        jax.jit(lambda ids: hfax_llama(input_ids=ids))(np.asarray(IDS, np.int32))


def test_reports_take_one_name_all_or_none() -> None:
    assert TrainingArguments("run", report_to="tensorboard").report_to == ("tensorboard",)
    assert TrainingArguments("run", report_to="all").report_to == ("jsonl", "tensorboard")
    assert TrainingArguments("run", report_to="none").report_to == ()
    with pytest.raises(InvalidInputError, match="names 'comet_ml'"):
        TrainingArguments("run", report_to="comet_ml")


def test_structured_outputs_have_one_form() -> None:
    assert hfax.StructuredOutputsParams(json={"type": "integer"}).json == '{"type": "integer"}'
    for wrong in ({}, {"regex": "a", "choice": ("b",)}, {"choice": ()}):
        with pytest.raises(InvalidInputError):
            hfax.StructuredOutputsParams(**wrong)
