"""Whisper's own `generate` options, run by hfax's loop, beside transformers."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

import hfax
from hfax.errors import UnsupportedModelError
from hfax.load.host_arrays import to_numpy

from .checkpoints import RATE, save_whisper, sound

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def ours(folder: Path) -> Any:
    return hfax.AutoModelForTPU.from_pretrained(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return transformers.WhisperProcessor.from_pretrained(folder)


def _features(processor: Any, *seconds: float) -> dict[str, torch.Tensor]:
    """Of several recordings, whole and padded to the longest."""
    sounds = [sound(s, seed) for seed, s in enumerate(seconds)]
    options = {"truncation": False, "padding": "longest"} if max(seconds) > 1 else {}
    return dict(processor(sounds, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **options))


SHORT: dict[str, dict[str, Any]] = {
    "language by detection": {},
    "language by name": {"language": "german", "task": "translate"},
    "a language for each": {"language": ["<|fr|>", "de"], "task": "transcribe"},
    "timestamps": {"return_timestamps": True, "language": "en"},
    "more tokens": {"max_new_tokens": 30, "language": "en"},
    "the whole result": {"return_dict_in_generate": True, "output_scores": True, "language": "en"},
    "segments": {"return_timestamps": True, "return_segments": True, "language": "en"},
    "times of tokens": {"return_token_timestamps": True, "return_timestamps": True, "language": "en"},
    "what layers compute": {
        "output_hidden_states": True,
        "output_attentions": True,
        "return_dict_in_generate": True,
        "language": "en",
    },
    "beams": {"num_beams": 3, "language": "en", "return_dict_in_generate": True, "output_scores": True},
    "beams with timestamps": {"num_beams": 2, "return_timestamps": True, "language": "en"},
    "a processor in Python": {
        "logits_processor": transformers.LogitsProcessorList([lambda ids, scores: scores.roll(len(ids[0]), dims=1)]),
        "language": "en",
    },
    "a criterion in Python": {
        "stopping_criteria": transformers.StoppingCriteriaList([lambda ids, scores: ids.shape[1] > 7]),
        "max_new_tokens": 30,
        "language": "en",
    },
    "other suppressed tokens": {"suppress_tokens": [9, 10, 40], "begin_suppress_tokens": [30], "language": "en"},
}
LONG: dict[str, dict[str, Any]] = {
    "two recordings": {},
    "times of tokens": {"return_token_timestamps": True, "return_segments": True, "language": "en"},
    "conditioned on what was said": {"condition_on_prev_tokens": True, "language": "en"},
    "thresholds": {
        "language": "en",
        "temperature": (0.0,),
        "logprob_threshold": -0.5,
        "compression_ratio_threshold": 1.35,
        "no_speech_threshold": 0.6,
    },
    "silence is skipped": {
        "language": "en",
        "temperature": (0.0,),
        "logprob_threshold": 0.0,
        "no_speech_threshold": 0.0,
    },
}


def _same(mine: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert mine.shape == expected.shape
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4, check_dtype=False)
    elif isinstance(expected, dict):
        for key, value in expected.items():
            if key not in ("cache", "past_key_values"):
                _same(mine[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(mine) == len(expected)
        for a, b in zip(mine, expected, strict=True):
            _same(a, b)
    else:
        assert mine == expected


@pytest.mark.parametrize("name", SHORT)
def test_short_recordings(ours: Any, theirs: Any, processor: Any, name: str) -> None:
    inputs, options = _features(processor, 0.9, 0.5), {"max_new_tokens": 14, **SHORT[name]}
    _same(ours.generate(**inputs, **options), theirs.generate(**inputs, **options))


@pytest.mark.parametrize("name", LONG)
def test_long_recordings(ours: Any, theirs: Any, processor: Any, name: str) -> None:
    inputs, options = _features(processor, 3.3, 2.1), {"max_new_tokens": 14, "return_timestamps": True, **LONG[name]}
    expected = theirs.generate(**inputs, **options)
    ids = expected["sequences"] if isinstance(expected, dict) else expected
    assert ids.shape[1] == 0 if name == "silence is skipped" else ids.shape[1] > 14
    _same(ours.generate(**inputs, **options), expected)


def test_a_prompt_before_the_text(ours: Any, theirs: Any, processor: Any) -> None:
    inputs = _features(processor, 0.9)
    prompt = torch.from_numpy(processor.get_prompt_ids("abc"))
    options = {"prompt_ids": prompt, "max_new_tokens": 12, "language": "en"}
    _same(ours.generate(**inputs, **options), theirs.generate(**inputs, **options))


def test_a_hotter_try_is_made_where_the_first_fails(ours: Any, processor: Any) -> None:
    inputs = _features(processor, 2.4)
    options = {"max_new_tokens": 12, "return_timestamps": True, "language": "en", "seed": 3}
    cold = ours.generate(**inputs, **options, temperature=(0.0,), logprob_threshold=0.0)
    warm = ours.generate(**inputs, **options, temperature=(0.0, 0.9), logprob_threshold=0.0)
    again = ours.generate(**inputs, **options, temperature=(0.0, 0.9), logprob_threshold=0.0)
    assert warm.tolist() == again.tolist() != cold.tolist()


def test_arrays_in_give_arrays_back(ours: Any, processor: Any) -> None:
    inputs = {n: np.asarray(v) for n, v in _features(processor, 0.9).items()}
    found = ours.generate(**inputs, max_new_tokens=4, language="en")
    assert isinstance(found, jax.Array)


def test_features_of_half_precision(folder: Path, processor: Any) -> None:
    """numpy has no bfloat16, in which arrays reach the class's own code."""
    model = hfax.AutoModelForTPU.from_pretrained(folder, dtype="bfloat16")
    features = _features(processor, 0.9)["input_features"].bfloat16()
    found = model.generate(features, max_new_tokens=4, language="en")
    of_array = model.generate(jax.numpy.asarray(to_numpy(features)), max_new_tokens=4, language="en")
    assert found.tolist() == of_array.tolist()


def test_the_skeleton_is_left_alone(ours: Any, theirs: Any, processor: Any) -> None:
    before = dict(vars(ours._skeleton.module)), dict(vars(type(ours._skeleton.module)))
    ours.generate(**_features(processor, 0.9), max_new_tokens=4)
    assert (dict(vars(ours._skeleton.module)), dict(vars(type(ours._skeleton.module)))) == before
    assert not hasattr(theirs, "_hfax_loop")


def test_times_of_words_leave_the_attention_as_it_was(ours: Any, processor: Any) -> None:
    """transformers' method sets the config to "eager"; what runs between and afterwards is what was loaded."""
    before = ours.config._attn_implementation
    options = {"return_token_timestamps": True, "return_timestamps": True, "language": "en", "max_new_tokens": 4}
    ours.generate(**_features(processor, 0.9), **options)
    assert ours.config._attn_implementation == before != "eager"


def test_a_class_that_writes_in_a_way_of_its_own_says_so() -> None:
    from transformers import SpeechT5Config

    model = hfax.AutoModelForTPU.from_config(
        SpeechT5Config(
            architectures=["SpeechT5ForTextToSpeech"],
            hidden_size=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
        )
    )
    with pytest.raises(UnsupportedModelError, match="custom generation loop"):
        model.generate(torch.tensor([[5, 6]]))
