"""Configs of small models that `hfax.quantize` is tried on, and their tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from tiny_models import SIZES

from hfax.demo import demo_folder

TOKENIZER = transformers.AutoTokenizer.from_pretrained(demo_folder())
_SIZES = {**SIZES, "vocab_size": len(TOKENIZER), "hidden_size": 128, "intermediate_size": 256}
_OF_OWN = {"vocab_size": len(TOKENIZER), "num_hidden_layers": 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**{**_SIZES, "num_hidden_layers": 3}),
    "bfloat16": lambda: transformers.Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True, dtype="bfloat16"),
    "windows": lambda: transformers.Gemma3TextConfig(**_SIZES, head_dim=32, sliding_window=16),
    "experts": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128
    ),
    "fused": lambda: transformers.Phi3Config(**_SIZES),
    "parallel": lambda: transformers.CohereConfig(**_SIZES),
    "tuples": lambda: transformers.BloomConfig(**_OF_OWN, hidden_size=128, n_layer=2, n_head=4),
    "recurrent": lambda: transformers.Mamba2Config(
        **_OF_OWN, hidden_size=128, num_heads=8, head_dim=32, state_size=16, n_groups=1, expand=2
    ),
    "of two schemes": lambda: transformers.LlamaConfig(**{**_SIZES, "intermediate_size": 192}),
    "encoder": lambda: transformers.BertConfig(
        vocab_size=len(TOKENIZER), hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    ),
    "encoder-decoder": lambda: transformers.BartConfig(
        vocab_size=len(TOKENIZER), d_model=64, encoder_layers=1, decoder_layers=1
    ),
    "convolutions": lambda: transformers.GPT2Config(vocab_size=len(TOKENIZER), n_embd=128, n_layer=1, n_head=4),
}
"""By what is special about them."""
