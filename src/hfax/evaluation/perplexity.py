"""Perplexity of a text: in windows of the model's context, each token predicted from all that the window has before it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError
from hfax.evaluation.scoring import score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How well a model predicts a text.

    Args:
        perplexity: exp of the mean over tokens.
        nats_per_token: the mean itself.
        bits_per_byte: of the text in UTF-8; comparable between tokenizers.
        tokens: that were predicted.
    """

    perplexity: float
    nats_per_token: float
    bits_per_byte: float
    tokens: int


def perplexity(
    model: JaxModel,
    tokenizer: Any,
    text: str,
    *,
    max_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 4,
) -> Perplexity:
    """Measure it.

    Args:
        model: a decoder.
        tokenizer: its own.
        text: of any length.
        max_length: tokens of a window; None: the model's context, 1,024 at most.
        stride: tokens that a window goes on; the others are context alone. None: all, as lm-evaluation-harness does it.
        batch_size: windows at a time.

    Raises:
        InvalidInputError: nothing to predict, or a stride that is none.
    """
    window = min(max_length or 1024, model.context_length or 1 << 30)
    step = window if stride is None else stride
    if not 0 < step <= window:
        raise InvalidInputError(
            f"stride={stride} with windows of {window} tokens.",
            "A window goes on by one token at least, and leaves none out.",
            f"Use 1 to {window}.",
        )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    prefix: Any = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = ids if prefix is None else [prefix, *ids]
    if len(ids) < 2:
        raise InvalidInputError(
            "The text has nothing to predict.", f"It is {len(ids)} tokens long.", "Use a longer one."
        )
    pairs = []
    for begin in range(1, len(ids), step):
        scored = ids[begin : begin + step]
        context = ids[max(0, begin + len(scored) - 1 - window) : begin]
        pairs.append((context, scored))
    log_probs = np.concatenate([s.log_probs for s in score(model, pairs, batch_size=batch_size, max_length=window)])
    nats = -float(log_probs.mean())
    return Perplexity(
        perplexity=math.exp(min(nats, 700.0)),
        nats_per_token=nats,
        bits_per_byte=-float(log_probs.sum()) / math.log(2) / max(len(text.encode()), 1),
        tokens=len(log_probs),
    )
