"""What callers pass as `logits_processor` and `prefix_allowed_tokens_fn`: what of it becomes an option, and what runs on the host.

Turns transformers' own processors into options of `make_sampling_spec`, which run on the device, and leaves the rest as it is. No
jax; the device functions of a caller are `device_processor`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as theirs

from hfax.errors import UnsupportedOptionError
from hfax.generation.processor_set import CustomProcessors, check_callables


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a processor stands: the length of the prompts that it sees, and that of the longest text, in tokens."""

    prompt_length: int
    max_length: int


@dataclasses.dataclass(frozen=True)
class _Known:
    """One of transformers' processors as an option.

    Args:
        option: the option that makes transformers create it.
        off: values of the option with which it does not.
        read: the options of an instance; None if they do not say all of it.
        is_warper: transformers creates it only for sampling.
    """

    option: str
    off: tuple[Any, ...]
    read: Callable[[Any, Place], dict[str, Any] | None]
    is_warper: bool = False


def _warper(option: str, attribute: str, off: tuple[Any, ...] = (None,)) -> _Known:
    def read(processor: Any, place: Place) -> dict[str, Any] | None:
        plain = getattr(processor, "filter_value", -np.inf) == -np.inf
        plain &= processor.min_tokens_to_keep == 1 if hasattr(processor, "min_tokens_to_keep") else True
        value = getattr(processor, attribute)
        return {option: value.item() if isinstance(value, torch.Tensor) else value} if plain else None

    return _Known(option, off, read, is_warper=True)


def _ids(value: Any) -> list[int]:
    return torch.as_tensor(value).reshape(-1).tolist()


def _decay(processor: Any, place: Place) -> dict[str, Any] | None:
    start = processor.regulation_start - place.prompt_length
    decay = (start, processor.regulation_factor)
    eos = _ids(processor.eos_token_id)
    return {"exponential_decay_length_penalty": decay, "eos_token_id": eos} if start >= 0 else None


def _min_new_tokens(processor: Any, place: Place) -> dict[str, Any] | None:
    same = processor.prompt_length_to_skip == place.prompt_length
    options = {"min_new_tokens": processor.min_new_tokens, "eos_token_id": _ids(processor.eos_token_id)}
    return options if same else None


_KNOWN: dict[type, _Known] = {
    theirs.SequenceBiasLogitsProcessor: _Known(
        "sequence_bias", (None,), lambda p, at: {"sequence_bias": p.sequence_bias}
    ),
    theirs.RepetitionPenaltyLogitsProcessor: _Known(
        "repetition_penalty",
        (None, 1.0),
        lambda p, at: {"repetition_penalty": p.penalty} if p.prompt_ignore_length is None else None,
    ),
    theirs.NoRepeatNGramLogitsProcessor: _Known(
        "no_repeat_ngram_size", (None, 0), lambda p, at: {"no_repeat_ngram_size": p.ngram_size}
    ),
    theirs.NoBadWordsLogitsProcessor: _Known(
        "bad_words_ids", (None,), lambda p, at: {"bad_words_ids": [list(word) for word in p.sequence_bias]}
    ),
    theirs.MinLengthLogitsProcessor: _Known(
        "min_length",
        (None, 0),
        lambda p, at: {"min_length": p.min_length, "eos_token_id": _ids(p.eos_token_id)},
    ),
    theirs.MinNewTokensLengthLogitsProcessor: _Known("min_new_tokens", (None, 0), _min_new_tokens),
    theirs.ForcedBOSTokenLogitsProcessor: _Known(
        "forced_bos_token_id", (None,), lambda p, at: {"forced_bos_token_id": p.bos_token_id}
    ),
    theirs.ForcedEOSTokenLogitsProcessor: _Known(
        "forced_eos_token_id",
        (None,),
        lambda p, at: {"forced_eos_token_id": _ids(p.eos_token_id)} if p.max_length == at.max_length else None,
    ),
    theirs.InfNanRemoveLogitsProcessor: _Known(
        "remove_invalid_values", (None, False), lambda p, at: {"remove_invalid_values": True}
    ),
    theirs.ExponentialDecayLengthPenalty: _Known("exponential_decay_length_penalty", (None,), _decay),
    theirs.SuppressTokensLogitsProcessor: _Known(
        "suppress_tokens", (None,), lambda p, at: {"suppress_tokens": _ids(p.suppress_tokens)}
    ),
    theirs.SuppressTokensAtBeginLogitsProcessor: _Known(
        "begin_suppress_tokens",
        (None,),
        lambda p, at: (
            {"begin_suppress_tokens": _ids(p.begin_suppress_tokens)} if p.begin_index == at.prompt_length else None
        ),
    ),
    theirs.WhisperTimeStampLogitsProcessor: _Known("timestamps", (None,), lambda p, at: {"timestamps": timestamps(p)}),
    theirs.TemperatureLogitsWarper: _warper("temperature", "temperature", (None, 1.0)),
    theirs.TopHLogitsWarper: _warper("top_h", "top_h"),
    theirs.TopKLogitsWarper: _warper("top_k", "top_k", (None, 0)),
    theirs.TopPLogitsWarper: _warper("top_p", "top_p", (None, 1.0)),
    theirs.MinPLogitsWarper: _warper("min_p", "min_p"),
    theirs.TypicalLogitsWarper: _warper("typical_p", "mass", (None, 1.0)),
    theirs.EpsilonLogitsWarper: _warper("epsilon_cutoff", "epsilon", (None, 0.0)),
    theirs.EtaLogitsWarper: _warper("eta_cutoff", "epsilon", (None, 0.0)),
    theirs.LogitNormalization: _Known("renormalize_logits", (None, False), lambda p, at: {"renormalize_logits": True}),
}
"""transformers' processors that hfax has on the device. A subclass of one is a processor of its own."""


