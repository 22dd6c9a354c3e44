"""A GGUF file as a user has it: its tokenizer and chat template, in commands and pipelines, and the names that it is found by."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import transformers
from gguf import GGMLQuantizationType as Type
from gguf_files import write_demo_gguf

import hfax
from hfax.demo import demo_folder
from hfax.errors import CheckpointNotFoundError
from hfax.load.source import names_gguf, resolve_checkpoint

PROMPT = "Return a new"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_gguf(tmp_path_factory.mktemp("gguf") / "demo-BF16.gguf", Type.BF16)


def test_the_tokenizer_and_the_chat_template_are_the_models(file: Path) -> None:
    mine = transformers.AutoTokenizer.from_pretrained(resolve_checkpoint(file).folder)
    plain = transformers.AutoTokenizer.from_pretrained(demo_folder())
    for text in (PROMPT, "naïve  \n\tcafé 日本 <|end|>", "def f(x):\n    return x", ""):
        assert mine(text)["input_ids"] == plain(text)["input_ids"]
        assert mine.decode(mine(text)["input_ids"]) == plain.decode(plain(text)["input_ids"])
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    for more in ({}, {"add_generation_prompt": True}):
        assert mine.apply_chat_template(chat, **more) == plain.apply_chat_template(chat, **more)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(mine, name) == getattr(plain, name)


def test_commands_take_the_file_as_they_take_the_model(file: Path) -> None:
    """The same weights, so the same text, in one process for each command."""

    def said(*words: str) -> str:
        done = processes.run(["-m", "hfax", *words], text="", timeout_s=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    greedy = ("--temperature", "0", "--max-new-tokens", "12", "--dtype", "bfloat16")
    assert said("generate", str(file), PROMPT, *greedy) == said("generate", "demo", PROMPT, *greedy)
    assert "LlamaForCausalLM" in said("doctor", str(file))
    assert said("plan", str(file), "--machines", "v5e:1x1", "--no-compile")


def test_pipelines_take_the_file(file: Path) -> None:
    whole = hfax.pipeline("text-generation", str(file), max_new_tokens=8, do_sample=False)
    plain = hfax.pipeline("text-generation", "demo", max_new_tokens=8, do_sample=False)
    assert whole(PROMPT) == plain(PROMPT)


def test_a_folder_of_several_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointNotFoundError, match="2 GGUF files") as caught:
        resolve_checkpoint(tmp_path)
    assert "m-Q4_K_M, m-Q8_0" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_gguf"),
    [
        ("owner/repo:Q4_K_M", True),
        ("owner/repo/sub-Q4_K_M.gguf", True),
        ("./missing.gguf", True),
        ("owner/repo", False),
        ("demo", False),
        ("owner/repo/config.json", False),
    ],
)
def test_names_that_can_only_be_gguf(name: str, is_gguf: bool) -> None:
    assert names_gguf(name) is is_gguf


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="There is no file"):
        resolve_checkpoint(tmp_path / "missing.gguf")


def test_a_file_is_converted_for_other_libraries(tmp_path: Path) -> None:
    """To plain numbers, and with the codes that it has, each with a tokenizer."""
    file = write_demo_gguf(tmp_path / "demo.gguf", Type.Q4_0)
    for words in (["plain", "--dtype", "float32"], ["packed", "--to", "compressed-tensors"]):
        done = processes.run(["-m", "hfax", "convert", str(file), str(tmp_path / words[0]), *words[1:]])
        assert done.returncode == 0, done.stderr
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "packed")
    ids = tokenizer(PROMPT, return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False}
    expected = theirs.generate(**ids, **options)
    packed = hfax.AutoModelForTPU.from_pretrained(tmp_path / "packed", dtype="float32")
    assert packed.quantization == "int4"
    assert packed.generate(**ids, **options).tolist() == expected.tolist()
