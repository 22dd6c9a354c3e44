"""Small models, as plain transformers and as hfax load them from one folder, and batches for them."""

from __future__ import annotations

import numpy as np
from tiny_models import SIZES, random_model, save, tiny_llama_config
from transformers import MixtralConfig, T5Config

from hfax import AutoModelForTPU

VOCABULARY = 128
_SIZES = {**SIZES, "vocab_size": VOCABULARY, "initializer_range": 0.02}  # weights as small as training starts with
CONFIGS = {
    "llama": lambda **more: tiny_llama_config(**{**_SIZES, **more}),
    "mixtral": lambda **more: MixtralConfig(**{**_SIZES, "num_local_experts": 4, "output_router_logits": True, **more}),
    "t5": lambda **more: T5Config(
        **{
            **{"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
            **more,
        }
    ),
}


def make(kind: str, folder, *, seed: int = 0, load=None, **config):
    """The same weights twice: plain transformers' model, and hfax's; their folder stays."""
    plain = random_model(CONFIGS[kind](**config), seed).train()
    return plain, AutoModelForTPU.from_pretrained(save(folder, plain), **(load or {}))


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
