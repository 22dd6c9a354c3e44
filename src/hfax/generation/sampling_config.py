"""Generation options, split into static ones that shape a program and values passed to it as arguments.

Turns a resolved `GenerationConfig` into a hashable `SamplingSpec` (which processors are active, their static sizes) and a flat
dict of host arrays (temperature, penalties, token lists, …) that a program takes as arguments, so another temperature, or another
list of similar length, does not recompile. No jax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.errors import UnsupportedOptionError
from hfax.generation.beam_config import num_beams
from hfax.generation.sampling_checks import (
    check_biases,
    check_decay,
    check_ids,
    check_ranges,
    check_words,
    reject_unsupported,
)
from hfax.programs.buckets import power_of_two

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingSpec:
    """The processors of a program. Every field is part of the program's key.

    Args:
        do_sample: sample; else take the highest score.
        active: names of the active processors, sorted; they run in the order of `logits_processors.PROCESSORS`.
        num_candidates: candidates for top-k, a power of two so that values of `top_k` share programs; 0 without top-k.
        no_repeat_ngram_size: n-gram size; 0 to disable.
        min_tokens_to_keep: tokens that every sampling filter keeps: more than one in beam search, where all of a beam's tokens may
            end its text.
        encoder_no_repeat_ngram_size: n-gram size; 0 to disable.
        custom: the caller's processors, between the penalties and the warpers: a `SamplingSpec` for each of transformers' own,
            a `DeviceProcessor` for a function of JAX arrays.
        visits_host: further processors of the caller are Python that runs on the host, after `custom`.
    """

    do_sample: bool
    active: tuple[str, ...]
    num_candidates: int
    no_repeat_ngram_size: int
    min_tokens_to_keep: int = 1
    encoder_no_repeat_ngram_size: int = 0
    custom: tuple[Any, ...] = ()
    visits_host: bool = False

    @property
    def penalties(self) -> frozenset[str]:
        """The active processors before the caller's."""
        return frozenset(self.active) - WARPERS

    @property
    def warpers(self) -> frozenset[str]:
        """The active processors after the caller's."""
        return frozenset(self.active) & WARPERS


WARPERS = frozenset(
    {
        *(
            "temperature",
            "top_h",
            "top_k",
            "top_k_top_p",
            "top_p",
            "min_p",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
        ),
        *("watermark", "renormalize_logits"),
    }
)
"""Processors that run after the caller's, in transformers' order."""


def make_sampling_spec(
    config: GenerationConfig,
    *,
    vocab_size: int,
    prompt_length: int,
    max_new_tokens: int,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    timestamps: Mapping[str, int] | None = None,
    encoder_ids: np.ndarray | None = None,
) -> tuple[SamplingSpec, dict[str, np.ndarray]]:
    """Check the generation options of a call and split them into spec and values.

    Args:
        config: the options; None means transformers' default. As in transformers, `min_new_tokens` overrides `min_length`.
        vocab_size: vocabulary size of the logits; token ids must be below it, but end-of-sequence ids beyond it are dropped.
        prompt_length: length of the padded prompts, in tokens.
        max_new_tokens: maximum number of new tokens; a forced end token is the last of them.
        presence_penalty: subtracted from the score of each token already generated.
        frequency_penalty: subtracted from a token's score once per earlier occurrence.
        timestamps: Whisper's timestamp rules: `timestamp_begin`, the first timestamp token (the token before it is banned),
            `timestamp_text_end`, the end-of-sequence token, and `timestamp_max_initial`, the maximum index of the first timestamp.
        encoder_ids: [prompts, length], what the encoder reads (for decoders the prompts), -1 at padding; for `encoder_…` options.

    Returns:
        The spec, and the values by name: scalars, or id lists padded with `vocab_size` to a power-of-two length.

    Raises:
        InvalidInputError: a value is out of range.
        UnsupportedOptionError: hfax does not implement an option.
    """
    reject_unsupported(config)
    check_ranges(config, {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty})
    eos = _eos_ids(config, vocab_size)
    found = _Processors(vocab_size)
    found.values["prompt_length"] = np.asarray(prompt_length, np.int32)
    _add_penalties(found, config, presence_penalty, frequency_penalty)
    _add_encoder(found, config, encoder_ids)
    _add_sequences(found, config, eos)
    _add_lengths(found, config, eos, max_new_tokens)
    _add_token_lists(found, config)
    if timestamps is not None:
        found.add("timestamps", **timestamps)
    at_least = 1 + max(_num_eos(config), 1) if num_beams(config) > 1 else 1
    num_candidates = _add_warpers(found, config, at_least) if config.do_sample else 0
    for name in ("remove_invalid_values", "renormalize_logits"):
        if getattr(config, name):
            found.add(name)
    spec = SamplingSpec(
        do_sample=bool(config.do_sample),
        active=tuple(sorted(found.active)),
        num_candidates=num_candidates,
        no_repeat_ngram_size=int(config.no_repeat_ngram_size or 0),
        min_tokens_to_keep=at_least if config.do_sample else 1,
        encoder_no_repeat_ngram_size=int(config.encoder_no_repeat_ngram_size or 0),
    )
    return spec, found.values


