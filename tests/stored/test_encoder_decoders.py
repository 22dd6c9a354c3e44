"""Encoder-decoders and beam search start from stored programs, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import transformers
from torch_free import GENERATE, run_script

from hfax import AutoModelForTPU

_IDS = [[5, 9, 17, 33, 60]]
_PADDED = {"inputs": [[7, 5, 9, 17, 1], [7, 8, 9, 1, 0]], "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "initializer_factor": 4.0}
_CONFIGS: dict[str, Any] = {
    "t5": transformers.T5Config(vocab_size=97, **_T5, decoder_start_token_id=0, tie_word_embeddings=True),
    "bart": transformers.BartConfig(
        vocab_size=97, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, init_std=0.2,
        pad_token_id=0, bos_token_id=2, eos_token_id=1, decoder_start_token_id=1, forced_eos_token_id=1,
    ),
    "llama": tiny_models.tiny_llama_config(),
}  # fmt: skip
_OF_GENERATION: dict[str, dict[str, Any]] = {
    "t5": {},
    "bart": {
        "num_beams": 3,
        "length_penalty": 0.5,
        "early_stopping": True,
        "no_repeat_ngram_size": 2,
    },  # as in summarizers
    "llama": {},
}
_CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"inputs": _IDS, "max_new_tokens": 6, "num_beams": 1},
    "by its own options": {"inputs": _IDS, "max_new_tokens": 9},
    "padded": {**_PADDED, "max_new_tokens": 6},
    "beams": {"inputs": _IDS, "max_new_tokens": 7, "num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0},
    "sampled": {"inputs": _IDS, "max_new_tokens": 6, "num_beams": 1, "do_sample": True, "top_k": 20, "seed": 3,
                "num_return_sequences": 3},
    "with a float8 cache": {"inputs": _IDS, "max_new_tokens": 6, "kv_cache_dtype": "fp8"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name, config in _CONFIGS.items():
        model = tiny_models.random_model(config)
        model.generation_config.update(**_OF_GENERATION[name])
        found[name] = tiny_models.save(tmp_path_factory.mktemp(name), model)
    return found


@pytest.fixture(scope="module")
def results(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What the models give that are loaded here, with torch."""
    found: dict[str, dict[str, Any]] = {}
    for name, folder in folders.items():
        model = AutoModelForTPU.from_pretrained(folder)
        found[name] = {call: np.asarray(model.generate(**options)).tolist() for call, options in _CALLS.items()}
    return found


@pytest.fixture(scope="module")
def stored_results(folders: dict[str, Path], results: Any) -> dict[str, dict[str, Any]]:
    paths = {name: str(folder) for name, folder in folders.items()}
    return json.loads(run_script(GENERATE, text=json.dumps([paths, dict.fromkeys(paths, _CALLS)])))


@pytest.mark.parametrize("name", _CONFIGS)
def test_stored_programs_give_the_same_tokens_without_torch(name: str, results: Any, stored_results: Any) -> None:
    assert stored_results[name] == results[name]
    assert len({json.dumps(ids) for ids in results[name].values()}) >= len(_CALLS) - 1


def test_a_checkpoint_whose_options_lack_the_first_token_loads_and_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HFAX_HOME", str(tmp_path / "home"))
    caplog.set_level("INFO", "hfax.stored")
    folder = tiny_models.save(
        tmp_path / "t5",
        tiny_models.random_model(transformers.T5Config(vocab_size=97, **_T5, decoder_start_token_id=None)),
    )
    AutoModelForTPU.from_pretrained(folder)
    assert list(tmp_path.glob("home/starts/*")) == []
    (record,) = caplog.records
    assert "does not know the decoder's first token" in record.message
