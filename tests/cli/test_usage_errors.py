"""Mistakes on the command line are found before a framework is imported, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from command_line import process_environment

from hfax.cli.model_options import Quantization
from hfax.cli.option_types import AXES
from hfax.load import quantize
from hfax.sharding.mesh import GIVEN_AXES

WITHOUT_FRAMEWORKS = """
import sys
for name in ("torch", "jax", "transformers", "torchax"):
    sys.modules[name] = None
from hfax.cli.app import main
main()
"""


def test_values_that_are_written_twice_agree() -> None:
    assert AXES == GIVEN_AXES
    assert tuple(Quantization) == get_args(quantize.Quantization)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--help", "Usage"),
        ("generat demo", "No such command"),
        ("generate", "Missing argument"),
        ("generate --help", "--max-new-tokens"),
        ("generate demo hi --max-new-tokens x", "integer"),
        ("generate demo hi --quantization int3", "int3"),
        ("generate demo hi --parallelism nonsense=2", "not a valid mesh"),
        ("generate demo hi --kv-cache-dtype int4", "int4 is not a dtype"),
        ("serve demo --kv-cache-dtype int4", "int4 is not a dtype"),
        ("plan demo --kv-cache-dtype int4", "int4 is not a dtype"),
        ("generate ./nothing hi", "There is no folder"),
        ("chat demo --history none.json", "could not be read"),
        ("chat ./nothing", "There is no folder"),
        ("classify ./nothing hi --labels a,b", "There is no folder"),
        ("serve ./nothing", "There is no folder"),
        ("serve demo --max-model-len 0", "max-model-len"),
        ("plan ./nothing --machines v5e:1x1", "There is no folder"),
        ("plan ./none.json", "There is no file"),
        ("plan demo --machines v9:2x2", "Unknown chip"),
        ("plan demo --machines v5e:2", "device count"),
        ("plan demo --batch x", "positive numbers"),
        ("plan demo --mesh tensor", "not a valid mesh"),
        ("doctor ./nothing", "There is no folder"),
        ("train none.yaml", "could not be read"),
        ("bench demo --contexts x", "positive numbers"),
        ("verify ./nothing", "There is no folder"),
        ("perplexity demo none.txt", "could not be read"),
        ("export ./nothing --out x", "There is no folder"),
        ("convert ./nothing x --to flax", "There is no folder"),
        ("warm demo --max-model-len 64", "needs --for-server"),
        ("warm demo --for-server --top-k 5", "does not go with --for-server"),
        ("warm ./nothing", "There is no folder"),
        ("lm-eval", "needs a model and tasks"),
        ("launch --local 2 none.py", "Script not found"),
    ],
)
def test_a_mistake_is_found_without_a_framework(line: str, words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_FRAMEWORKS, *line.split()]
    environment = process_environment(COLUMNS="200")
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert words in done.stdout + done.stderr
    assert (done.returncode == 0) == ("--help" in line)
    assert "Traceback" not in done.stderr


def test_a_benchmark_without_the_models_code_says_what_is_missing(hfax_here, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in a JSONDecodeError of the process that was to be measured."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = hfax_here("bench", "demo")
    assert done.code == 1
    assert "needs torch, which is not installed" in done.err
    assert "hfax[cpu]" in done.err
