"""Token log-likelihoods: batches of a few shapes, one compiled program each, two values returned per token.

Turns pairs of token ids (context, continuation) into log-probabilities. Does no tokenization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError, UnsupportedOptionError

_ROUNDED_TO = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The score of one continuation.

    Args:
        log_probs: log-probability of each token, float64.
        is_greedy: whether every token is the model's most likely one.
    """

    log_probs: np.ndarray
    is_greedy: bool

    @property
    def total(self) -> float:
        """The log-likelihood."""
        return float(self.log_probs.sum())


def score(
    model: JaxModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, batch_size: int = 8, max_length: int
) -> list[Score]:
    """Score continuations.

    Args:
        model: a decoder.
        pairs: token ids of the context (at least one) and of the continuation.
        batch_size: batch size.
        max_length: maximum sequence length, in tokens; longer contexts are truncated on the left.

    Returns:
        A score for each pair, in order.

    Raises:
        InvalidInputError: an empty context, or a continuation longer than `max_length`.
        UnsupportedOptionError: the model is not a decoder of token ids.
    """
    if model.config.is_encoder_decoder or model.main_input_name != "input_ids" or not model.can_generate():
        raise UnsupportedOptionError(
            f"{type(model).__name__} does not compute log-likelihoods.",
            "They require a decoder, which predicts each token from earlier ones.",
            'Load a model for task="text-generation".',
        )
    rows: list[tuple[np.ndarray, int]] = []
    for number, (context, continuation) in enumerate(pairs):
        if not len(context) or len(continuation) > max_length:
            raise InvalidInputError(
                f"Pair {number} has {len(context)} tokens of context and {len(continuation)} to score.",
                f"The context needs at least one token, and the continuation at most {max_length}.",
                "Start with a special token, or split long texts.",
            )
        tokens = np.array([*context, *continuation], np.int32)[-(max_length + 1) :]
        rows.append((tokens, len(continuation)))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]), reverse=True)
    found: list[Score | None] = [None] * len(rows)
    for begin in range(0, len(order), batch_size):
        own = order[begin : begin + batch_size]
        log_probs, greedy = _run(model, [rows[i][0] for i in own], batch_size, max_length)
        for row, i in enumerate(own):
            tokens, count = rows[i]
            scored = slice(len(tokens) - 1 - count, len(tokens) - 1)
            found[i] = Score(
                log_probs=log_probs[row, scored].astype(np.float64), is_greedy=bool(greedy[row, scored].all())
            )
    return [each for each in found if each is not None]


def _run(
    model: JaxModel, rows: Sequence[np.ndarray], batch_size: int, max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """[rows, length] log-probabilities of each next token, and whether it is the most likely one."""
    longest = max(len(row) - 1 for row in rows)
    length = min(-(-longest // _ROUNDED_TO) * _ROUNDED_TO, max(max_length, longest))
    ids = np.zeros((batch_size, length), np.int32)
    following, mask = np.zeros_like(ids), np.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row) - 1], following[i, : len(row) - 1], mask[i, : len(row) - 1] = row[:-1], row[1:], 1
    mask[len(rows) :, 0] = 1
    parts = model.parts
    inputs = parts.layout.put_rows([ids, mask, following])
    model.prepare_inputs({"input_ids": ids})  # checks that ids are in the vocabulary

    def program(weights: dict[str, jax.Array], inputs: list[jax.Array]) -> tuple[Any, None]:
        ids, mask, following = inputs
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        logits = parts.traced.apply(weights, (), given).logits.astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
        return (chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == following), None

    args = (parts.weights, inputs)
    compiled = parts.programs.get(f"score {list(ids.shape)}", "score", program, args)
    log_probs, greedy = compiled.run(*args)
    return np.asarray(log_probs), np.asarray(greedy)
