"""Tiny random models of plain transformers, and their folders: what most tests load, compare with and save.

It knows torch and transformers, not hfax and JAX: the tests of every backend use it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
"""Fields that most families' configs have. Weights of 0.2 make logits that differ; no token ends a text."""

TPU_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
"""Small, with heads and layers as wide as TPU kernels need them, for programs that are compiled and not run."""


def tiny_llama_config(**changes: Any) -> transformers.LlamaConfig:
    """A Llama's config of `SIZES`.

    Args:
        changes: fields in place of these, or beside them.
    """
    return transformers.LlamaConfig(**{"architectures": ["LlamaForCausalLM"], **SIZES, **changes})


def random_model(config: Any, seed: int = 0, *, auto: Any = None, **options: Any) -> Any:
    """The model of a config with weights as transformers draws them, the same for each seed, in eval mode.

    Args:
        config: it stays as it is.
        seed: of torch's random numbers, whose state outside stays as it was.
        auto: transformers' class that makes it; by default the one for models that write text.
        options: of transformers' `from_config`.
    """
    if auto is None:
        auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return auto.from_config(copy.deepcopy(config), **options).eval()


def tiny_llama(seed: int = 0, **changes: Any) -> transformers.LlamaForCausalLM:
    """`random_model` of `tiny_llama_config(**changes)`."""
    return random_model(tiny_llama_config(**changes), seed)


def save(folder: Path, model: Any, *processors: Any) -> Path:
    """Write a model, and its tokenizer or other processors, to a folder; returns the folder."""
    for part in (model, *processors):
        part.save_pretrained(folder)
    return folder


def word_tokenizer(vocab_size: int = SIZES["vocab_size"]) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of the words w0, w1, …, each the id that it names; it pads with w0 on the left."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w3"))
    words.pre_tokenizer = Whitespace()  # type: ignore[attr-defined]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")
