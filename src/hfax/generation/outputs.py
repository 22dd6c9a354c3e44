"""Prompts and new tokens in the output classes of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hfax.generation.beam_loop import GeneratedByBeams
from hfax.generation.host_loop import Generated


def as_sequences(
    generated: Generated,
    given: np.ndarray,
    *,
    num_return_sequences: int,
    is_encoder_decoder: bool,
    as_dict: bool,
    give: Callable[[np.ndarray], Any],
) -> Any:
    """Prompts and new tokens in the form that `generate` returns.

    Args:
        generated: from `run_generation` or `run_beam_search`.
        given: [batch, length], the prompts as passed by the user.
        num_return_sequences: sequences per prompt.
        is_encoder_decoder: selects the output class.
        as_dict: return transformers' output class instead of only the ids.
        give: converts a host array to the returned type.
    """
    from transformers.generation import utils

    prompts = np.repeat(given, num_return_sequences, axis=0)
    sequences = give(np.concatenate([prompts, generated.new_tokens], axis=1))
    if not as_dict:
        return sequences
    classes: Any = (utils.GenerateDecoderOnlyOutput, utils.GenerateEncoderDecoderOutput)
    of_beams: dict[str, Any] = {}
    if isinstance(generated, GeneratedByBeams):
        classes = (utils.GenerateBeamDecoderOnlyOutput, utils.GenerateBeamEncoderDecoderOutput)
        of_beams["beam_indices"] = give(generated.beam_indices)
        if generated.scores is not None:  # as in transformers
            of_beams["sequences_scores"] = give(generated.sequences_scores)
    steps: Callable[[np.ndarray | None], Any] = lambda r: (  # noqa: E731
        None if r is None else tuple(give(row) for row in r)
    )
    output = classes[is_encoder_decoder](
        sequences=sequences, scores=steps(generated.scores), logits=steps(generated.logits), **of_beams
    )
    if generated.log_probs is not None:
        output["log_probs"] = give(generated.log_probs.astype(np.float32))
    return output
