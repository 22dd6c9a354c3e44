"""Classifier-free guidance (2306.17806): the model also reads a text without the prompt, and the difference is amplified.

Keeps the second text's cache in the decoding state. It does not know sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from hfax.tracing.traced_model import TracedModel


Guide = dict[str, Any]
"""The second text: cache, length () int32, mask [batch, capacity] int32, and the logits of its next token, [batch, vocab]."""


def read_negative(
    model: TracedModel,
    params: Mapping[str, jax.Array],
    negative: Mapping[str, jax.Array],
    capacity: int,
    *,
    cache_dtype: jnp.dtype | None = None,
) -> Guide:
    """Prefill the negative prompts.

    Args:
        model: the traced module.
        params: the weights.
        negative: `input_ids` and `attention_mask`, [batch, length] int32.
        capacity: cache capacity, in tokens.
        cache_dtype: of the cached keys and values; None: the model's.
    """
    inputs, (rows, length) = dict(negative), negative["input_ids"].shape
    if model.traits.takes_position_ids:  # as in transformers, which passes none: padding counts
        inputs["position_ids"] = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    logits, cache = model.prefill(params, inputs, {}, capacity, cache_dtype=cache_dtype)
    mask = jnp.pad(negative["attention_mask"], ((0, 0), (0, capacity - length)), constant_values=1)
    return {"cache": cache, "length": jnp.int32(length), "mask": mask, "logits": logits}


def read_token(
    model: TracedModel, params: Mapping[str, jax.Array], guide: Guide, tokens: jax.Array, capacity: int
) -> Guide:
    """The second text with the next token of every sequence, [batch, 1] int32."""
    logits, cache = model.decode_step(
        params,
        guide["cache"],
        tokens,
        length=guide["length"],
        positions=jnp.broadcast_to(guide["length"], tokens.shape[:1]),
        attention_mask=guide["mask"],
        capacity=capacity,
        static={},
    )
    return guide | {"cache": cache, "length": guide["length"] + 1, "logits": logits[:, -1]}


def guided(logits: jax.Array, guide: Guide, scale: jax.Array) -> jax.Array:
    """Log-probabilities moved away from those of the second text, [batch, vocab] float32."""
    scores, others = jax.nn.log_softmax(logits, axis=-1), jax.nn.log_softmax(guide["logits"], axis=-1)
    return scale * (scores - others) + others