class _Processors:
    """Collects the names of active processors and their values."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.active: set[str] = set()
        self.values: dict[str, np.ndarray] = {}

    def add(self, name: str, **values: Any) -> None:
        """Activate `name`. Floats become float32, integers int32, lists of ids arrays padded to a power-of-two length."""
        self.active.add(name)
        for key, value in values.items():
            if isinstance(value, list):
                padding = [self.vocab_size] * (power_of_two(len(value)) - len(value))
                self.values[key] = np.asarray(value + padding, np.int32)
            else:
                self.values[key] = np.asarray(value, np.int32 if isinstance(value, int) else np.float32)

    def add_sequences(self, name: str, sequences: list[list[int]], **values: list[float]) -> None:
        """Activate `name` for sequences of ids, split into prefixes ([words, width], left-padded with -1) and last ids."""
        width = max(len(sequence) for sequence in sequences) - 1
        prefixes = np.full((power_of_two(len(sequences)), power_of_two(width) if width else 0), -1, np.int32)
        for row, sequence in enumerate(sequences):
            if len(sequence) > 1:
                prefixes[row, 1 - len(sequence) :] = sequence[:-1]
        self.add(name, **{f"{name}_last": [sequence[-1] for sequence in sequences]})
        self.values[f"{name}_prefixes"] = prefixes
        for key, numbers in values.items():
            self.values[key] = np.zeros(len(prefixes), np.float32)
            self.values[key][: len(numbers)] = numbers


def _eos_ids(config: GenerationConfig, vocab_size: int) -> list[int]:
    ids = np.unique(np.asarray([] if config.eos_token_id is None else config.eos_token_id, np.int64))
    return ids[(ids >= 0) & (ids < vocab_size)].tolist()


def _num_eos(config: GenerationConfig) -> int:
    return 0 if config.eos_token_id is None else int(np.size(config.eos_token_id))


def _add_penalties(found: _Processors, config: GenerationConfig, presence: float, frequency: float) -> None:
    if config.repetition_penalty not in (None, 1.0):
        found.add("repetition_penalty", repetition_penalty=float(config.repetition_penalty))
    if presence or frequency:
        found.add("presence_frequency_penalty", presence_penalty=float(presence), frequency_penalty=float(frequency))
    if config.no_repeat_ngram_size:
        found.add("no_repeat_ngram_size")


def _add_encoder(found: _Processors, config: GenerationConfig, encoder_ids: np.ndarray | None) -> None:
    options = {"encoder_repetition_penalty": (None, 1.0), "encoder_no_repeat_ngram_size": (None, 0)}
    active = [name for name, off in options.items() if getattr(config, name) not in off]
    if not active:
        return
    if encoder_ids is None:
        raise UnsupportedOptionError(
            f"{active[0]}={getattr(config, active[0])!r} for a model that reads no token ids.",
            "It compares what is written with the ids that the encoder reads.",
            f"Pass {active[0]}=None.",
        )
    for name in active:
        found.add(name)
    found.values["encoder_ids"] = np.where(encoder_ids < 0, found.vocab_size, encoder_ids).astype(np.int32)
    found.values["encoder_repetition_penalty"] = np.asarray(config.encoder_repetition_penalty or 1.0, np.float32)


def _add_sequences(found: _Processors, config: GenerationConfig, eos: list[int]) -> None:
    if config.sequence_bias is not None:
        sequences, biases = check_biases(config.sequence_bias, found.vocab_size)
        if sequences:
            found.add_sequences("sequence_bias", sequences, sequence_bias=biases)
    if config.bad_words_ids is not None:
        words = check_words("bad_words_ids", config.bad_words_ids, found.vocab_size)
        words = [word for word in words if not (len(word) == 1 and word[0] in eos)]
        if words:
            found.add_sequences("bad_words_ids", words)


def _add_lengths(found: _Processors, config: GenerationConfig, eos: list[int], max_new_tokens: int) -> None:
    new_tokens = config.min_new_tokens
    length = config.min_length or 0 if new_tokens is None else 0
    if eos and (length or new_tokens):
        found.add("min_length", min_length=int(length), min_new_tokens=int(new_tokens or 0), min_length_eos=eos)
    if config.exponential_decay_length_penalty is not None:
        start, factor = check_decay(config.exponential_decay_length_penalty)
        if eos:
            found.add(
                "exponential_decay_length_penalty",
                decay_start=start,
                decay_log_factor=math.log(factor),
                decay_eos=eos,
            )
    if config.forced_eos_token_id is not None:
        ids = check_ids("forced_eos_token_id", config.forced_eos_token_id, found.vocab_size)
        found.add("forced_eos_token_id", forced_eos_token_id=ids, last_step=int(max_new_tokens) - 1)


def _add_token_lists(found: _Processors, config: GenerationConfig) -> None:
    for name in ("forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens"):
        value = getattr(config, name)
        if value is not None and (ids := check_ids(name, value, found.vocab_size)):
            found.add(name, **{name: ids})


def _add_warpers(found: _Processors, config: GenerationConfig, at_least: int) -> int:
    """Add temperature, top-k, top-p and similar filters that keep `at_least` tokens; returns top-k's number of candidates."""
    temperature = 1.0 if config.temperature is None else float(config.temperature)
    found.add("temperature", temperature=temperature)
    if config.top_h is not None:
        found.add("top_h", top_h=float(config.top_h))
    top_k = max(int(config.top_k), at_least) if config.top_k else 0
    has_top_k = 0 < top_k < found.vocab_size
    has_top_p = config.top_p is not None and config.top_p < 1
    if has_top_k:
        found.add("top_k_top_p" if has_top_p else "top_k", top_k=top_k)
    elif has_top_p:
        found.add("top_p")
    if has_top_p:
        found.values["top_p"] = np.asarray(config.top_p, np.float32)
    if config.min_p:
        found.add("min_p", log_min_p=math.log(config.min_p))
    if config.typical_p is not None and config.typical_p < 1:
        found.add("typical_p", typical_p=float(config.typical_p))
    for name in ("epsilon_cutoff", "eta_cutoff"):
        if getattr(config, name):
            found.add(name, **{name: float(getattr(config, name))})
    return power_of_two(top_k) if has_top_k else 0
