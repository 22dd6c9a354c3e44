"""Engines of all layouts of caches start from stored programs, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import transformers
from torch_free import WITHOUT_TORCH, run_script

from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams
from hfax.synthetic.shrink import shrink_config

_PROMPTS = [[5, 9, 17, 33, 60], [7, 8]]
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "pages": (tiny_models.tiny_llama_config(), {}),
    "pages of float8": (tiny_models.tiny_llama_config(), {"kv_cache_dtype": "fp8"}),
    "slots": (transformers.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, pad_token_id=0), {}),
    "positions of several axes": (shrink_config(transformers.Qwen2_5_VLConfig()), {}),
    "positions and states": (shrink_config(transformers.Qwen3_5Config()), {}),
}
_SCRIPT = (
    WITHOUT_TORCH
    + """
from hfax import AutoModelForTPU, Engine, EngineConfig, SamplingParams
found = {}
engines, prompts = json.loads(sys.stdin.read())
for name, (folder, options) in engines.items():
    with Engine(AutoModelForTPU.from_pretrained(folder), config=EngineConfig(**options)) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=5, temperature=0))
    found[name] = [list(output.outputs[0].token_ids) for output in outputs]
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("checkpoints"), {}
    for name, (config, _) in _CONFIGS.items():
        auto = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else None
        found[name] = tiny_models.save(root / name, tiny_models.random_model(config, auto=auto))
    return found


def _options(name: str) -> dict[str, Any]:
    return {"max_num_seqs": 2, "max_model_len": 32, **_CONFIGS[name][1]}


@pytest.fixture(scope="module")
def results(folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What engines write here, with torch."""
    found: dict[str, list[list[int]]] = {}
    for name, folder in folders.items():
        with Engine(AutoModelForTPU.from_pretrained(folder), config=EngineConfig(**_options(name))) as engine:
            outputs = engine.generate(_PROMPTS, SamplingParams(max_tokens=5, temperature=0))
        found[name] = [list(output.outputs[0].token_ids) for output in outputs]
    return found


@pytest.fixture(scope="module")
def stored_results(folders: dict[str, Path], results: Any) -> dict[str, list[list[int]]]:
    engines = {name: [str(folder), _options(name)] for name, folder in folders.items()}
    return json.loads(run_script(_SCRIPT, text=json.dumps([engines, _PROMPTS])))


@pytest.mark.parametrize("name", _CONFIGS)
def test_an_engine_writes_the_same_tokens_without_torch(name: str, results: Any, stored_results: Any) -> None:
    assert stored_results[name] == results[name]
