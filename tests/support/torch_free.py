"""Scripts in an interpreter of their own: in the processes that tests share, torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hfax

WITHOUT_TORCH = """
import json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "torchax"):
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Blocked())
"""
"""The beginning of a script that can import neither torch nor transformers."""


GENERATE = (
    WITHOUT_TORCH
    + """
from hfax import AutoModelForTPU
folders, calls = json.loads(sys.stdin.read())
found = {}
for name, folder in folders.items():
    model = AutoModelForTPU.from_pretrained(folder)
    found[name] = {call: model.generate(**options).tolist() for call, options in calls[name].items()}
print(json.dumps(found))
"""
)
"""Tokens by model and call, for a JSON list of folders by model and calls by model."""


def run_script(script: str, *arguments: str, text: str = "", **variables: str) -> str:
    """What a script prints, given a text on stdin; warnings are errors."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hfax.__file__).parents[1]), **variables}
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    done = subprocess.run(
        command, input=text, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
