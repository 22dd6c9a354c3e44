"""The checkpoints and files that documented commands name, small, in a folder where they are run."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from code_blocks import ROOT, code_blocks
from gguf_files import write_demo_gguf
from tiny_models import random_model, save

from hfax.demo import demo_folder

FLAX = ROOT / "tests" / "load" / "flax" / "llama"
PAIR = {"prompt": "A list is", "chosen": " a sequence.", "rejected": " a number."}
VERDICT = {"prompt": "A list is", "completion": " a sequence.", "label": True}
CHAT = {
    "messages": [{"role": "user", "content": "What does len return?"}, {"role": "assistant", "content": "A number."}]
}
SMALLER = {"max_steps: 500": "max_steps: 2", "per_device_train_batch_size: 8": "per_device_train_batch_size: 2"}
"""Numbers of the recipes in docs/training.md, and what stands for them; the first recipe has all of them."""
OF_TEACHER = {"teacher_model_name_or_path: Qwen/Qwen3-8B": "teacher_model_name_or_path: qwen3"}
TASK = """
task: my_task
dataset_path: json
dataset_kwargs: {data_files: chats.jsonl}
test_split: train
output_type: generate_until
doc_to_text: "Return a new"
doc_to_target: " list"
generation_kwargs: {until: ["."], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def load_pipeline_checkpoints() -> Any:
    """The makers of small checkpoints that the tests of pipelines have."""
    path = ROOT / "tests" / "pipelines" / "checkpoints.py"
    spec = importlib.util.spec_from_file_location("pipeline_checkpoints", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pipeline_checkpoints() -> Any:
    return load_pipeline_checkpoints()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, pipeline_checkpoints: Any) -> dict[str, Path]:
    """By the names that commands get here: folders of models, each of the kind that they want.

    The demo model's context is 512 tokens; those that stand for Qwen3 have the 40,960 of the real ones and the demo's tokenizer.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_folder())
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 40_960,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    qwen3 = save(folder / "qwen3", random_model(transformers.Qwen3Config(**sizes)), tokenizer)
    save(folder / "qwen3-moe", random_model(transformers.Qwen3MoeConfig(**sizes, **experts)), tokenizer)
    pipeline_checkpoints.SAVE["text-classification"](folder / "classifier")
    pipeline_checkpoints.SAVE["feature-extraction"](folder / "encoder")
    return {
        **dict.fromkeys(["qwen3", "my-checkpoint", "my-model", "folder", "shape"], qwen3),
        **{name: folder / name for name in ("qwen3-moe", "encoder")},
        **{"my-classifier": folder / "classifier", "flax-model": FLAX},
    }


@pytest.fixture
def workplace(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the docs' commands read, which is the current one. They may write to it: all are copies."""
    monkeypatch.chdir(tmp_path)
    for name, folder in checkpoints.items():
        shutil.copytree(folder, tmp_path / name)
    shutil.copy(checkpoints["qwen3"] / "config.json", tmp_path)
    recipes = {block.text.split()[1]: block.text for block in code_blocks("docs/training.md", "yaml")}
    assert all(words in recipes["sft.yaml"] for words in SMALLER)
    assert all(words in recipes["distill.yaml"] for words in OF_TEACHER)
    for words, stand_in in {**SMALLER, **OF_TEACHER}.items():
        recipes = {name: text.replace(words, stand_in) for name, text in recipes.items()}
    files = {
        **recipes,
        "preferences.jsonl": (json.dumps(PAIR) + "\n") * 4,
        "verdicts.jsonl": (json.dumps(VERDICT) + "\n") * 4,
        "chats.jsonl": (json.dumps(CHAT) + "\n") * 4,
        "documents/0.jsonl": '{"text": "Return a new list."}\n' * 8,
        "held_out.jsonl": json.dumps(CHAT) + "\n",
        "README.md": re.sub(r"(?s)\A(.{4000}).*", r"\1", (ROOT / "README.md").read_text()),
        "wiki.txt": "The value of the list is a new list. " * 200,
        "prompts.jsonl": (json.dumps({"prompt": "Return a new"}) + "\n") * 8,
        "rewards.py": next(
            b.text for b in code_blocks("docs/training.md", "python") if b.text.startswith("# rewards.py")
        ),
        "prompts.txt": "Return a new\nRaise an error\n",
        "prompt.txt": "Return a new",
        "review.txt": "the quick brown fox",
        "server.yaml": "max-model-len: 128\n",
        "my_task.yaml": TASK,
        "script.py": "import jax\nprint(f'process {jax.process_index()} of {jax.process_count()}\\n', end='')\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    write_demo_gguf(tmp_path / "model.gguf")
    return tmp_path
