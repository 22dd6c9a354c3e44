"""A checkpoint that was loaded before starts from stored programs: without torch and transformers, with the same results."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import transformers
from torch_free import GENERATE, run_script

from hfax import AutoModelForTPU
from hfax.stored import records
from hfax.stored.records import beside

_IDS = [[5, 9, 17, 33, 60]]
_PADDED = {"inputs": [[0, 0, 5, 9, 17], [7, 8, 9, 10, 11]], "attention_mask": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]}
_SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}
_CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"inputs": _IDS, "max_new_tokens": 6},
    "greedy, a longer text": {"inputs": [[*_IDS[0], 44, 45]], "max_new_tokens": 9},
    "ended by tokens of its own": {"inputs": _IDS, "max_new_tokens": 12, "eos_token_id": [3, 64]},
    "sampled": {"inputs": _IDS, "max_new_tokens": 6, **_SAMPLED},
    "sampled by another temperature and seed": {
        **{"inputs": _IDS, "max_new_tokens": 6, **_SAMPLED},
        **{"temperature": 1.3, "seed": 4},
    },
}
_SIZES = tiny_models.SIZES


def _config(name: str, **more: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**{**_SIZES, "head_dim": 16, **more})


_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_models.tiny_llama_config(),
    "tied": lambda: _config("Qwen3", tie_word_embeddings=True),
    "windows": lambda: _config("Gemma2", sliding_window=8, query_pre_attn_scalar=16, tie_word_embeddings=False),
    "positions": lambda: transformers.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    "states": lambda: transformers.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, pad_token_id=0),
}

_QUANTIZED = ("int8", "int4")
"""Saved by hfax from the Llama."""


def _calls_of(name: str) -> dict[str, dict[str, Any]]:
    return _CALLS if name in ("positions", "states") else {**_CALLS, "padded": {**_PADDED, "max_new_tokens": 6}}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    plain = {name: tiny_models.save(root / name, tiny_models.random_model(make())) for name, make in _CONFIGS.items()}
    return plain | {name: root / name for name in _QUANTIZED}


@pytest.fixture(scope="module")
def results(checkpoints: dict[str, Path]) -> dict[str, dict[str, list[list[int]]]]:
    """What the models give that are loaded here, with torch."""
    found: dict[str, dict[str, list[list[int]]]] = {}
    for name, folder in checkpoints.items():
        if name in _QUANTIZED:
            AutoModelForTPU.from_pretrained(checkpoints["llama"], quantization=name).save_pretrained(folder)
        model = AutoModelForTPU.from_pretrained(folder)
        found[name] = {c: np.asarray(model.generate(**o)).tolist() for c, o in _calls_of(name).items()}
    return found


@pytest.fixture(scope="module")
def stored_results(checkpoints: dict[str, Path], results: Any) -> dict[str, dict[str, list[list[int]]]]:
    """What they give in a process in which neither torch nor transformers can be imported."""
    folders = {name: str(folder) for name, folder in checkpoints.items()}
    return json.loads(run_script(GENERATE, text=json.dumps([folders, {name: _calls_of(name) for name in folders}])))


@pytest.mark.parametrize("name", [*_CONFIGS, *_QUANTIZED])
def test_stored_programs_give_the_same_tokens_without_torch(name: str, results: Any, stored_results: Any) -> None:
    assert stored_results[name] == results[name]
    assert len({json.dumps(ids) for ids in results[name].values()}) == len(results[name])


_BECOMES = """
import json, sys
from hfax import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.stdin.read())
ids = [[5, 9, 17, 33, 60]]
found = {"starts without torch": "torch" not in sys.modules, "own type": type(model).__name__}
found["greedy"] = model.generate(ids, max_new_tokens=6).tolist()
found["still without torch"] = "torch" not in sys.modules
import hfax
found["is a JaxModel"] = isinstance(model, hfax.JaxModel)
params = model.params
found["beams"] = model.generate(ids, max_new_tokens=6, num_beams=2).tolist()
found["logits"] = model(input_ids=ids).logits.tolist()
found["same weights"] = all(model.params[name] is array for name, array in params.items())
found["class"] = type(model).__name__
found["greedy again"] = model.generate(ids, max_new_tokens=6).tolist()
model.generation_config.min_new_tokens = 3
model.generation_config.eos_token_id = found["greedy"][0][5]
found["with the changed config"] = model.generate(ids, max_new_tokens=6).tolist()
print(json.dumps(found))
"""


def test_what_needs_more_than_stored_programs_makes_it_the_full_model(
    checkpoints: dict[str, Path], results: Any
) -> None:
    found = json.loads(run_script(_BECOMES, text=str(checkpoints["llama"])))
    model = AutoModelForTPU.from_pretrained(checkpoints["llama"])
    beams = np.asarray(model.generate(_IDS, max_new_tokens=6, num_beams=2)).tolist()
    greedy = results["llama"]["greedy"]
    assert {name: found.pop(name) for name in ("greedy", "greedy again", "beams")} == {
        **{"greedy": greedy, "greedy again": greedy},
        "beams": beams,
    }
    np.testing.assert_array_equal(found.pop("logits"), np.asarray(model(input_ids=_IDS).logits))
    model.generation_config.min_new_tokens, model.generation_config.eos_token_id = 3, greedy[0][5]
    changed = np.asarray(model.generate(_IDS, max_new_tokens=6)).tolist()
    assert (found.pop("with the changed config"), changed != greedy) == (changed, True)
    assert found == {
        **{"starts without torch": True, "still without torch": True, "own type": "StoredModel"},
        **{"is a JaxModel": True, "same weights": True, "class": "LlamaForCausalLM"},
    }


_WAYS = """
import json, sys
from hfax import AutoModelForTPU
model = AutoModelForTPU.from_pretrained(sys.stdin.read())
text = model.generate([[5, 9, 17, 33, 60]], max_new_tokens=6).tolist()
print(json.dumps([text, "torch" not in sys.modules]))
"""


def _start(folder: Path, **variables: str) -> tuple[list[list[int]], bool]:
    """Greedy tokens of a checkpoint in a new process, and whether torch was not imported for them."""
    text, is_light = json.loads(run_script(_WAYS, text=str(folder), **variables))
    return text, is_light


@pytest.fixture
def own_llama(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkpoint, and a cache in which its start is stored."""
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    folder = Path(shutil.copytree(checkpoints["llama"], tmp_path / "llama"))
    AutoModelForTPU.from_pretrained(folder).generate(_IDS, max_new_tokens=6)
    return folder


