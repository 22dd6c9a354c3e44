"""Perplexity of a text in context-length windows; each token is predicted from all earlier tokens in its window."""

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
        perplexity: exp of `nats_per_token`.
        nats_per_token: mean negative log-likelihood per token.
        bits_per_byte: bits per UTF-8 byte; comparable across tokenizers.
        tokens: number of predicted tokens.
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
    """Measure a model's perplexity on a text.

    Args:
        model: a decoder.
        tokenizer: the model's tokenizer.
        text: text of any length.
        max_length: window length, in tokens; None: the model's context, at most 1,024.
        stride: scored tokens per window; the rest are context only. None: the whole window, as in lm-evaluation-harness.
        batch_size: windows per batch.

    Raises:
        InvalidInputError: nothing to predict, or an invalid stride.
    """
    window = min(max_length or 1024, model.context_length or 1 << 30)
    step = window if stride is None else stride
    if not 0 < step <= window:
        raise InvalidInputError(
            f"stride={stride} is invalid for windows of {window} tokens.",
            "A window must advance by at least one token and skip none.",
            f"Use 1 to {window}.",
        )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    prefix: Any = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    ids = ids if prefix is None else [prefix, *ids]
    if len(ids) < 2:
        raise InvalidInputError(
            "The text has nothing to predict.", f"It is {len(ids)} tokens long.", "Use a longer text."
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
