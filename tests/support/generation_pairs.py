"""hfax's and transformers' models with the same weights, several architectures, and how their texts are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
import transformers

from hfax import AutoModelForTPU

VOCAB = tiny_models.SIZES["vocab_size"]
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_SEQ2SEQ = {"decoder_start_token_id": 0, "is_encoder_decoder": True}

CONFIGS: dict[str, Any] = {
    "llama": tiny_models.tiny_llama_config(),
    "gpt2": transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, initializer_range=0.2, **_SIZES),
    "mamba": transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.2, **_SIZES),
    "t5": transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, **_SIZES, **_SEQ2SEQ),
    "bart": transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=2, decoder_attention_heads=2, init_std=0.5, **{**_SIZES, **_SEQ2SEQ},
    ),
}  # fmt: skip

BATCH = {
    "input_ids": torch.tensor([[0, 0, 5, 17, 40, 8], [9, 3, 61, 33, 2, 7], [0, 4, 4, 4, 50, 6]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [0, 1, 1, 1, 1, 1]]),
}
GREEDY: dict[str, Any] = {
    "max_new_tokens": 7,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_scores": True,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Any]]:
    """By name of a config, or by name and config: hfax's model and transformers', with the same weights."""
    made: dict[str, tuple[Any, Any]] = {}

    def get(name: str, config: Any = None) -> tuple[Any, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            plain = tiny_models.random_model(CONFIGS[name] if config is None else config)
            tiny_models.save(folder, plain)
            made[name] = AutoModelForTPU.from_pretrained(folder), plain
        return made[name]

    return get


def batch_of(name: str) -> dict[str, torch.Tensor]:
    """The batch, without padding where transformers reads it as text."""
    return {n: t[1:2] for n, t in BATCH.items()} if name == "mamba" else BATCH


def agree(ours: Any, theirs: Any, rtol: float = 2e-4) -> None:
    """Assert that two results of `generate` have the same ids, and scores alike."""
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for mine, plain in zip(map(np.asarray, ours.scores), map(np.asarray, theirs.scores), strict=True):
        np.testing.assert_allclose(np.clip(mine, -1e30, 1e30), np.clip(plain, -1e30, 1e30), rtol=rtol, atol=rtol)
