"""Commands start without torch and transformers after `hfax warm`, or after a first run, and write what they wrote with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hfax

_WATCHED = """
import sys
from hfax.cli.app import main
try:
    main()
finally:
    print("imported:", *sorted({"torch", "transformers", "jax"} & set(sys.modules)), file=sys.stderr)
"""


def _run(home: Path, *arguments: str, text: str = "", **variables: str) -> tuple[str, set[str]]:
    """What a command writes to stdout, and which of the large packages it imported."""
    environment = {**os.environ, "HFAX_HOME": str(home), "PYTHONPATH": str(Path(hfax.__file__).parents[1])}
    environment |= variables
    command = [sys.executable, "-c", _WATCHED, *arguments]
    done = subprocess.run(
        command, input=text, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.strip().splitlines()[-1].split()[1:])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def test_generate_after_warm(home: Path) -> None:
    """Not for another set of options, which is made with torch, and then stored, too."""
    _run(home, "warm", "demo", "--prompt-lengths", "16", "--max-new-tokens", "24", "--temperature", "0")
    call = ("generate", "demo", "Return a", "--max-new-tokens", "20", "--temperature", "0", "--json")
    out, imported = _run(home, *call)
    assert imported == {"jax"}
    sampled = (
        "generate",
        "demo",
        "Return a",
        "--max-new-tokens",
        "20",
        "--temperature",
        "0.9",
        "--seed",
        "5",
        "--json",
    )
    first, second = _run(home, *sampled), _run(home, *sampled)
    assert (first[1], second[1]) == ({"jax", "torch", "transformers"}, {"jax"})
    texts = [json.loads(text)["text"] for text in (out, first[0], second[0])]
    assert texts[0] != texts[1] == texts[2]
    assert _run(home, "generate", "demo", "Return a", "--stop", " list", *call[3:])[1] == {
        "jax"
    }  # the host looks for it


def test_chat_in_turns(home: Path) -> None:
    """The second turn continues the first one's cache."""
    talk = "Hello\nWhat is a list?\n"
    first, second = (_run(home, "chat", "demo", "--seed", "1", text=talk) for _ in range(2))
    assert (first[1], second[1]) == ({"jax", "torch", "transformers"}, {"jax"})
    assert first[0] == second[0] != ""


_SERVE = """
import json, sys
from hfax import SamplingParams
from hfax.cli.serve import EngineOptions
from hfax.checkpoint import open_checkpoint
from hfax.server.loading import load_checkpoint
loaded = load_checkpoint(open_checkpoint("demo"), EngineOptions(max_model_len=128, max_num_seqs=2).config(),
                         chat_template=None, on_step=lambda seconds, tokens: None)
params = SamplingParams(max_tokens=8, temperature=0.0)
with loaded.engine as engine:
    outputs = engine.generate(["Return a", "class"], params)
print(json.dumps([[o.outputs[0].text for o in outputs], loaded.defaults, sorted({"torch", "transformers"} & set(sys.modules))]))
"""


def test_an_engine_with_its_server(home: Path) -> None:
    environment = {**os.environ, "HFAX_HOME": str(home), "PYTHONPATH": str(Path(hfax.__file__).parents[1])}
    found: list[Any] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _SERVE], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    (texts, defaults, imported), (stored_texts, stored_defaults, still_imported) = found
    assert (stored_texts, stored_defaults) == (texts, defaults)
    assert (imported, still_imported) == (["torch", "transformers"], [])
    assert len(set(texts)) == 2


def test_generate_on_another_machine_with_shared_programs(tmp_path: Path) -> None:
    """It imports neither torch nor transformers the first time it runs there."""
    options = ("--prompt-lengths", "16", "--max-new-tokens", "24", "--temperature", "0", "--json")
    out, _ = _run(tmp_path / "one", "warm", "demo", *options, "--share", str(tmp_path / "shared"))
    variable = {"HFAX_PROGRAMS": json.loads(out)["shared"]}
    call = ("generate", "demo", "Return a", "--max-new-tokens", "20", "--temperature", "0", "--json")
    first, imported = _run(tmp_path / "other", *call, **variable)
    assert imported == {"jax"}
    again, imported = _run(tmp_path / "other", *call)
    assert imported == {"jax"}
    assert json.loads(first)["text"] == json.loads(again)["text"]
