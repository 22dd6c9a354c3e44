"""`hfax train`: a file, data on disk, and a model or an adapter in a folder."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfax.cli.app import run

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
    from hfax.demo import demo_folder

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


def test_an_adapter_is_merged_before_it_is_saved(write, tmp_path):
    assert run(["train", write(lora={"r": 2}, merge=True, max_steps=1)]) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / "model" / "adapter_config.json").exists()


def test_data_sets_on_disk_are_read(write, tmp_path):
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    assert run(["train", write(train_data=str(tmp_path / "set"), max_steps=1, lora={"r": 2})]) == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"learning_rates": 1}, "has an unknown field 'learning_rates'"),
        ({"lora": {"rank": 4}}, "has an unknown field 'lora.rank'"),
        ({"optim": "adamw_torch"}, "TrainingArguments() does not take optim. Why: The optimizer is an object of optax"),
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
