"""Every Python block of the README and the docs is run, on small models where the page names large ones.

`test_commands.py` runs the command lines.

A page's blocks run in order and share their names, as in the session of somebody who reads it from top to bottom.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from code_blocks import CodeBlock, code_blocks, pages_of_docs
from registrations import registrations_taken_back

import hfax
from hfax.demo import demo_folder
from hfax.patches import registry

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *pages_of_docs(),
]
ELSEWHERE = {
    "docs/parallel.md": "tests/sharding/test_docs.py, on eight devices",
    "CONTRIBUTING.md": "parts of files, which its recipes tell where to put",
}
"""Pages whose Python is not run here."""
OF_OTHER_TESTS = {
    'backend="torch_xla"': "tests/torch_xla",
    "from openai import OpenAI": "tests/server/test_openai.py",
}
"""Words of blocks that need what this environment does not have, and the tests of the same calls."""


GUIDES: dict[str, dict[str, str]] = {
    "README.md": {'"Qwen/Qwen3-0.6B"': "demo", "max_new_tokens=40": "max_new_tokens=4"},
    "docs/index.md": {'"Qwen/Qwen3-0.6B"': "demo", "max_new_tokens=40": "max_new_tokens=4"},
    "docs/troubleshooting.md": {},
    "docs/guides/embeddings.md": {
        '"sentence-transformers/all-MiniLM-L6-v2"': "feature-extraction",
        '"distilbert/distilbert-base-uncased-finetuned-sst-2-english"': "text-classification",
    },
    "docs/guides/own-model.md": {},
    "docs/guides/patch.md": {},
    "docs/guides/exporting.md": {},
    "docs/guides/evaluating.md": {},
    "docs/guides/lora.md": {
        '"Qwen/Qwen3-0.6B"': "demo",
        "max_steps=200": "max_steps=2",
        "save_steps=100": "save_steps=1",
    },
    "docs/guides/images-and-speech.md": {
        '"Qwen/Qwen2-VL-2B-Instruct"': "image-text-to-text",
        '"google/vit-base-patch16-224"': "image-classification",
        '"openai/whisper-tiny"': "whisper",
        '"speech.flac"': "sound",
        "max_new_tokens=64": "max_new_tokens=4",
    },
}
"""By page: words, and the small checkpoint or the words that stand for them."""
FILE = re.compile(r"# ((?:modeling_\w+|rewards)\.py)\n")
"""The first line of a block that a reader saves as a module, and later blocks import."""


def test_every_page_is_run_here_or_elsewhere() -> None:
    with_python = {page for page in PAGES if code_blocks(page, "python")}
    assert with_python == {"docs/tour.md", "docs/serving.md", "docs/training.md", *GUIDES, *ELSEWHERE}


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_are_python(page: str) -> None:
    for block in code_blocks(page, "python"):
        text = block.text if not block.text.startswith(" ") else f"if True:\n{block.text}"
        ast.parse(text, f"{page}:{block.line}")


def _run(page: str, names: dict[str, Any], replaced: dict[str, str]) -> list[CodeBlock]:
    """Run a page's blocks, in the current folder; every word to replace must stand in some of them."""
    blocks = [b for b in code_blocks(page, "python") if not any(word in b.text for word in OF_OTHER_TESTS)]
    assert all(any(word in block.text for block in blocks) for word in replaced)
    for block in blocks:
        if file := FILE.match(block.text):
            Path(file[1]).write_text(block.text)
            continue
        block.run(names, {word: stand_in for word, stand_in in replaced.items() if word in block.text})
    return blocks


def test_the_tour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline_checkpoints: Any) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = pipeline_checkpoints
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
        "docs/tour.md",
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


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline_checkpoints: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    checkpoints, replaced = pipeline_checkpoints, {}
    for words, stand_in in GUIDES[page].items():
        if stand_in == "whisper":
            checkpoints.save_whisper(tmp_path / stand_in)
        elif stand_in in checkpoints.SAVE:
            checkpoints.SAVE[stand_in](tmp_path / stand_in)
        folder = demo_folder() if stand_in == "demo" else tmp_path / stand_in
        replaced[words] = repr(str(folder)) if folder.exists() else "sound.copy()" if stand_in == "sound" else stand_in
    image = np.zeros((30, 30, 3), np.uint8)
    patches = registry.fingerprint()
    with registrations_taken_back():
        assert _run(page, {"sound": checkpoints.sound(1.0), "image": PIL.Image.fromarray(image)}, replaced)
    for name in [name for name in sys.modules if FILE.match(f"# {name}.py\n")]:
        del sys.modules[name]
    assert registry.fingerprint() == patches, "a patch that the page registers changes the programs of other tests"


def test_the_page_on_serving(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(_run("docs/serving.md", {}, {})) == 1
    assert capsys.readouterr().out.strip()


def test_the_page_on_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # its rewards.py
    from transformers import AutoTokenizer

    from hfax import AutoModelForTPU, LoraConfig

    judge = AutoModelForTPU.from_pretrained("demo", task="text-classification", num_labels=1, strict=False)
    AutoTokenizer.from_pretrained(judge.folder).save_pretrained(tmp_path / "judge")
    judge.config.pad_token_id = 0
    judge.save_pretrained(tmp_path / "judge")

    other = AutoModelForTPU.from_pretrained("demo")
    other.add_adapter(LoraConfig(r=8, target_modules="all-linear"))
    other.save_adapter(tmp_path / "other")
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "0.jsonl").write_text('{"text": "Return a new list."}\n' * 100)
    names = {"ids": np.array([[5, 6, 7, 8]], np.int32)}
    _run(
        "docs/training.md",
        names,
        {
            "max_steps=20": "max_steps=2",
            "save_steps=10": "save_steps=1",
            '"adapter-folder-or-hub-id"': repr(str(tmp_path / "other")),
            '"reward/model"': repr(str(tmp_path / "judge")),
        },
    )
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert (tmp_path / "folder" / "adapter_config.json").is_file()


@pytest.mark.parametrize("page", ["docs/training.md", "docs/cli.md"])
def test_recipes_are_recipes(page: str, tmp_path: Path) -> None:
    from hfax.train.recipe import read_recipe

    for block in code_blocks(page, "yaml"):
        (tmp_path / "recipe.yaml").write_text(block.text)
        assert read_recipe(tmp_path / "recipe.yaml").training.max_steps == 500
