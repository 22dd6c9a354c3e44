"""Which generation options hfax supports, and the allowed values of each. Only checks; no jax, no device.

Every field of transformers' `GenerationConfig` is in one of three groups: supported (here, in `sampling_config`, or by
`generate`), in `NEUTRAL_VALUES` and rejected with any other value, or in `WITHOUT_EFFECT`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hfax.errors import InvalidInputError, UnsupportedOptionError

if TYPE_CHECKING:
    from transformers import GenerationConfig

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (1, None),
    "diversity_penalty": (0.0, None),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "token_healing": (False, None),
    "assistant_early_exit": (None,),
    "is_assistant": (False, None),
    "use_mtp": (False, None),
    "speculation_type": (None,),
    "low_memory": (False, None),
    "prefill_chunk_size": (None,),
    "continuous_batching_config": (None,),
    "cache_config": (None,),
    "cache_implementation": (
        None, "static", "dynamic", "dynamic_full", "hybrid", "hybrid_chunked", "sliding_window"
    ),
}  # fmt: skip
"""Options that hfax does not implement, with their no-op values (for the cache, those that match what hfax does anyway)."""

_MOVED = "It moved from transformers to code on the Hub ({}) that hfax does not run."
_OTHER_LOOP = "It is another way of choosing tokens, which hfax's loop does not have."
_DRAFTS = "hfax drafts with prompt_lookup_num_tokens or another model as assistant_model."
WHY: dict[str, str] = {
    "num_beam_groups": _MOVED.format("transformers-community/group-beam-search"),
    "diversity_penalty": "It separates groups of beams. " + _MOVED.format("transformers-community/group-beam-search"),
    "constraints": _MOVED.format("transformers-community/constrained-beam-search"),
    "force_words_ids": _MOVED.format("transformers-community/constrained-beam-search"),
    "penalty_alpha": _OTHER_LOOP,
    "dola_layers": _OTHER_LOOP,
    "token_healing": "It changes the end of the prompt by its text; tokenize the prompt without a partial last word.",
    "assistant_early_exit": _DRAFTS,
    "is_assistant": _DRAFTS,
    "use_mtp": _DRAFTS,
    "speculation_type": _DRAFTS,
    "low_memory": "A program's memory is fixed when it is compiled; a smaller batch or dtype needs less.",
    "prefill_chunk_size": "The prompt is read at once; hfax.Engine reads prompts in chunks.",
    "continuous_batching_config": "hfax.Engine batches continuously and has its own EngineConfig.",
    "cache_config": "The size of hfax's cache follows from the call, and kv_cache_dtype='fp8' holds it in 8 bits.",
    "cache_implementation": "hfax's cache is of fixed size, on the device; kv_cache_dtype='fp8' holds it in 8 bits.",
}
"""Why an option of `NEUTRAL_VALUES` is not implemented, and what is there instead."""

WITHOUT_EFFECT = frozenset(
    {
        # how many tokens an assistant model drafts at a time, which changes no output; hfax drafts num_assistant_tokens
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_ensemble_weight"),
        *(
            "assistant_lookbehind",
            "target_lookbehind",
        ),  # for assistants with another tokenizer, which hfax does not support
        *("use_cache", "max_cache_len"),  # the tokens are the same; hfax sizes its own cache
        *("compile_config", "disable_compile"),  # for torch.compile
        *("transformers_version", "_from_model_config"),
    }
)
"""Options that change no output token unless combined with a rejected one."""

_Rule = tuple[str, Callable[[Any], bool]]

_COUNT: _Rule = ("an integer of 0 or more", lambda n: _is_integer(n) and n >= 0)
_POSITIVE: _Rule = ("an integer of 1 or more", lambda n: _is_integer(n) and n >= 1)
_ABOVE_ZERO: _Rule = ("a number above 0", lambda x: x > 0)
_FINITE: _Rule = ("a finite number", lambda x: True)

_RULES: dict[str, _Rule] = {
    "temperature": ("a number of 0 or more (above 0 with do_sample=True)", lambda x: x >= 0),
    "top_k": ("an integer of 1 or more, or 0 for all tokens", _COUNT[1]),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "typical_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "epsilon_cutoff": ("from 0 (off) to below 1", lambda x: 0 <= x < 1),
    "eta_cutoff": ("from 0 (off) to below 1", lambda x: 0 <= x < 1),
    "top_h": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "repetition_penalty": _ABOVE_ZERO,
    "encoder_repetition_penalty": _ABOVE_ZERO,
    "encoder_no_repeat_ngram_size": _COUNT,
    "guidance_scale": _FINITE,
    "presence_penalty": _FINITE,
    "frequency_penalty": _FINITE,
    "no_repeat_ngram_size": _COUNT,
    "min_length": _COUNT,
    "min_new_tokens": _COUNT,
    "num_return_sequences": _POSITIVE,
    "num_beams": _POSITIVE,
    "length_penalty": _FINITE,
    "prompt_lookup_num_tokens": _POSITIVE,
    "max_matching_ngram_size": _POSITIVE,
    "num_assistant_tokens": _POSITIVE,
}


def reject_unsupported(config: GenerationConfig) -> None:
    """Raise for the first option that hfax does not implement.

    Raises:
        UnsupportedOptionError: names the option.
    """
    for name, neutral in NEUTRAL_VALUES.items():
        value = getattr(config, name, None)
        if not any(value is n or (n is not None and value == n) for n in neutral):
            raise UnsupportedOptionError(
                f"{name}={value!r} is not implemented by hfax.",
                f"{WHY[name]} It was passed to generate() or set in the checkpoint's generation_config.json.",
                f"Pass {name}={neutral[0]!r}.",
            )


def check_ranges(config: GenerationConfig, extra: dict[str, float]) -> None:
    """Raise for the first option out of range, whether or not sampling is on.

    Args:
        config: the options.
        extra: options that GenerationConfig lacks.

    Raises:
        InvalidInputError: names the option, its value and the allowed range.
    """
    for name, (allowed, is_allowed) in _RULES.items():
        value = extra[name] if name in extra else getattr(config, name, None)
        if value is not None and not (_is_finite_number(value) and is_allowed(value)):
            reject_value(name, value, f"{name} must be {allowed}.")
    if config.do_sample and config.temperature == 0:
        raise InvalidInputError(
            "temperature=0 with do_sample=True.",
            "Logits are divided by the temperature, which must be above 0 for sampling.",
            "Pass do_sample=False for greedy decoding.",
        )
    repeats, beams = config.num_return_sequences, config.num_beams or 1
    _check_beams(config)
    if beams == 1 and repeats is not None and repeats > 1 and not config.do_sample:
        raise InvalidInputError(
            f"num_return_sequences={repeats} with do_sample=False.",
            "Greedy search returns the same sequence each time.",
            "Pass do_sample=True, num_beams, or num_return_sequences=1.",
        )


def _check_beams(config: GenerationConfig) -> None:
    repeats, beams = config.num_return_sequences or 1, config.num_beams or 1
    if 1 < beams < repeats:
        raise InvalidInputError(
            f"num_return_sequences={repeats} with num_beams={beams}.",
            "Beam search ends with as many texts as there are beams.",
            f"Pass num_return_sequences={beams} or less, or more beams.",
        )
    if config.early_stopping not in (None, True, False, "never"):
        reject_value("early_stopping", config.early_stopping, 'early_stopping must be True, False or "never".')


def check_ids(name: str, value: Any, vocab_size: int) -> list[int]:
    """Token ids of an option, given as an int or a sequence, as a list.

    Raises:
        InvalidInputError: an id is not an integer, or is outside the vocabulary.
    """
    ids = np.asarray(value).reshape(-1).tolist() if isinstance(value, (int, np.ndarray)) else _as_list(name, value)
    for token in ids:
        if not _is_integer(token) or not 0 <= token < vocab_size:
            reject_value(
                name,
                value,
                f"{name} contains {token!r}; token ids are integers from 0 to {vocab_size - 1}.",
                "Use ids from this model's tokenizer.",
            )
    return [int(token) for token in ids]


def check_words(name: str, words: Any, vocab_size: int) -> list[list[int]]:
    """Words of an option, each given as a sequence of token ids.

    Raises:
        InvalidInputError: not a list of non-empty lists of token ids in the vocabulary.
    """
    words = _as_list(name, words)
    if any(not isinstance(word, Sequence) or isinstance(word, str) or len(word) == 0 for word in words):
        reject_value(name, words, f"{name} must be a list of words, each a non-empty list of token ids.")
    return [check_ids(name, list(word), vocab_size) for word in words]


def check_biases(sequence_bias: Any, vocab_size: int) -> tuple[list[list[int]], list[float]]:
    """The sequences of `sequence_bias` ({(ids): bias} or [[[ids], bias], …]) and their biases.

    Raises:
        InvalidInputError: the format is wrong, an id is outside the vocabulary, or a bias is NaN or plus infinity.
    """
    try:
        pairs = sequence_bias.items() if isinstance(sequence_bias, dict) else [(k, v) for k, v in sequence_bias]
        biases = {tuple(sequence): float(bias) for sequence, bias in pairs}
    except (TypeError, ValueError):
        reject_value(
            "sequence_bias", sequence_bias, "sequence_bias must be [[[token ids], bias], …] or {(token ids): bias}."
        )
    for bias in biases.values():
        if not bias < math.inf:
            reject_value("sequence_bias", bias, "A bias must be finite, or minus infinity to ban the sequence.")
    return check_words("sequence_bias", list(biases), vocab_size), list(biases.values())


def check_decay(penalty: Any) -> tuple[int, float]:
    """Start and factor of `exponential_decay_length_penalty`.

    Raises:
        InvalidInputError: not a pair of a non-negative integer and a number above 0.
    """
    name = "exponential_decay_length_penalty"
    is_pair = isinstance(penalty, Sequence) and len(penalty) == 2 and all(map(_is_finite_number, penalty))
    if not (is_pair and _COUNT[1](penalty[0]) and penalty[1] > 0):
        reject_value(name, penalty, f"{name} must be (start, factor): {_COUNT[0]}, and {_ABOVE_ZERO[0]}.")
    return int(penalty[0]), float(penalty[1])


def reject_value(name: str, value: Any, why: str, fix: str | None = None) -> NoReturn:
    """Raise `InvalidInputError` for an option's value."""
    raise InvalidInputError(f"{name}={_shortened(value)}.", why, fix or f"Change {name}, or remove it.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _as_list(name: str, value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, (Sequence, set, frozenset)):
        reject_value(name, value, f"{name} must be a list of token ids.")
    return list(value)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
