"""What every set of logits processors must compute: a table of options, and the scores that transformers makes of them.

Rows of a left-padded batch must score as transformers scores each alone, without padding. The table knows neither JAX nor
torch_xla: a backend's test passes a function that processes a batch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tiny_models import tiny_llama_config
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from hfax.generation.sampling_config import SamplingSpec, make_sampling_spec

VOCAB = 48
EOS = [5, 11]
PAD = 3
PROMPT_LENGTHS = (8, 1, 4, 2)
MAX_NEW_TOKENS = 6
FIRST_TIMESTAMP, TEXT_END = 30, 20

NOT_ON_TORCH_XLA = {"timestamps": "Whisper's, whose own `generate` that backend does not run"}
"""Processors that only JAX has, and why."""
NOT_OPTIONS = {
    "prefix_allowed_tokens": "a function of the caller's, in tests/generation/test_custom_processors.py",
    "watermark": "torch's random numbers on the host, in tests/generation/test_options_of_text.py",
}
"""Processors whose values are not made from options, and where they are tested."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Options, and the texts and logits that show what they do.

    Args:
        options: of GenerationConfig.
        extra: options that only hfax has, arguments of `make_sampling_spec`.
        alphabet: tokens of the prompts and drawn tokens; few, so that they repeat.
        drawn: drawn tokens of each row, instead of random ones.
        lift: added to the logits of timestamps.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    alphabet: tuple[int, ...] = (0, 1, 2, PAD)
    drawn: tuple[tuple[int, ...], ...] | None = None
    lift: float = 0.0

    @property
    def config(self) -> GenerationConfig:
        """The options as a GenerationConfig."""
        return GenerationConfig(**{"eos_token_id": EOS, **self.options})


def _sampled(**options: Any) -> Case:
    return Case(options={"do_sample": True, **options})


def _timestamps(lift: float, max_initial: int) -> Case:
    """Whisper's rules, where timestamps together are likelier than any word with a large `lift`."""
    rules = {
        "timestamp_begin": FIRST_TIMESTAMP,
        "timestamp_text_end": TEXT_END,
        "timestamp_max_initial": max_initial,
    }
    drawn = ((33, 5, 36, 36, 7, 38), (5, 33, 33, 6, 7, 8), (33, 33, 5, 6, 34, 9), (40, 7, 44, 44, 8, 45))
    alphabet = (0, FIRST_TIMESTAMP - 1, FIRST_TIMESTAMP + 6)
    return Case(extra={"timestamps": rules}, alphabet=alphabet, drawn=drawn, lift=lift)


_BAD_WORDS = [[7], [1, 2], [PAD, 1], [PAD, PAD, 2], [0, 1, 2, 3], [11], [2, 5]]
_BIASES = [[[7], -2.5], [[1, 2], 4.0], [[0, 2], 1.5], [[PAD, PAD, 1], 3.0], [[2, 9], 0.5]]

_ENCODER = np.asarray([[0, 1, 2, 0, 0, 1, 30, -1], [1] * 8, [2, 0, 2, 0, PAD, 2, -1, -1], [0, 0, 1, 2, PAD, PAD, 1, 7]])
"""What an encoder reads in each row, -1 at padding."""

