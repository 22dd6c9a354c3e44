"""Generation without a cache: every step runs the whole text.

`prefill` and `decode_step` are those of `TracedModel`, for models whose cache hfax cannot use. The "cache" of such a program is the
text itself, padded on the right to the capacity.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfax.errors import UnsupportedModelError
from hfax.tracing import torchax as tracing
from hfax.tracing.geometry import HostArray
from hfax.tracing.traits import APPENDS_MASK, ModelTraits

Arrays = dict[str, jax.Array]
Run = Callable[[Callable[[torch.nn.Module], Any]], Any]
"""Calls a function of the module in a trace, with the model's weights."""


def prefill(
    module: torch.nn.Module,
    traits: ModelTraits,
    run: Run,
    inputs: Mapping[str, jax.Array],
    static: Mapping[str, Any],
    capacity: int,
) -> tuple[jax.Array, Arrays]:
    """Logits after the prompts, [batch, vocab] float32, and the prompts as the "cache".

    Args:
        module: the model.
        traits: its traits.
        run: runs it.
        inputs: see `TracedModel.prefill`.
        static: see `TracedModel.prefill`.
        capacity: length of the "cache", in tokens.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder, or there are inputs besides text.
    """
    extra = set(inputs) - {"input_ids", "attention_mask", "position_ids"}
    extra |= {n for n, v in static.items() if isinstance(v, HostArray)}
    if extra:
        raise UnsupportedModelError(
            f"generate() of {type(module).__name__} does not take {', '.join(sorted(extra))}.",
            "The model has no KV cache that hfax can use, so every step would read them again.",
            "Call the model directly, or generate with plain transformers.",
        )
    ids = inputs["input_ids"]
    logits = _next_logits(module, traits, run, ids, inputs["attention_mask"], static)
    return logits, {"text.ids": jnp.pad(ids, ((0, 0), (0, capacity - ids.shape[1])))}


def decode_step(
    module: torch.nn.Module,
    traits: ModelTraits,
    run: Run,
    cache: Arrays,
    tokens: jax.Array,
    length: jax.Array,
    attention_mask: jax.Array,
    static: Mapping[str, Any],
) -> tuple[jax.Array, Arrays]:
    """Logits after the next token, [batch, 1, vocab] float32, and the text with that token.

    Args:
        module: the model.
        traits: its traits.
        run: runs it.
        cache: from `prefill` or the previous step.
        tokens: [batch, 1] int32.
        length: scalar int32, tokens of the text so far.
        attention_mask: [batch, capacity], 0 at prompt padding.
        static: see `TracedModel.decode_step`.
    """
    ids = jax.lax.dynamic_update_slice_in_dim(cache["text.ids"], tokens, length, axis=1)
    mask = jnp.where(jnp.arange(ids.shape[1]) <= length, attention_mask, 0)
    return _next_logits(module, traits, run, ids, mask, static, last=length)[:, None], {"text.ids": ids}


def _next_logits(
    module: torch.nn.Module,
    traits: ModelTraits,
    run: Run,
    ids: jax.Array,
    mask: jax.Array,
    static: Mapping[str, Any],
    last: jax.Array | None = None,
) -> jax.Array:
    """Logits after token `last` (None: after the end). Tokens after it are masked, and causal attention ignores them."""
    if traits.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(module).__name__} takes no cache in its forward.",
            "Compiled decoding of encoder-decoders keeps the keys and values of past tokens between steps.",
            "Call the model directly instead of generate().",
        )
    config: Any = module.config
    if config.model_type in APPENDS_MASK:
        return _at_appended_mask(config, run, ids, static, last)
    inputs: dict[str, Any] = {"input_ids": ids}
    if traits.takes_attention_mask:
        inputs["attention_mask"] = mask
    if traits.takes_position_ids:
        inputs["position_ids"] = text_positions(mask)
    if "use_cache" in inspect.signature(module.forward).parameters:
        inputs["use_cache"] = False
    logits = _logits(run, inputs, static)
    return last_logits(logits) if last is None else _logits_at(logits, last)


def _at_appended_mask(
    config: Any, run: Run, ids: jax.Array, static: Mapping[str, Any], last: jax.Array | None
) -> jax.Array:
    """The logits at a mask token after the text, for models that predict there."""
    if last is None:
        buffer = jnp.pad(ids, ((0, 0), (0, 1)))
        place: Any = ids.shape[1]
    else:
        buffer, place = ids, last + 1
    buffer = jax.lax.dynamic_update_slice_in_dim(
        buffer, jnp.full((len(ids), 1), config.mask_token_id, ids.dtype), place, axis=1
    )
    all_seen = jnp.broadcast_to(jnp.arange(buffer.shape[1]) <= place, buffer.shape).astype(jnp.int32)
    inputs = {"input_ids": buffer, "attention_mask": all_seen, **_language(config, buffer)}
    return _logits_at(_logits(run, inputs, static), place)


def _language(config: Any, ids: jax.Array) -> dict[str, jax.Array]:
    """The language input of each token, if the config sets a language."""
    language = getattr(config, "lang_id", None)
    return {} if language is None else {"langs": jnp.full_like(ids, language)}


def _logits(run: Run, inputs: Mapping[str, jax.Array], static: Mapping[str, Any]) -> jax.Array:
    def call(module: torch.nn.Module) -> jax.Array:
        return tracing.unwrap(module(**tracing.wrap(inputs), **static, return_dict=True).logits)

    return run(call)


def _logits_at(logits: jax.Array, place: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False).astype(jnp.float32)


def last_logits(logits: jax.Array) -> jax.Array:
    """The logits of the last position as float32, [batch, vocab] from [batch, length, vocab]."""
    return logits[:, -1].astype(jnp.float32)


def text_positions(mask: jax.Array) -> jax.Array:
    """Positions among the tokens where `mask`, [batch, length], is 1; 0 before the first."""
    return jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