def test_weights_are_read_anew_and_another_config_has_a_start_of_its_own(own_llama: Path, results: Any) -> None:
    assert _start(own_llama) == (results["llama"]["greedy"], True)
    tiny_models.tiny_llama(seed=1).save_pretrained(own_llama)
    expected = np.asarray(AutoModelForTPU.from_pretrained(own_llama).generate(_IDS, max_new_tokens=6)).tolist()
    assert expected != results["llama"]["greedy"]
    assert _start(own_llama) == (expected, True)
    config = json.loads((own_llama / "generation_config.json").read_text())
    (own_llama / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": expected[0][6]}))
    assert _start(own_llama) == ([expected[0][:7]], False)


@pytest.mark.parametrize("damage", ["cut", "flipped", "without data", "no JSON", "no programs"])
def test_a_damaged_cache_costs_time_alone(own_llama: Path, results: Any, damage: str, tmp_path: Path) -> None:
    (record,) = (tmp_path / "home/starts").glob("model-*.json")
    data = beside(record)
    match damage:
        case "cut":
            data.write_bytes(data.read_bytes()[:-1])
        case "flipped":
            data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 1]))
        case "without data":
            data.unlink()
        case "no JSON":
            record.write_bytes(record.read_bytes()[:-5])
        case _:
            shutil.rmtree(tmp_path / "home/programs")
    assert _start(own_llama) == (results["llama"]["greedy"], False)


def test_programs_off_and_a_read_only_cache_leave_the_full_model(own_llama: Path, results: Any, tmp_path: Path) -> None:
    assert _start(own_llama, HFAX_PROGRAM_CACHE="0") == (results["llama"]["greedy"], False)
    (blocked := tmp_path / "blocked").write_text("a file where the folder would be")
    assert _start(own_llama, HFAX_HOME=str(blocked)) == (results["llama"]["greedy"], False)


def test_what_a_record_does_not_cover_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    caplog.set_level("INFO", "hfax.stored")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    vit = tiny_models.random_model(config, auto=transformers.AutoModelForImageClassification)
    AutoModelForTPU.from_pretrained(tiny_models.save(tmp_path / "vit", vit))
    assert list(tmp_path.glob("home/starts/*")) == []
    (record,) = caplog.records
    assert record.message.endswith(": it does not read token ids alone, or generates by a loop of its own")


def test_records_that_were_not_used_for_longest_are_removed_first(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were removed by the time at which they were written: a model in daily use lost its record."""
    monkeypatch.setenv("HFAX_HOME", str(tmp_path))
    monkeypatch.setattr(records, "_MOST_RECORDS", 2)
    used, unused, new = (checkpoints[name] for name in ("llama", "tied", "windows"))
    for age, folder in ((300, used), (200, unused)):
        before = set(tmp_path.glob("starts/*"))
        AutoModelForTPU.from_pretrained(folder)
        for path in set(tmp_path.glob("starts/*")) - before:
            os.utime(path, (time.time() - age, time.time() - age))
    kept = {path.name for path in tmp_path.glob("starts/*")}
    AutoModelForTPU.from_pretrained(used)
    AutoModelForTPU.from_pretrained(new)
    left = {path.name for path in tmp_path.glob("starts/*")}
    assert len(left) == len(kept) == 4
    assert len(left & kept) == 2
    AutoModelForTPU.from_pretrained(used)
    assert {path.name for path in tmp_path.glob("starts/*")} == left