def timestamps(processor: theirs.WhisperTimeStampLogitsProcessor) -> dict[str, int]:
    """Whisper's rules in the form that `make_sampling_spec` takes."""
    most = processor.max_initial_timestamp_index
    return {
        "timestamp_begin": processor.timestamp_begin,
        "timestamp_text_end": int(processor.eos_token_id),
        "timestamp_max_initial": 1 << 30 if most is None else int(most),
    }


def option_of(processor: Any, place: Place) -> dict[str, Any] | None:
    """The options that do what one of transformers' processors does; None if there are none."""
    known = _KNOWN.get(type(processor))
    return None if known is None else known.read(processor, place)


def read_processors(
    given: Any, prefix_allowed_tokens_fn: Any, config: GenerationConfig, place: Place, vocab_size: int
) -> CustomProcessors:
    """Sort the processors of a call.

    As in transformers, one of a type that an option creates, too, takes its place: the option in `config` is set to its value.

    Args:
        given: `logits_processor` of `generate`.
        prefix_allowed_tokens_fn: as in `generate`.
        config: the options; changed in place.
        place: where the processors stand.
        vocab_size: of the model's config.

    Raises:
        InvalidInputError: something given is not callable.
        UnsupportedOptionError: the watermark depends on scores; or a processor and an option of its kind are both given, and the
            processor has no option that says the same.
    """
    on_device: list[Any] = []
    on_host: list[Callable[..., Any]] = []
    replaced: set[str] = set()
    for processor in _once_each(check_callables("logits_processor", given)):
        known, options = _KNOWN.get(type(processor)), option_of(processor, place)
        if known is not None and known.option not in replaced and _is_on(known, config):
            _replace(processor, known, options, config)
            replaced.add(known.option)
        elif on_host or (options is None and not hasattr(processor, "keyed")):
            on_host.append(processor)
        else:
            on_device.append(processor if options is None else {**options, "do_sample": known and known.is_warper})
    if prefix_allowed_tokens_fn is not None:
        check_callables("prefix_allowed_tokens_fn", [prefix_allowed_tokens_fn])
    return CustomProcessors(
        on_device=tuple(on_device),
        on_host=tuple(on_host),
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        watermark=_watermark(config, vocab_size),
    )


def reject_beside_beams(custom: CustomProcessors, criteria: Sequence[Any], config: GenerationConfig) -> None:
    """Raise for what beam search cannot be combined with.

    Raises:
        UnsupportedOptionError: there are beams, and processors or criteria that the host runs, or a time limit.
    """
    if (num_beams := config.num_beams or 1) == 1:
        return
    if config.max_time is not None:
        raise UnsupportedOptionError(
            f"num_beams={num_beams} with max_time={config.max_time}.",
            "Which beams end their texts is decided on the device, which has no clock.",
            "Pass max_time=None, or num_beams=1.",
        )
    if custom.waits_for_host or criteria:
        raise UnsupportedOptionError(
            f"num_beams={num_beams} with a logits processor or a stopping criterion in Python.",
            "The beams of a step are chosen on the device.",
            "Use options or hfax.device_processor, or num_beams=1.",
        )


def _watermark(config: GenerationConfig, vocab_size: int) -> theirs.WatermarkLogitsProcessor | None:
    if config.watermarking_config is None:
        return None
    processor = config.watermarking_config.construct_processor(vocab_size, "cpu")
    if type(processor) is theirs.WatermarkLogitsProcessor and processor.seeding_scheme == "lefthash":
        return processor
    raise UnsupportedOptionError(
        f"watermarking_config is a {type(config.watermarking_config).__name__} whose watermark depends on the scores.",
        "hfax's watermark is drawn from the text before a token, while the device computes the token's scores.",
        'Pass WatermarkingConfig(seeding_scheme="lefthash").',
    )


def _once_each(given: Sequence[Any]) -> list[Any]:
    """As transformers merges them: one that stands there twice runs once."""
    kept: list[Any] = []
    for processor in given:
        if not any(processor is other for other in kept):
            kept.append(processor)
    return kept


def _is_on(known: _Known, config: GenerationConfig) -> bool:
    value = getattr(config, known.option, None)
    return not any(value is off or value == off for off in known.off) and bool(config.do_sample or not known.is_warper)


def _replace(processor: Any, known: _Known, options: dict[str, Any] | None, config: GenerationConfig) -> None:
    eos = (options or {}).get("eos_token_id")
    if options is None or (eos is not None and eos != _ids([] if config.eos_token_id is None else config.eos_token_id)):
        raise UnsupportedOptionError(
            f"logits_processor has a {type(processor).__name__}, and {known.option} is set.",
            "It would take the option's place, which only a processor can do that an option describes.",
            f"Remove it, or pass {known.option}=None.",
        )
    setattr(config, known.option, options[known.option])
