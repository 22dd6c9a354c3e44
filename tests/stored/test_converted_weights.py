"""Weights that are put together, cast or quantized while they are loaded are the same from a record, without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import transformers
import weight_digests
from torch_free import WITHOUT_TORCH, run_script
from weight_digests import digests

import hfax
from hfax import AutoModelForTPU

_IDS = [[5, 9, 17, 33, 60]]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_CONFIGS: dict[str, Any] = {
    "llama": tiny_models.tiny_llama_config(hidden_size=128, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(**tiny_models.SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **{**tiny_models.SIZES, "hidden_size": 128}, **_EXPERTS, head_dim=32, num_experts=4
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **{**tiny_models.SIZES, "num_key_value_heads": 4}, **_EXPERTS, n_routed_experts=4, n_group=2, topk_group=1,
        kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
    ),
    "gpt_oss": transformers.GptOssConfig(
        **{**tiny_models.SIZES, "hidden_size": 160, "intermediate_size": 96}, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2,
    ),
}  # fmt: skip
_LOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts with names of their own": ("mixtral", {}),
    "experts": ("qwen3_moe", {}),
    "experts in some layers": ("deepseek_v3", {}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "float16": ("llama", {"dtype": "float16"}),
    "int8": ("llama", {"quantization": "int8"}),
    "int4": ("llama", {"quantization": "int4"}),
    "experts, bfloat16 and int4": ("qwen3_moe", {"dtype": "bfloat16", "quantization": "int4"}),
    "transposed experts, int4": ("gpt_oss", {"quantization": "int4"}),
}
_SCRIPT = (
    WITHOUT_TORCH
    + """
from hfax import AutoModelForTPU
from weight_digests import digests
found = {}
for name, (folder, options) in json.loads(sys.stdin.read()).items():
    model = AutoModelForTPU.from_pretrained(folder, **options)
    found[name] = [digests(model.params), model.generate([[5, 9, 17, 33, 60]], max_new_tokens=6).tolist()]
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: tiny_models.save(root / name, tiny_models.random_model(config)) for name, config in _CONFIGS.items()}


@pytest.fixture(scope="module")
def results(folders: dict[str, Path]) -> dict[str, list[Any]]:
    """The weights and tokens of the models that are loaded here, with torch."""
    found: dict[str, list[Any]] = {}
    for name, (model, options) in _LOADS.items():
        loaded = AutoModelForTPU.from_pretrained(folders[model], **options)
        found[name] = [digests(loaded.params), np.asarray(loaded.generate(_IDS, max_new_tokens=6)).tolist()]
    return found


@pytest.fixture(scope="module")
def stored_results(folders: dict[str, Path], results: dict[str, list[Any]]) -> dict[str, list[Any]]:
    loads = {name: [str(folders[model]), options] for name, (model, options) in _LOADS.items()}
    folders_of_code = [Path(hfax.__file__).parents[1], Path(weight_digests.__file__).parent]
    path = os.pathsep.join(str(folder) for folder in folders_of_code)
    return json.loads(run_script(_SCRIPT, text=json.dumps(loads), PYTHONPATH=path))


@pytest.mark.parametrize("name", _LOADS)
def test_every_weight_and_token_is_the_same(name: str, results: Any, stored_results: Any) -> None:
    assert stored_results[name] == results[name]


def test_each_load_has_weights_of_its_own(results: dict[str, list[Any]]) -> None:
    of_llama = [set(results[name][0].values()) for name, (model, _) in _LOADS.items() if model == "llama"]
    assert len(set.intersection(*of_llama)) == 0


def test_a_checkpoint_packed_by_another_library_is_not_recorded(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed = tmp_path / "packed"
    AutoModelForTPU.from_pretrained(folders["llama"], quantization="int4").save_pretrained(
        packed, format="compressed-tensors"
    )
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    caplog.set_level("INFO", "hfax.stored")
    AutoModelForTPU.from_pretrained(packed)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "its weights are converted when they are loaded"
    ]
