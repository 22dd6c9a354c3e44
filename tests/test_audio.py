"""Sound in prompts of models that write text: features from transformers' own extractor, beside plain transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hfax
from hfax.errors import InvalidInputError
from hfax.matrix.case import draw_weights

from .pipelines.checkpoints import RATE, sound

pytestmark = pytest.mark.filterwarnings("ignore")
_GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def _pair(config: Any, folder: Path) -> tuple[Any, Any]:
    architecture = {
        "qwen2_audio": "Qwen2AudioForConditionalGeneration",
        "granite_speech": "GraniteSpeechForConditionalGeneration",
    }
    plain = getattr(transformers, architecture[config.model_type])(config).eval()
    draw_weights(plain)
    plain.save_pretrained(folder)
    return plain, hfax.AutoModelForTPU.from_pretrained(folder)


def _prompt(token: int, count: int, padding: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[0] * padding + [7, 8, *[token] * count, 10, 11]])
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _same(plain: Any, ours: Any, inputs: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        expected = plain(**inputs).logits
    real = inputs["attention_mask"].bool()
    assert (ours(**inputs).logits - expected)[real].abs().max() < 1e-4 * expected.abs().max()
    assert ours.generate(**inputs, **_GREEDY).tolist() == plain.generate(**inputs, **_GREEDY).tolist()


def test_recordings_of_unequal_length(tmp_path: Path) -> None:
    config: Any = hfax.shrink_config(transformers.Qwen2AudioConfig())
    plain, ours = _pair(config, tmp_path)
    frames = 2 * config.audio_config.max_source_positions
    extract = transformers.WhisperFeatureExtractor(
        feature_size=config.audio_config.num_mel_bins, chunk_length=frames // 100, sampling_rate=RATE
    )
    features = extract([sound(0.9), sound(0.5)], sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    counts = [int((((n - 1) // 2 + 1) - 2) // 2 + 1) for n in features["attention_mask"].sum(1)]
    rows = [_prompt(config.audio_token_id, c, padding=counts[0] - c) for c in counts]
    prompts = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    sounds = {"input_features": features["input_features"], "feature_attention_mask": features["attention_mask"]}
    _same(plain, ours, {**prompts, **sounds})
    wrong = {**_prompt(config.audio_token_id, counts[0] - 1), **{n: s[:1] for n, s in sounds.items()}}
    with pytest.raises(InvalidInputError, match="are inconsistent"):
        ours.generate(**wrong, **_GREEDY)


def test_features_of_a_conformer(tmp_path: Path) -> None:
    config: Any = hfax.shrink_config(transformers.GraniteSpeechConfig())
    plain, ours = _pair(config, tmp_path)
    features = torch.randn(1, 60, config.encoder_config.input_dim, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = plain.get_audio_features(features)
    count = getattr(found, "pooler_output", found)[0].shape[0]
    mask = torch.ones(1, count, dtype=torch.bool)
    _same(
        plain, ours, {**_prompt(config.audio_token_id, count), "input_features": features, "input_features_mask": mask}
    )
