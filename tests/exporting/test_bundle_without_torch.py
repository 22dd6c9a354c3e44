"""A bundle for one device runs where torch and transformers are not installed, and says what it cannot do there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import transformers

import hfax
from hfax import AutoModelForTPU

_WITHOUT = """
import importlib.metadata, sys

missing = ("torch", "transformers", "torchax", "orbax")

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

def version(name, installed=importlib.metadata.version):
    if name in missing:
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

sys.meta_path.insert(0, NotInstalled())
importlib.metadata.version = version
"""
_GENERATE = """
import json
from hfax import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.argv[1])
found = [model.generate(ids, max_new_tokens=9, do_sample=False).tolist() for ids in ([[5, 6, 7]], [[8] * 30])]
try:
    model.generate([[5, 6, 7]], max_new_tokens=9, num_beams=2)
except Exception as error:
    found.append(f"{type(error).__name__}: {error.what}")
print(json.dumps(found))
"""
_COMMAND = """
from hfax.cli.app import main
main()
"""


def _run(script: str, *arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        **{"HFAX_HOME": str(home), "HFAX_PROGRAM_CACHE": "0", "PYTHONPATH": str(Path(hfax.__file__).parents[1])},
    }
    command = [sys.executable, "-c", _WITHOUT + script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


_MIXTURE = transformers.Qwen3MoeConfig(
    **tiny_models.SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
)


@pytest.mark.parametrize("kind", ["demo", "int8", "experts"])
def test_tokens_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    """Experts are merged when a checkpoint is loaded; the bundle has them as the model has them."""
    if kind == "experts":
        folder = tiny_models.save(tmp_path / "mixture", tiny_models.random_model(_MIXTURE))
        model = AutoModelForTPU.from_pretrained(folder)
    else:
        model = AutoModelForTPU.from_pretrained("demo", quantization=None if kind == "demo" else kind)
    options = {"max_new_tokens": 9, "do_sample": False}
    hfax.export(model, tmp_path / "bundle", prompt_lengths=[32], **options)
    copy = Path(shutil.copytree(tmp_path / "bundle", tmp_path / "elsewhere" / "bundle"))
    done = _run(_GENERATE, copy, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    *tokens, error = json.loads(done.stdout)
    assert tokens == [np.asarray(model.generate(ids, **options)).tolist() for ids in ([[5, 6, 7]], [[8] * 30])]
    assert error == "BackendNotAvailableError: This needs the model's own code, beyond the stored programs."
    again = AutoModelForTPU.from_pretrained(copy)  # with torch, and without the bundle's programs
    assert np.asarray(again.generate([[5, 6, 7]], **options)).tolist() == tokens[0]
    (copy / "bundle.json").unlink()
    alone = AutoModelForTPU.from_pretrained(copy)
    assert np.asarray(alone.generate([[5, 6, 7]], **options)).tolist() == tokens[0]


_SERVE = """
import json
from hfax import SamplingParams
from hfax.checkpoint import open_checkpoint
from hfax.cli.serve import EngineOptions
from hfax.server.loading import load_checkpoint
loaded = load_checkpoint(open_checkpoint(sys.argv[1]), EngineOptions(max_model_len=64, max_num_seqs=2).config(),
                         chat_template=None, on_step=lambda seconds, tokens: None)
with loaded.engine as engine:
    outputs = engine.generate(["Return a", "class"], SamplingParams(max_tokens=8, temperature=0.0))
print(json.dumps([output.outputs[0].text for output in outputs]))
"""


@pytest.mark.parametrize("kind", ["pages", "slots"])
def test_a_server_has_all_of_its_programs(kind: str, tmp_path: Path) -> None:
    if kind == "pages":
        model = AutoModelForTPU.from_pretrained("demo")
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(Path(hfax.__file__).parent / "demo")
        config = transformers.MambaConfig(
            vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, pad_token_id=0
        )
        model = AutoModelForTPU.from_pretrained(
            tiny_models.save(tmp_path / "mamba", tiny_models.random_model(config), tokenizer)
        )
    config = hfax.EngineConfig(max_model_len=64, max_num_seqs=2)
    bundle = hfax.export(model, tmp_path / "bundle", prompt_lengths=[16], max_new_tokens=8, engine=config)
    assert len(bundle.programs) == len(list((tmp_path / "bundle/programs").glob("*.program"))) > 4
    done = _run(_SERVE, tmp_path / "bundle", home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.folder)
    with hfax.Engine(model, tokenizer, config) as engine:
        outputs = engine.generate(["Return a", "class"], hfax.SamplingParams(max_tokens=8, temperature=0.0))
    assert json.loads(done.stdout) == [output.outputs[0].text for output in outputs]


def test_an_engine_for_a_topology_is_refused(tmp_path: Path) -> None:
    model = AutoModelForTPU.from_pretrained("demo")
    with pytest.raises(hfax.UnsupportedOptionError, match="an engine's programs for a topology"):
        hfax.export(model, tmp_path / "bundle", topology="v5e:1x1", engine=hfax.EngineConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-num-seqs", "3"], "Options of the engine need --for-server"),
        (["--for-server", "--format", "stablehlo"], "--for-server cannot be combined"),
    ],
)
def test_options_of_servers_are_refused_where_they_have_no_effect(
    options: list[str], message: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hfax.cli", "export", "demo", "--out", str(tmp_path / "bundle"), *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, message in done.stderr) == (1, True)


def test_commands(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    hfax.export(AutoModelForTPU.from_pretrained("demo"), bundle, prompt_lengths=[16], max_new_tokens=20)
    call = ("Return a", "--max-new-tokens", "12", "--seed", "3", "--json")
    done = _run(_COMMAND, "generate", bundle, *call, home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    with_torch = subprocess.run(
        [sys.executable, "-m", "hfax.cli", "generate", "demo", *call], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["text"] == json.loads(with_torch.stdout)["text"] != ""
    refused = _run(_COMMAND, "generate", "demo", "Return a", home=tmp_path / "home")
    assert refused.returncode == 1
    assert refused.stderr.startswith("Error: This needs transformers, which is not installed.")
    assert "Traceback" not in refused.stderr
