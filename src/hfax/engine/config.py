"""Engine configuration."""

from __future__ import annotations

import dataclasses

from hfax.engine.scheduler import Limits
from hfax.errors import InvalidInputError

_DEFAULT_LENGTH = 8192
"""Default and upper bound of `max_model_len` when the user sets none, in tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Engine configuration.

    Args:
        max_num_seqs: maximum concurrent sequences.
        max_model_len: maximum sequence length in tokens, prompt plus completion; None: the model's context length, at most 8,192.
        max_num_batched_tokens: maximum tokens per step; longer prompts use chunked prefill.
        max_waiting: maximum waiting sequences; None: unlimited.
        block_size: tokens per KV-cache block; None: the platform's default.
        num_blocks: number of KV-cache blocks; None: enough for all sequences, or as many as fit in memory.
        enable_prefix_caching: reuse the KV cache of shared prompt prefixes.
        kv_cache_dtype: "fp8" (or "fp8_e4m3") rounds keys and values to float8_e4m3fn, so that twice as many tokens fit as in
            bfloat16; "auto": the model's dtype.
        batch_invariant: a sequence's logits, and with them its tokens and log-probabilities, do not depend on the sequences beside
            it, bit for bit. On CPU with hfax's kernels, one device, in float32 or bfloat16; prompts are slower.
    """

    max_num_seqs: int = 32
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_waiting: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False


def limits_of(config: EngineConfig, context: int | None) -> Limits:
    """Limits of the scheduler.

    Args:
        config: the engine's configuration.
        context: the model's context length in tokens; None: unlimited.

    Raises:
        InvalidInputError: a number is not positive, or `max_model_len` exceeds the context length.
    """
    longest = config.max_model_len or min(context or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
    if context is not None and longest > context:
        raise InvalidInputError(
            f"max_model_len={longest} exceeds the model's context length of {context}.",
            "The model has no positions beyond that.",
            f"Set max_model_len to at most {context}.",
        )
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise InvalidInputError(f"{name}={value}.", "It must be positive.", f"Set {name} to at least 1.")
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_model_len=longest,
        max_waiting=config.max_waiting,
    )