CASES: Mapping[str, Case] = {
    "nothing": Case(),
    "repetition_penalty": Case(options={"repetition_penalty": 1.7}),
    "repetition_reward": Case(options={"repetition_penalty": 0.6}),
    "presence_penalty": Case(extra={"presence_penalty": 0.5}),
    "frequency_reward": Case(extra={"frequency_penalty": -0.25}),
    "presence_and_frequency_after_repetition": Case(
        options={"repetition_penalty": 2.0}, extra={"presence_penalty": 0.5, "frequency_penalty": 0.25}
    ),
    **{
        f"encoder_no_repeat_{size}": Case(
            options={"encoder_no_repeat_ngram_size": size}, extra={"encoder_ids": _ENCODER}
        )
        for size in (1, 2, 3)
    },
    "encoder_repetition": Case(options={"encoder_repetition_penalty": 1.4}, extra={"encoder_ids": _ENCODER}),
    "encoder_repetition_reward": Case(
        options={"encoder_repetition_penalty": 0.7, "repetition_penalty": 1.2}, extra={"encoder_ids": _ENCODER}
    ),
    "no_repeat_unigrams": Case(options={"no_repeat_ngram_size": 1}),
    "no_repeat_bigrams": Case(options={"no_repeat_ngram_size": 2}),
    "no_repeat_trigrams": Case(options={"no_repeat_ngram_size": 3}),
    "bad_words": Case(options={"bad_words_ids": _BAD_WORDS}),
    "sequence_bias": Case(options={"sequence_bias": _BIASES}),
    "min_length": Case(options={"min_length": 6}),
    "min_new_tokens": Case(options={"min_new_tokens": 3}),
    "min_new_tokens_over_min_length": Case(options={"min_new_tokens": 2, "min_length": 30}),
    "forced_bos": Case(options={"forced_bos_token_id": 4}),
    "forced_eos": Case(options={"forced_eos_token_id": 5}),
    "forced_eos_of_several": Case(options={"forced_eos_token_id": [5, 11]}),
    "remove_invalid_values": Case(options={"remove_invalid_values": True, "bad_words_ids": [[7]]}),
    "exponential_decay": Case(options={"exponential_decay_length_penalty": (2, 1.3)}),
    "suppress_tokens": Case(options={"suppress_tokens": [0, 1, 2]}),
    "begin_suppress_tokens": Case(options={"begin_suppress_tokens": [4, 5, 6]}),
    "begin_suppress_after_forced_bos": Case(options={"begin_suppress_tokens": [4, 5, 6], "forced_bos_token_id": 4}),
    "timestamps": _timestamps(0.0, 4),
    "timestamps_that_may_begin_anywhere": _timestamps(0.0, 1 << 30),
    "timestamps_likelier_than_text": _timestamps(3.0, 4),
    "timestamps_likelier_than_text_that_may_begin_anywhere": _timestamps(3.0, 1 << 30),
    "renormalize": Case(options={"renormalize_logits": True, "suppress_tokens": [1]}),
    "temperature": _sampled(temperature=0.6),
    "top_h": _sampled(top_h=0.4),
    "top_h_after_bans": _sampled(top_h=0.9, temperature=0.5, suppress_tokens=[2, 3]),
    "top_k": _sampled(top_k=5),
    "top_k_past_vocabulary": _sampled(top_k=1000),
    "top_p": _sampled(top_p=0.8),
    "tiny_top_p": _sampled(top_p=1e-6),
    "top_k_top_p": _sampled(top_k=9, top_p=0.7),
    "min_p": _sampled(min_p=0.15),
    "typical_p": _sampled(typical_p=0.6),
    "epsilon_cutoff": _sampled(epsilon_cutoff=0.03),
    "eta_cutoff": _sampled(eta_cutoff=0.05),
    "warpers_after_bans": _sampled(temperature=1.4, top_k=12, top_p=0.9, min_p=0.02, suppress_tokens=[2, 3]),
    "everything": _sampled(
        bad_words_ids=_BAD_WORDS,
        sequence_bias=_BIASES,
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        min_new_tokens=2,
        exponential_decay_length_penalty=(1, 1.1),
        suppress_tokens=[30],
        begin_suppress_tokens=[31],
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        typical_p=0.95,
        epsilon_cutoff=1e-3,
        eta_cutoff=1e-3,
        renormalize_logits=True,
    ),
}


BEAM_CASES: Mapping[str, Case] = {
    "top_k": _sampled(num_beams=2, top_k=1),
    "top_p": _sampled(num_beams=2, top_p=1e-6),
    "top_k_top_p": _sampled(num_beams=2, top_k=9, top_p=1e-6),
    "min_p": _sampled(num_beams=2, min_p=0.99),
    "typical_p": _sampled(num_beams=2, typical_p=1e-6),
    "epsilon_cutoff": _sampled(num_beams=2, epsilon_cutoff=0.9),
    "eta_cutoff": _sampled(num_beams=2, eta_cutoff=0.9),
}
"""Filters that would leave one token: in beam search they leave one more than there are tokens that end a text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The texts and logits of a case.

    Args:
        prompts: [rows, width] int32, padded on the left.
        mask: [rows, width] bool.
        drawn: [rows, steps] int32.
        logits: [steps, rows, vocab] float32.
    """

    prompts: np.ndarray
    mask: np.ndarray
    drawn: np.ndarray
    logits: np.ndarray

    def tokens_at(self, step: int) -> np.ndarray:
        """Prompts and tokens drawn before `step`, and what may stand in the columns behind them: [rows, capacity] int32."""
        texts = np.concatenate([self.prompts, self.drawn[:, :step]], axis=1)
        return np.pad(texts, ((0, 0), (0, MAX_NEW_TOKENS - step + 3)), constant_values=2)


ScoresOf = Callable[[SamplingSpec, Mapping[str, np.ndarray], Batch], np.ndarray]
"""A backend's processors, step by step: takes the values of `make_sampling_spec`, returns [steps, rows, vocab] float32."""


def spec_of(case: Case) -> tuple[SamplingSpec, dict[str, np.ndarray]]:
    """The active processors of a case, and their values."""
    width = max(PROMPT_LENGTHS)
    return make_sampling_spec(
        case.config, vocab_size=VOCAB, prompt_length=width, max_new_tokens=MAX_NEW_TOKENS, **case.extra
    )


