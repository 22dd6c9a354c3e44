"""`hfax train`: a file, data on disk, and a model or an adapter in a folder."""

from __future__ import annotations

import json
import types

import huggingface_hub
import numpy as np
import pytest
from tiny_models import random_model, save, tiny_llama_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfax.cli.app import run
from hfax.demo import demo_folder

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(12)
]


@pytest.fixture
def write(tmp_path):
    """Write a recipe, with data beside it; gives its path."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def make(**fields):
        recipe = {
            "model": "demo",
            "train_data": str(data),
            "output_dir": str(tmp_path / "run"),
            "per_device_train_batch_size": 4,
        }
        recipe |= {
            "max_steps": 4,
            "max_length": 64,
            "learning_rate": 0.01,
            "logging_steps": 1,
            "dtype": "float32",
            **fields,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({n: v for n, v in recipe.items() if v is not None}))  # JSON is YAML
        return str(path)

    return make


def metrics(tmp_path):
    """Lines of the run."""
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's
def test_an_adapter_is_trained_evaluated_and_saved_for_peft(write, tmp_path, capsys):
    import peft

    recipe = write(
        lora={"r": 4, "target_modules": "all-linear"},
        eval_data=str(tmp_path / "rows.jsonl"),
        eval_steps=2,
        report_to=["jsonl", "tensorboard"],
    )
    assert run(["train", recipe, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 4
    lines = metrics(tmp_path)
    assert list((tmp_path / "run" / "runs").iterdir())
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    evaluations = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(evaluations) == 2
    assert evaluations[1] < evaluations[0]
    plain = AutoModelForCausalLM.from_pretrained(demo_folder())
    adapted = peft.PeftModel.from_pretrained(plain, found["saved_to"])
    assert adapted.peft_config["default"].r == 4
    assert AutoTokenizer.from_pretrained(found["saved_to"]).chat_template


def test_a_run_goes_on_and_the_whole_model_is_saved(write, tmp_path, capsys):
    assert (
        run(["train", write(max_steps=2, packing=True, per_device_train_batch_size=1, lr_scheduler_type="constant")])
        == 0
    )
    assert (
        run(["train", write(max_steps=4, packing=True, per_device_train_batch_size=1, lr_scheduler_type="constant")])
        == 1
    )
    assert "has a checkpoint of step 2" in capsys.readouterr().err
    assert (
        run(
            [
                "train",
                write(max_steps=4, packing=True, per_device_train_batch_size=1, lr_scheduler_type="constant"),
                "--resume",
            ]
        )
        == 0
    )
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]
    assert "saved to" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").num_parameters() > 1000


def test_an_adapter_is_merged_before_it_is_saved_and_uploaded(write, tmp_path, monkeypatch):
    uploaded = []

    class Api:
        """The Hub's client."""

        def __init__(self, token):
            pass

        def create_repo(self, repo_id, **_):
            return types.SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, folder_path, repo_id, **_):
            uploaded.append((repo_id, {path.name for path in folder_path.iterdir()}))
            return types.SimpleNamespace(commit_url="https://hub/commit")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    recipe = write(lora={"r": 2}, merge=True, max_steps=1, push_to_hub=True, hub_model_id="me/model")
    assert run(["train", recipe]) == 0
    [(name, files)] = uploaded
    assert name == "me/model"
    assert {"model.safetensors", "tokenizer.json"} <= files
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "model" / "adapter_config.json").exists()


