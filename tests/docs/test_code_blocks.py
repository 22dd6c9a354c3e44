"""Every code block of the README and the docs: Python is run, on small models where the page names large ones; commands are parsed.

A page's blocks run in order and share their names, as in the session of somebody who reads it from top to bottom.
"""

from __future__ import annotations

import ast
import importlib.util
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.main
from code_blocks import ROOT, CodeBlock, code_blocks, commands

import hfax
from hfax.cli.app import app
from hfax.demo import demo_folder

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
ELSEWHERE = {
    "docs/parallel.md": "tests/sharding/test_docs.py, on eight devices",
    "CONTRIBUTING.md": "parts of files, which its recipes tell where to put",
    "docs/api.md": "signatures; its examples are those of docstrings",
}
"""Pages whose Python is not run here."""
OF_OTHER_TESTS = {
    'backend="torch_xla"': "tests/torch_xla",
    "from openai import OpenAI": "tests/server/test_openai.py",
}
"""Words of blocks that need what this environment does not have, and the tests of the same calls."""


def _pipelines() -> Any:
    """The makers of small checkpoints that the tests of pipelines have."""
    path = Path(__file__).parents[1] / "pipelines" / "checkpoints.py"
    spec = importlib.util.spec_from_file_location("pipeline_checkpoints", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_run_here_or_elsewhere() -> None:
    with_python = {page for page in PAGES if code_blocks(page, "python")}
    assert with_python == {"README.md", "docs/serving.md", "docs/training.md", *ELSEWHERE}


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_are_python(page: str) -> None:
    if page == "docs/api.md":  # signatures, without bodies
        return
    for block in code_blocks(page, "python"):
        text = block.text if not block.text.startswith(" ") else f"if True:\n{block.text}"
        ast.parse(text, f"{page}:{block.line}")


def _run(page: str, names: dict[str, Any], replaced: dict[str, str]) -> list[CodeBlock]:
    """Run a page's blocks; every word to replace must stand in some of them."""
    blocks = [b for b in code_blocks(page, "python") if not any(word in b.text for word in OF_OTHER_TESTS)]
    assert all(any(word in block.text for block in blocks) for word in replaced)
    for block in blocks:
        block.run(names, {word: stand_in for word, stand_in in replaced.items() if word in block.text})
    return blocks


def test_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = _pipelines()
    folders = {name: tmp_path / name for name in ("classifier", "whisper", "llava")}
    checkpoints.SAVE["text-classification"](folders["classifier"])
    checkpoints.save_whisper(folders["whisper"])
    checkpoints.SAVE["image-text-to-text"](folders["llava"])
    sound = checkpoints.sound(1.0)
    names = {
        "smaller": hfax.AutoModelForTPU.from_pretrained("demo"),
        "texts": ["Return a new", "Raise"],
        "rows": [{"input_ids": [5, 6, 7, 8]}] * 8,
        "sound": sound,
    }
    blocks = _run(
        "README.md",
        names,
        {
            '"Qwen/Qwen3-0.6B"': repr(str(demo_folder())),
            "max_new_tokens=128": "max_new_tokens=8",
            "prompt_lengths=(64, 256)": "prompt_lengths=(16,)",
            "max_new_tokens=64": "max_new_tokens=4",
            "max_steps=500": "max_steps=1",
            '"distilbert/distilbert-base-uncased-finetuned-sst-2-english"': repr(str(folders["classifier"])),
            '"openai/whisper-tiny"': repr(str(folders["whisper"])),
            '"speech.flac"': "sound.copy()",
            '"Qwen/Qwen2-VL-2B-Instruct"': repr(str(folders["llava"])),
        },
    )
    assert len(blocks) >= 6
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert float(names["value"]) > 0


def test_the_page_on_serving(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(_run("docs/serving.md", {}, {})) == 1
    assert capsys.readouterr().out.strip()


def test_the_page_on_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    from hfax import AutoModelForTPU, LoraConfig

    other = AutoModelForTPU.from_pretrained("demo")
    other.add_adapter(LoraConfig(r=8, target_modules="all-linear"))
    other.save_adapter(tmp_path / "other")
    names = {"ids": np.array([[5, 6, 7, 8]], np.int32)}
    _run(
        "docs/training.md",
        names,
        {
            "max_steps=20": "max_steps=2",
            "save_steps=10": "save_steps=1",
            '"adapter-folder-or-hub-id"': repr(str(tmp_path / "other")),
        },
    )
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "folder" / "adapter_config.json").is_file()


def test_the_recipe_of_the_page_on_training_is_one(tmp_path: Path) -> None:
    from hfax.train.recipe import read_recipe

    (recipe,) = code_blocks("docs/training.md", "yaml")
    (tmp_path / "sft.yaml").write_text(recipe.text)
    assert read_recipe(tmp_path / "sft.yaml").training.per_device_train_batch_size == 8


COMMANDS = [(page, line, command) for page in PAGES for line, command in commands(page)]


def _parse(command: str) -> None:
    """Parse as far as the verb's own function, with the types of all values."""
    _, *words = shlex.split(command)
    if " ".join(words[:2]) in ("bench serve", "bench attack"):  # one verb
        words[:2] = [" ".join(words[:2])]
    verbs: Any = typer.main.get_command(app)
    verb = words.pop(0)
    assert verb in verbs.commands, f"no verb {verb!r}"
    verbs.commands[verb].make_context(verb, words)


@pytest.mark.parametrize(("page", "line", "command"), COMMANDS, ids=lambda value: str(value))
def test_a_command_exists_with_its_options(
    page: str, line: int, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.yaml").write_text("port: 8000\n")
    _parse(command)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("hfax generat demo Hi", "no verb 'generat'"),
        ("hfax generate demo Hi --max-tokens 3", "No such option"),
        ("hfax generate demo Hi --seed x", "valid int"),
    ],
)
def test_parsing_finds_what_is_not_there(command: str, why: str) -> None:
    with pytest.raises(Exception, match=why):
        _parse(command)