def check(name: str, scores_of: ScoresOf, cases: Mapping[str, Case] = CASES) -> None:
    """Assert that a backend's processors make of a case what transformers makes of it."""
    case = cases[name]
    batch = _batch(name, case)
    found = scores_of(*spec_of(case), batch)
    for row, length in enumerate(PROMPT_LENGTHS):
        text = np.concatenate([batch.prompts[row, -length:], batch.drawn[row]])
        extra = dict(case.extra)
        if "encoder_ids" in extra:
            extra["encoder_ids"] = torch.tensor(extra["encoder_ids"][row][extra["encoder_ids"][row] >= 0])[None]
        processors = reference_processors(case.config, length, extra)
        for step in range(MAX_NEW_TOKENS):
            ids = torch.tensor(text[None, : length + step], dtype=torch.int64)
            expected = processors(ids, torch.tensor(batch.logits[step, row][None]))[0].numpy()
            where = f"{name}, row {row}, step {step}"
            np.testing.assert_array_equal(np.isneginf(found[step, row]), np.isneginf(expected), err_msg=where)
            np.testing.assert_allclose(found[step, row], expected, rtol=1e-5, atol=1e-5, err_msg=where)


def _batch(name: str, case: Case) -> Batch:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    rows, width = len(PROMPT_LENGTHS), max(PROMPT_LENGTHS)
    mask = np.arange(width)[None] >= width - np.asarray(PROMPT_LENGTHS)[:, None]
    prompts = np.where(mask, rng.choice(case.alphabet, (rows, width)), PAD).astype(np.int32)
    drawn = rng.choice(case.alphabet, (rows, MAX_NEW_TOKENS)) if case.drawn is None else np.asarray(case.drawn)
    logits = (3 * rng.normal(size=(MAX_NEW_TOKENS, rows, VOCAB))).astype(np.float32)
    logits[..., FIRST_TIMESTAMP:] += case.lift
    if case.config.remove_invalid_values:
        logits[..., 20], logits[..., 21], logits[..., 22] = np.nan, np.inf, -np.inf
    return Batch(prompts=prompts, mask=mask, drawn=drawn.astype(np.int32), logits=logits)


def reference_processors(
    config: GenerationConfig, prompt_length: int, extra: Mapping[str, Any] | None = None
) -> LogitsProcessorList:
    """The processors of transformers' `generate` for one sequence.

    Args:
        config: the options.
        prompt_length: tokens of the prompt, which has no padding.
        extra: see `Case`; `encoder_ids` is a tensor, [1, length].
    """
    config, extra = copy.deepcopy(config), dict(extra or {})
    config.max_length = prompt_length + MAX_NEW_TOKENS
    config._eos_token_tensor = None if config.eos_token_id is None else torch.tensor(config.eos_token_id)
    if config.min_new_tokens is not None:
        config.min_length = prompt_length + config.min_new_tokens
    return _reference_model()._get_logits_processor(
        config,
        input_ids_seq_length=prompt_length,
        encoder_input_ids=extra.pop("encoder_ids", None),
        device="cpu",
        model_kwargs={},
        logits_processor=_further_processors(prompt_length, **extra),
    )


@functools.cache
def _reference_model() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(tiny_llama_config(vocab_size=VOCAB))


def _further_processors(
    prompt_length: int,
    *,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    timestamps: Mapping[str, int] | None = None,
) -> LogitsProcessorList:
    """What transformers takes as objects: it runs them after the penalties and before temperature."""
    found = LogitsProcessorList()
    if presence_penalty or frequency_penalty:
        found.append(_GeneratedPenalty(prompt_length, presence_penalty, frequency_penalty))
    if timestamps is not None:
        rules = types.SimpleNamespace(
            no_timestamps_token_id=timestamps["timestamp_begin"] - 1,
            eos_token_id=timestamps["timestamp_text_end"],
            bos_token_id=None,
            max_initial_timestamp_index=timestamps["timestamp_max_initial"],
        )
        if rules.max_initial_timestamp_index >= VOCAB:
            rules.max_initial_timestamp_index = None
        found.append(WhisperTimeStampLogitsProcessor(rules, begin_index=prompt_length))  # type: ignore[arg-type]
    return found


class _GeneratedPenalty(LogitsProcessor):
    """The formula of OpenAI's API reference, which transformers lacks: μ[j] - c[j]·frequency - (c[j] > 0)·presence.

    https://platform.openai.com/docs/advanced-usage, where c[j] counts token j in the text generated so far.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        changed = scores.clone()
        for row, text in enumerate(input_ids[:, self.prompt_length :].tolist()):
            for token in set(text):
                changed[row, token] -= text.count(token) * self.frequency + self.presence
        return changed  # type: ignore[return-value]
