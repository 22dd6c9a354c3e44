"""Prompts and new tokens in the classes of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hfax.programs.driving import Generated


def as_sequences(
    generated: Generated,
    given: np.ndarray,
    *,
    num_return_sequences: int,
    is_encoder_decoder: bool,
    as_dict: bool,
    give: Callable[[np.ndarray], Any],
) -> Any:
    """Prompts and new tokens as `generate` returns them.

    Args:
        generated: from `run_generation`.
        given: [batch, length], the prompts as the user gave them.
        num_return_sequences: sequences a prompt.
        is_encoder_decoder: chooses the output class.
        as_dict: transformers' output class instead of the ids alone.
        give: turns an array of the host into what is given back.
    """
    from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

    prompts = np.repeat(given, num_return_sequences, axis=0)
    sequences = give(np.concatenate([prompts, generated.new_tokens], axis=1))
    if not as_dict:
        return sequences
    cls = GenerateEncoderDecoderOutput if is_encoder_decoder else GenerateDecoderOnlyOutput
    steps: Callable[[np.ndarray | None], Any] = lambda r: (  # noqa: E731
        None if r is None else tuple(give(row) for row in r)
    )
    output = cls(sequences=sequences, scores=steps(generated.scores), logits=steps(generated.logits))
    if generated.log_probs is not None:
        output["log_probs"] = give(generated.log_probs.astype(np.float32))
    return output
