"""Reads a call of `generate` as the full model reads it, from a record alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from hfax.generation.generation_request import (
    GenerationOptions,
    Prompts,
    as_ids_tuple,
    check_vocabulary,
    decoder_start,
    pad_decoder_prompts,
    pad_encoder_inputs,
    resolve_max_new_tokens,
)
from hfax.generation.kept_cache import KeptCache, resumed
from hfax.generation.seeds import draw_seed
from hfax.kv_cache.dtypes import cache_dtype_of
from hfax.load.host_arrays import narrow
from hfax.programs.buckets import Buckets
from hfax.stored.start import ModelStart

_KNOWN: dict[str, Callable[[Any], bool]] = {
    "do_sample": lambda v: isinstance(v, bool),
    "temperature": lambda v: _is_number(v) and v > 0,
    "top_k": lambda v: _is_whole(v) and v > 0,
    "top_p": lambda v: _is_number(v) and 0 < v <= 1,
    "min_p": lambda v: _is_number(v) and 0 <= v <= 1,
    "max_new_tokens": lambda v: _is_whole(v) and v > 0,
    "seed": lambda v: _is_whole(v) and v >= 0,
    "num_beams": lambda v: _is_whole(v) and v > 0,
    "num_return_sequences": lambda v: _is_whole(v) and v > 0,
    "length_penalty": lambda v: _is_number(v),
    "early_stopping": lambda v: isinstance(v, bool) or v == "never",
    "kv_cache_dtype": lambda v: isinstance(v, str),
    "past_key_values": lambda v: isinstance(v, KeptCache),
    "attention_mask": lambda v: _is_plain(v),
    "tokenizer": lambda v: True,
    "eos_token_id": lambda v: isinstance(v, list) and all(_is_whole(i) and i >= 0 for i in v),
    "stop_strings": lambda v: isinstance(v, list) and all(isinstance(s, str) and s for s in v),
}
"""The options of `generate` that are read here, and their values that transformers does not check further."""


_DEFAULTS = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop_strings"),
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping", "eos_token_id"),
)
"""Those of them that a model has defaults of."""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_call(
    start: ModelStart, inputs: Any, options: Mapping[str, Any], buckets: Buckets
) -> tuple[Prompts, GenerationOptions] | None:
    """The checked and padded prompts of a call, and its options; None for a call that only the full model reads.

    Args:
        start: the model's record.
        inputs: as in `generate`.
        options: as in `generate`, without a streamer.
        buckets: how sizes are rounded up.

    Raises:
        InvalidInputError: a prompt or an option is out of range.
    """
    given = {name: value for name, value in options.items() if value is not None}
    inputs = given.pop("input_ids", None) if inputs is None else inputs
    if inputs is None or not _is_plain(inputs):
        return None
    if any(name not in _KNOWN or not _KNOWN[name](value) for name, value in given.items()):
        return None
    mask = None if (mask := given.get("attention_mask")) is None else narrow(np.asarray(mask))
    if mask is not None and not start.traits.takes_attention_mask and not mask.all():
        return None
    config: Any = SimpleNamespace(**start.options)
    for name in given.keys() & set(_DEFAULTS):
        setattr(config, name, given[name])
    if "max_new_tokens" in given:
        config.max_length = None
    eos = as_ids_tuple(config.eos_token_id)
    if (prompts := _read_prompts(start, narrow(np.asarray(inputs)), mask, config, buckets)) is None:
        return None
    if (kept := given.get("past_key_values")) is not None:
        prompts = resumed(kept, prompts, {} if mask is None else {"attention_mask": mask}, start.key)
    resolved = GenerationOptions(
        config=config,
        max_new_tokens=resolve_max_new_tokens(config, prompts.longest, start.context),
        seed=given["seed"] if "seed" in given else draw_seed() if config.do_sample else 0,
        eos_token_ids=eos,
        pad_token_id=config.pad_token_id if config.pad_token_id is not None else (eos or (0,))[0],
        keep=(),
        extra_sampling={"encoder_ids": prompts.encoder_ids},
        cache_dtype=cache_dtype_of(given.get("kv_cache_dtype")),
    )
    return prompts, resolved


def read_prompt(start: ModelStart, prompt: Any, buckets: Buckets) -> Prompts | None:
    """Prompts as `JaxModel.read_prompt` reads them without further inputs; None for those that only the full model reads."""
    return _read_prompts(start, narrow(np.asarray(prompt)), None, SimpleNamespace(**start.options), buckets)


def _read_prompts(
    start: ModelStart, ids: np.ndarray, mask: np.ndarray | None, config: Any, buckets: Buckets
) -> Prompts | None:
    if start.positions is not None and np.isin(ids, start.positions.other_ids).any():
        return None
    if start.traits.is_encoder_decoder:
        encoder = {"input_ids": ids, **({} if mask is None else {"attention_mask": mask})}
        return pad_encoder_inputs(
            encoder,
            decoder_start(config, len(ids)),
            main_input="input_ids",
            vocab_size=start.vocab_size,
            pad_token_id=config.pad_token_id,
            buckets=buckets,
        )
    prompts = pad_decoder_prompts(
        ids,
        mask,
        vocab_size=start.vocab_size,
        pad_token_id=config.pad_token_id,
        eos_token_ids=as_ids_tuple(config.eos_token_id),
        context=start.context,
        buckets=buckets,
        is_exact=start.traits.counts_padding,
    )
    if start.positions is not None:
        counted = np.maximum(prompts.inputs["attention_mask"].cumsum(axis=1) - 1, 0).astype(np.int32)
        prompts.inputs["position_ids"] = np.repeat(counted[None], start.positions.axes, axis=0)
    return prompts


def read_inputs(start: ModelStart, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The inputs of a forward call as `JaxModel.prepare_inputs` reads them; None for a call that only the full model reads.

    Raises:
        InvalidInputError: ids are outside the vocabulary.
    """
    found: dict[str, Any] = {}
    for name, value in inputs.items():
        if name == "use_cache" and value is False:
            found[name] = value
            continue
        if start.forward is None or name not in start.forward.inputs or not isinstance(value, np.ndarray):
            return None
        if value.ndim != 2 or value.dtype.kind not in "iu":
            return None
        found[name] = narrow(value)
    if "input_ids" not in found:
        return None
    check_vocabulary("input_ids", found["input_ids"], start.vocab_size)
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value is an array of numpy or JAX, or a list."""
    return isinstance(value, (list, np.ndarray, jax.Array))