def test_data_sets_on_disk_are_read(write, tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    assert run(["train", write(train_data=str(tmp_path / "set"), max_steps=1, lora={"r": 2})]) == 0


PAIR = {
    "prompt": [{"role": "user", "content": "What is a list?"}],
    "chosen": [{"role": "assistant", "content": "A sequence."}],
    "rejected": [{"role": "assistant", "content": "A number, I think."}],
}


@pytest.fixture
def pairs(tmp_path):
    """A file of twelve pairs."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(PAIR) + "\n" for _ in range(12)))
    return str(path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of one layer with the demo's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    return str(save(tmp_path_factory.mktemp("tiny"), random_model(tiny_llama_config(**sizes, **ends)), tokenizer))


def test_preferences_are_learned_from_a_reference_that_is_computed_before(write, tiny, pairs, tmp_path, capsys):
    known = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 12, "eval_data": pairs, "eval_steps": 4}
    recipe = write(recipe="dpo", model=tiny, train_data=pairs, lora={"r": 4}, beta=0.3, **known)
    assert run(["train", recipe, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rewards/accuracies"] == 1
    assert found["eval_rewards/margins"] > 0
    assert "eval_perplexity" not in found
    losses = [line["loss"] for line in metrics(tmp_path) if "loss" in line]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5)
    assert losses[-1] < 0.5


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's
def test_a_reward_model_has_a_head_that_is_trained(write, tiny, pairs, tmp_path, capsys):
    """Of a language model: the new head is saved in full with the adapter, and prefers what it was shown."""
    import peft
    import torch
    from transformers import AutoModelForSequenceClassification

    fields = {"recipe": "reward", "model": tiny, "train_data": pairs, "lora": {"r": 2}}
    assert run(["train", write(**fields, max_steps=8), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == 1
    assert run(["train", write(**fields, max_steps=1, output_dir=str(tmp_path / "again"))]) == 0
    again = json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[0])
    assert again["loss"] == metrics(tmp_path)[0]["loss"]  # the seed draws the head
    plain = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, dtype=torch.float32)
    reward = peft.PeftModel.from_pretrained(plain, found["saved_to"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(found["saved_to"])
    plain.config.pad_token_id = tokenizer.pad_token_id
    values = []
    for side in ("chosen", "rejected"):
        text = tokenizer.apply_chat_template([*PAIR["prompt"], *PAIR[side]], return_tensors="pt", return_dict=True)
        values.append(reward(**text).logits.item())
    assert values[0] > values[1]


@pytest.mark.parametrize(
    ("fields", "metric"),
    [
        ({"recipe": "orpo"}, "log_odds_ratio"),
        ({"recipe": "kto", "max_steps": 1}, "kl"),
        ({"recipe": "distill", "teacher_model_name_or_path": "demo", "alpha": 0.5}, "divergence"),
        (
            {
                "recipe": "distill",
                "teacher_model_name_or_path": "demo",
                "lmbda": 1.0,
                "max_new_tokens": 4,
                "max_steps": 1,
            },
            "divergence",
        ),
    ],
)
def test_the_other_kinds_train(fields, metric, write, tiny, pairs, tmp_path, capsys):
    data = str(tmp_path / "rows.jsonl") if fields["recipe"] == "distill" else pairs
    assert run(["train", write(model=tiny, train_data=data, **{"max_steps": 3, **fields}), "--json"]) == 0
    assert metric in json.loads(capsys.readouterr().out)
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert losses[-1] < losses[0] or len(losses) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"recipe": "ppo"}, "recipe: 'ppo' is unknown"),
        ({"recipe": "dpo", "packing": True}, "the field 'packing', which recipe: dpo does not use"),
        ({"beta": 0.1}, "set recipe: dpo or orpo or kto or distill"),
        ({"recipe": "orpo", "precompute_ref_log_probs": True}, "set recipe: dpo"),
        ({"recipe": "dpo", "sync_ref_model": True}, "does not take sync_ref_model"),
        ({"recipe": "dpo", "beta": "low"}, "beta: Input should be a valid number"),
        ({"recipe": "dpo", "loss_type": "kto"}, "loss_type 'kto' is unknown"),
        ({"recipe": "dpo", "truncation_mode": "middle"}, "truncation_mode: Input should be 'keep_start'"),
        ({"recipe": "dpo", "precompute_ref_batch_size": 2}, "without precompute_ref_log_probs"),
        ({"recipe": "dpo", "dropout": True, "disable_dropout": True}, "One is the opposite"),
        ({"recipe": "kto", "per_device_train_batch_size": 1}, "KTO needs at least 2 rows"),
        ({"recipe": "distill"}, "has no teacher"),
        ({"recipe": "dpo"}, "Row 1 has no chosen, rejected"),
        ({"learning_rates": 1}, "has an unknown field 'learning_rates'"),
        ({"lora": {"rank": 4}}, "has an unknown field 'lora.rank'"),
        ({"optim": "ademamix_8bit"}, "hfax has AdamW and Lion with 8"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type: Input should be 'linear', 'cosine'"),
        ({"max_steps": "many"}, "max_steps: Input should be a valid integer"),
        ({"model": None}, "model: "),
        ({"train_data": "/nowhere/rows.jsonl"}, "No data found at"),
        ({"quantization": "int8"}, "set without lora"),
        ({"learning_rate": -1}, "too small"),
        ({"lora": {"r": 2, "target_modules": ["no_such"]}}, "matches no layer"),
        ({"per_device_train_batch_size": 100}, "has 12 rows, but a step needs 100"),
        ({"trainable": ["*.nothing"]}, "matches no weight"),
    ],
)
def test_what_is_wrong_is_said(fields, words, write, capsys):
    assert run(["train", write(**fields)]) == 1
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_changed_recipe_is_resumed_if_the_change_is_accepted(write, capsys):
    assert run(["train", write(max_steps=1)]) == 0
    changed = write(max_steps=2, seed=1)
    assert run(["train", changed, "--resume"]) == 1
    assert "--accept-change max_steps" in capsys.readouterr().err
    assert run(["train", changed, "--accept-change", "seed"]) == 1
    assert "without --resume" in capsys.readouterr().err
    assert run(["train", changed, "--resume", "--accept-change", "seed", "--accept-change", "max_steps"]) == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 13, is not valid JSON"),
        ("[1]", "line 13, is not an object"),
        ('{"a": 1}', "Row 13 has an unknown format"),
    ],
)
def test_a_bad_line_is_named(line, words, write, tmp_path, capsys):
    recipe = write()
    with (tmp_path / "rows.jsonl").open("a") as data:
        data.write(line + "\n")
    assert run(["train", recipe]) == 1
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert run(["train", str(tmp_path / "none.yaml")]) == 1
