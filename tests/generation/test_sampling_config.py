"""Options: what shapes a program, what is only a number in it, and what is refused."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.generation.sampling_checks import NEUTRAL_VALUES, WHY, WITHOUT_EFFECT
from hfax.generation.sampling_config import SamplingSpec, make_sampling_spec


def make(*, presence_penalty: float = 0.0, frequency_penalty: float = 0.0, **options: Any):
    config = GenerationConfig()
    for name, value in options.items():
        setattr(config, name, value)
    return make_sampling_spec(
        config,
        vocab_size=100,
        prompt_length=16,
        max_new_tokens=8,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )


def program_key(made: tuple[SamplingSpec, dict[str, np.ndarray]]) -> tuple:
    spec, values = made
    return repr(spec), hash(spec), sorted((name, value.dtype, value.shape) for name, value in values.items())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temperature": 0.5}, {"temperature": 1.0}),
        ({"top_k": 40}, {"top_k": 50}),
        ({"top_p": 0.5}, {"top_p": 0.99}),
        ({"min_p": 0.5}, {"min_p": 0.01}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 2}),
        ({"presence_penalty": 1.0}, {"frequency_penalty": 0.5}),
        ({"suppress_tokens": [1, 2, 3]}, {"suppress_tokens": [4, 5, 6, 7]}),
        ({"bad_words_ids": [[1], [2, 3, 4], [9]]}, {"bad_words_ids": [[1], [2], [3, 4, 5], [7, 7]]}),
        ({"min_new_tokens": 1, "eos_token_id": 2}, {"min_length": 20, "eos_token_id": [7]}),
        ({"forced_eos_token_id": 3}, {"forced_eos_token_id": [5]}),
    ],
    ids=str,
)
def test_other_numbers_share_a_program(one: dict, other: dict):
    assert program_key(make(do_sample=True, **one)) == program_key(make(do_sample=True, **other))


def test_warpers_leave_greedy_search_alone():
    spec, _ = make(do_sample=False, temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, typical_p=0.2, eta_cutoff=0.1)
    assert spec == SamplingSpec(do_sample=False, active=(), num_candidates=0, no_repeat_ngram_size=0)


def test_values_that_ask_for_nothing_activate_nothing():
    spec, values = make(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=1.0,
        min_length=5,  # without an end-of-sequence token
        bad_words_ids=[],
        suppress_tokens=[],
        num_beams=1,
        encoder_repetition_penalty=1.0,
    )
    assert spec.active == ("temperature",)
    assert set(values) == {"prompt_length", "temperature"}


def test_every_field_of_generation_config_is_honoured_rejected_or_without_effect():
    honoured_here = {
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *(
            "repetition_penalty",
            "no_repeat_ngram_size",
            "bad_words_ids",
            "sequence_bias",
            "min_length",
            "min_new_tokens",
        ),
        *("forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
        *("remove_invalid_values", "renormalize_logits", "exponential_decay_length_penalty", "eos_token_id"),
    }
    honoured_here |= {"top_h", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size"}
    honoured_by_generate = {
        *(
            "watermarking_config",
            "guidance_scale",
            "max_length",
            "max_new_tokens",
            "max_time",
            "stop_strings",
            "num_return_sequences",
            "return_dict_in_generate",
        ),
        *("output_scores", "output_logits", "output_hidden_states", "output_attentions"),
        *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
        *("num_beams", "early_stopping", "length_penalty"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"),
    }
    kinds = [honoured_here, honoured_by_generate, set(NEUTRAL_VALUES), set(WITHOUT_EFFECT)]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert set(vars(GenerationConfig())) == set().union(*kinds)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beam_groups", 2),
        ("diversity_penalty", 0.5),
        ("constraints", [object()]),
        ("force_words_ids", [[1]]),
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("token_healing", True),
        ("assistant_early_exit", 2),
        ("is_assistant", True),
        ("use_mtp", True),
        ("speculation_type", "dflash"),
        ("low_memory", True),
        ("prefill_chunk_size", 64),
        ("continuous_batching_config", {}),
        ("cache_config", {"backend": "quanto"}),
        ("cache_implementation", "quantized"),
    ],
)
def test_options_that_hfax_does_not_do_are_refused_by_name(name: str, value: Any):
    with pytest.raises(UnsupportedOptionError) as caught:
        make(**{name: value})
    assert caught.value.what.startswith(f"{name}=")
    assert caught.value.why.startswith(WHY[name])
    assert caught.value.fix == f"Pass {name}={NEUTRAL_VALUES[name][0]!r}."


def test_the_table_of_refused_options_is_tested_whole():
    tested = test_options_that_hfax_does_not_do_are_refused_by_name.pytestmark[0].args[1]
    assert {name for name, _ in tested} == set(NEUTRAL_VALUES) == set(WHY)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.5, "0 or more"),
        ("temperature", float("nan"), "0 or more"),
        ("temperature", float("inf"), "0 or more"),
        ("temperature", "hot", "0 or more"),
        ("top_k", -1, "1 or more"),
        ("top_k", 2.5, "1 or more"),
        ("top_k", True, "1 or more"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.5, "from 0 to 1"),
        ("typical_p", 0.0, "above 0 and at most 1"),
        ("epsilon_cutoff", 1.0, "below 1"),
        ("eta_cutoff", -0.1, "below 1"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", -1.0, "above 0"),
        ("presence_penalty", float("nan"), "finite"),
        ("frequency_penalty", float("inf"), "finite"),
        ("no_repeat_ngram_size", -1, "0 or more"),
        ("min_length", -1, "0 or more"),
        ("min_new_tokens", 1.5, "0 or more"),
        ("num_return_sequences", 0, "1 or more"),
        ("suppress_tokens", [1, 100], "from 0 to 99"),
        ("begin_suppress_tokens", [-1], "from 0 to 99"),
        ("forced_bos_token_id", 100, "from 0 to 99"),
        ("forced_eos_token_id", [3, 1000], "from 0 to 99"),
        ("forced_eos_token_id", 1.5, "token ids"),
        ("bad_words_ids", [[1, 100]], "from 0 to 99"),
        ("bad_words_ids", [[]], "non-empty"),
        ("bad_words_ids", [7], "list of token ids"),
        ("bad_words_ids", "word", "list of token ids"),
        ("sequence_bias", [[[100], 1.0]], "from 0 to 99"),
        ("sequence_bias", [[[1], float("inf")]], "finite"),
        ("sequence_bias", [[1, 2.0]], "[[[token ids], bias], …]"),
        ("exponential_decay_length_penalty", (1,), "(start, factor)"),
        ("exponential_decay_length_penalty", (-1, 1.1), "0 or more"),
        ("exponential_decay_length_penalty", (1, 0.0), "above 0"),
    ],
)
def test_values_out_of_range_are_refused_with_the_range(name: str, value: Any, allowed: str):
    with pytest.raises(InvalidInputError) as caught:
        make(**{name: value})
    assert caught.value.what.startswith(f"{name}=")
    assert allowed in caught.value.why


def test_sampling_at_temperature_zero_points_to_greedy_search():
    with pytest.raises(InvalidInputError, match="do_sample=False"):
        make(do_sample=True, temperature=0.0)


def test_several_sequences_need_sampling():
    with pytest.raises(InvalidInputError, match="do_sample=True"):
        make(num_return_sequences=2)


def test_a_single_end_of_sequence_token_is_no_bad_word():
    spec, values = make(eos_token_id=[5, 6], bad_words_ids=[[5], [6], [5, 6]])
    assert spec.active == ("bad_words_ids",)
    assert values["bad_words_ids_prefixes"].tolist() == [[5]]
    assert values["bad_words_ids_last"].tolist() == [6]


def test_end_of_sequence_ids_outside_the_vocabulary_are_left_out():
    _, values = make(eos_token_id=[5, 100, 5], min_new_tokens=2)
    assert values["min_length_eos"].tolist() == [5]


def test_options_are_checked_without_jax():
    code = "import sys, hfax.generation.sampling_config; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
