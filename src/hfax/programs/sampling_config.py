"""Generation options checked and split: what shapes a program, and what is only a number in it.

Turns a resolved `GenerationConfig` into a hashable `SamplingSpec` (which processors are active, their static sizes) and a flat
dict of host arrays (temperature, penalties, token lists, …) that a program takes as arguments, so that another temperature does
not compile again. Every option is honoured or rejected here. No jax.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from transformers import GenerationConfig

from hfax.errors import InvalidInputError, UnsupportedOptionError

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "guidance_scale": (None, 1.0, 1),
    "penalty_alpha": (None, 0.0),
    "prompt_lookup_num_tokens": (None,),
    "watermarking_config": (None,),
    "sequence_bias": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "typical_p": (None, 1.0),
    "top_h": (None,),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "max_time": (None,),
    "token_healing": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "cache_implementation": (None, "static", "dynamic", "hybrid"),
}
"""Options that hfax does not implement, with the values that ask for nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """Which processors a program has. Every field is part of the program's key.

    Args:
        do_sample: draw at random; else take the highest score.
        top_k: candidates kept, None for all.
        active: names of the other active processors, sorted.
        no_repeat_ngram_size: 0 for none.
    """

    do_sample: bool
    top_k: int | None
    active: tuple[str, ...]
    no_repeat_ngram_size: int


def make_sampling_spec(
    config: GenerationConfig,
    *,
    vocab_size: int,
    prompt_length: int,
    max_new_tokens: int,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> tuple[SamplingSpec, dict[str, np.ndarray]]:
    """Check every option of a call.

    Args:
        config: resolved: no option that has a default is None.
        vocab_size: token ids must be below it.
        prompt_length: of the padded prompts, tokens.
        max_new_tokens: the last token drawn is number `max_new_tokens`.
        presence_penalty: subtracted from the score of each token already generated.
        frequency_penalty: subtracted once for each time a token was generated.

    Raises:
        InvalidInputError: a value is out of range.
        UnsupportedOptionError: an option asks for something that hfax does not do.
    """
    _reject_unsupported(config)
    _check_ranges(config, presence_penalty, frequency_penalty)
    values: dict[str, np.ndarray] = {
        "prompt_length": np.asarray(prompt_length, np.int32),
        "last_step": np.asarray(max_new_tokens - 1, np.int32),
    }
    active: set[str] = set()

    def add(name: str, value: Any, dtype: Any) -> None:
        active.add(name)
        values[name] = np.asarray(value, dtype)

    if config.repetition_penalty not in (None, 1.0):
        add("repetition_penalty", config.repetition_penalty, np.float32)
    if presence_penalty or frequency_penalty:
        add("presence_penalty", presence_penalty, np.float32)
        values["frequency_penalty"] = np.asarray(frequency_penalty, np.float32)
    eos = _ids("eos_token_id", config.eos_token_id, None)
    if eos.size and (config.min_length or config.min_new_tokens):
        add("min_length", config.min_length or 0, np.int32)
        values["min_new_tokens"] = np.asarray(config.min_new_tokens or 0, np.int32)
        values["eos"] = eos[eos < vocab_size]
    if config.bad_words_ids:
        words = [w for w in config.bad_words_ids if not (len(w) == 1 and w[0] in eos)]
        for word in words:
            _ids("bad_words_ids", word, vocab_size)
        if words:
            width = max(len(w) for w in words) - 1
            prefixes = [[-1] * (width - len(w) + 1) + list(w[:-1]) for w in words]
            add("bad_words", np.asarray(prefixes, np.int32).reshape(len(words), width), np.int32)
            values["bad_words_last"] = np.asarray([w[-1] for w in words], np.int32)
    for name in ("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        if (value := getattr(config, name)) not in (None, []):
            add(name, _ids(name, value, vocab_size), np.int32)
    if "begin_suppress_tokens" in active:
        late = prompt_length == 1 and "forced_bos_token_id" in active
        values["begin_step"] = np.asarray(1 if late else 0, np.int32)
    if config.remove_invalid_values:
        active.add("remove_invalid_values")
    top_k = None
    if config.do_sample:
        if config.temperature not in (None, 1.0):
            add("temperature", config.temperature, np.float32)
        if config.top_p is not None and config.top_p < 1.0:
            add("top_p", config.top_p, np.float32)
        if config.min_p is not None:
            add("min_p", max(config.min_p, 1e-30), np.float32)
        if config.top_k and config.top_k < vocab_size:
            top_k = int(config.top_k)
    if config.renormalize_logits:
        active.add("renormalize_logits")
    spec = SamplingSpec(
        do_sample=bool(config.do_sample),
        top_k=top_k,
        active=tuple(sorted(active)),
        no_repeat_ngram_size=int(config.no_repeat_ngram_size or 0),
    )
    return spec, values


def _reject_unsupported(config: GenerationConfig) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise UnsupportedOptionError(
                f"{name}={value!r} is not implemented by hfax.",
                "An option is honoured or rejected, never ignored.",
                f"Leave {name} out{' (greedy search and sampling are there)' if 'beam' in name else ''}.",
            )


def _check_ranges(config: GenerationConfig, presence_penalty: float, frequency_penalty: float) -> None:
    def check(name: str, value: Any, allowed: str, is_valid: bool) -> None:
        is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not is_valid:
            raise InvalidInputError(f"{name}={value!r}.", f"{name} must be {allowed}.", f"Pass {name} in that range.")

    if config.temperature is not None:
        check("temperature", config.temperature, "0 or more", config.temperature >= 0)
        if config.do_sample and config.temperature == 0:
            raise InvalidInputError(
                "temperature=0 with do_sample=True.",
                "Scores are divided by the temperature.",
                "Pass do_sample=False for the most likely token.",
            )
    if config.top_k is not None:
        check(
            "top_k", config.top_k, "an integer of 0 (off) or more", isinstance(config.top_k, int) and config.top_k >= 0
        )
    if config.top_p is not None:
        check("top_p", config.top_p, "above 0 and at most 1", 0 < config.top_p <= 1)
    if config.min_p is not None:
        check("min_p", config.min_p, "from 0 to 1", 0 <= config.min_p <= 1)
    if config.repetition_penalty is not None:
        check("repetition_penalty", config.repetition_penalty, "above 0", config.repetition_penalty > 0)
    check("presence_penalty", presence_penalty, "a finite number", True)
    check("frequency_penalty", frequency_penalty, "a finite number", True)
    for name in ("no_repeat_ngram_size", "min_length", "min_new_tokens"):
        if (value := getattr(config, name)) is not None:
            check(name, value, "an integer of 0 or more", isinstance(value, int) and value >= 0)
    repeats = config.num_return_sequences
    if repeats is not None:
        check("num_return_sequences", repeats, "an integer of 1 or more", isinstance(repeats, int) and repeats >= 1)
        if repeats > 1 and not config.do_sample:
            raise InvalidInputError(
                f"num_return_sequences={repeats} with do_sample=False.",
                "Greedy search writes the same text each time.",
                "Pass do_sample=True, or num_return_sequences=1.",
            )


def _ids(name: str, value: Any, vocab_size: int | None) -> np.ndarray:
    ids = np.asarray([] if value is None else value, np.int64).reshape(-1)
    if vocab_size is not None and ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise InvalidInputError(
            f"{name} holds ids outside of the vocabulary: {ids.tolist()[:8]}.",
            f"Token ids are 0 to {vocab_size - 1}.",
            "Use ids of this model's tokenizer.",
        )
    return ids.astype(np.int32)
