"""Small models, as plain transformers and as hfax load them from one folder, and batches for them."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, LlamaConfig, MixtralConfig, T5Config

from hfax import AutoModelForTPU

VOCABULARY = 128
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": (AutoModelForCausalLM, lambda **more: LlamaConfig(**{**_SHAPE, **more})),
    "mixtral": (
        AutoModelForCausalLM,
        lambda **more: MixtralConfig(**{**_SHAPE, "num_local_experts": 4, "output_router_logits": True, **more}),
    ),
    "t5": (
        AutoModelForSeq2SeqLM,
        lambda **more: T5Config(
            **{
                **{"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
                **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
                **more,
            }
        ),
    ),
}


def make(kind: str, folder, *, seed: int = 0, load=None, **config):
    """The same weights twice: plain transformers' model, and hfax's; their folder stays."""
    auto, make_config = CONFIGS[kind]
    torch.manual_seed(seed)
    plain = auto.from_config(make_config(**config))
    plain.save_pretrained(folder)
    return plain, AutoModelForTPU.from_pretrained(folder, **(load or {}))


def rows(kind: str, count: int, *, seed: int = 0, length: int = 16) -> list[dict[str, list[int]]]:
    """Rows of random ids, with labels."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ids = rng.integers(1, VOCABULARY, length).tolist()
        labels = ids if kind != "t5" else rng.integers(1, VOCABULARY, length - 4).tolist()
        found.append({"input_ids": ids, "labels": labels})
    return found


def batch(kind: str, count: int, **options) -> dict[str, np.ndarray]:
    """Rows as one batch."""
    found = rows(kind, count, **options)
    return {name: np.array([row[name] for row in found]) for name in found[0]}
