"""What callers pass as Python to `generate`: processors, allowed prefixes and criteria, against transformers on torch."""

import time
from typing import Any

import generation_pairs
import jax.numpy as jnp
import pytest
import torch
import transformers
from generation_pairs import BATCH, CONFIGS, GREEDY, VOCAB, agree, batch_of
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

import hfax
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.generation import host_processors

pairs = generation_pairs.pairs


class Favour(processors.LogitsProcessor):
    """Raises tokens by how often they stand in the text, padding included, and keeps what it has seen."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.dtype == torch.int64
        self.seen.append(input_ids)
        return scores + torch.nn.functional.one_hot(input_ids, scores.shape[1]).sum(dim=1) * 1.5


def in_place(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, input_ids[0, -1]] -= 5.0
    return scores


@pytest.mark.parametrize("name", CONFIGS)
def test_a_python_processor_sees_and_changes_what_it_does_in_transformers(pairs: Any, name: str) -> None:
    model, plain = pairs(name)
    ours, theirs = Favour(), Favour()
    options = {**GREEDY, "repetition_penalty": 1.2}
    mine = model.generate(**batch_of(name), **options, logits_processor=LogitsProcessorList([ours, in_place]))
    other = plain.generate(**batch_of(name), **options, logits_processor=LogitsProcessorList([theirs, in_place]))
    agree(mine, other)
    assert [s.tolist() for s in ours.seen] == [s.tolist() for s in theirs.seen]


_BIASED = {(5,): 2.0, (17, 40): 4.0, (3,): -3.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: [processors.TemperatureLogitsWarper(0.5), processors.TopKLogitsWarper(20)],
        lambda: [processors.TopPLogitsWarper(0.7), processors.MinPLogitsWarper(0.01)],
        lambda: [processors.TypicalLogitsWarper(0.9), processors.EpsilonLogitsWarper(1e-3)],
        lambda: [processors.EtaLogitsWarper(1e-3), processors.LogitNormalization()],
        lambda: [processors.NoRepeatNGramLogitsProcessor(2), processors.SequenceBiasLogitsProcessor(_BIASED)],
        lambda: [processors.NoBadWordsLogitsProcessor([[8], [7, 9]]), processors.SuppressTokensLogitsProcessor([4])],
        lambda: [processors.SuppressTokensAtBeginLogitsProcessor([8, 9, 10], 6)],
        lambda: [processors.MinNewTokensLengthLogitsProcessor(6, 3, [8, 9])],
        lambda: [processors.ForcedEOSTokenLogitsProcessor(13, [8]), processors.InfNanRemoveLogitsProcessor()],
        lambda: [processors.ExponentialDecayLengthPenalty((2, 1.3), [8], 6)],
        lambda: [processors.RepetitionPenaltyLogitsProcessor(1.4)] * 2,
    ],
)  # fmt: skip
def test_processors_of_transformers_run_on_the_device(pairs: Any, make: Any, monkeypatch: Any) -> None:
    model, plain = pairs("llama")
    row = {n: t[1:2] for n, t in BATCH.items()}
    theirs = plain.generate(**row, **GREEDY, logits_processor=LogitsProcessorList(make()))
    monkeypatch.setattr(host_processors.HostProcessors, "process", None)
    agree(model.generate(**row, **GREEDY, logits_processor=make()), theirs)


@pytest.mark.parametrize(
    ("processor", "options"),
    [
        (processors.RepetitionPenaltyLogitsProcessor(1.7), {"repetition_penalty": 1.1}),
        (processors.NoRepeatNGramLogitsProcessor(1), {"no_repeat_ngram_size": 3}),
        (processors.SuppressTokensLogitsProcessor([8]), {"suppress_tokens": [9]}),
    ],
)
def test_a_processor_takes_the_place_of_the_option_of_its_kind(pairs: Any, processor: Any, options: Any) -> None:
    model, plain = pairs("llama")
    row = {n: t[1:2] for n, t in BATCH.items()}
    theirs = plain.generate(**row, **GREEDY, **options, logits_processor=LogitsProcessorList([processor]))
    agree(model.generate(**row, **GREEDY, **options, logits_processor=[processor]), theirs)


def test_one_that_no_option_describes_is_refused_beside_the_option(pairs: Any) -> None:
    kept = processors.TopKLogitsWarper(5, min_tokens_to_keep=7, filter_value=-5.0)
    with pytest.raises(UnsupportedOptionError, match="TopKLogitsWarper, and top_k is set"):
        pairs("llama")[0].generate(**BATCH, do_sample=True, top_k=9, max_new_tokens=2, logits_processor=[kept])


@hfax.device_processor
def no_doubles(input_ids: Any, scores: Any) -> Any:
    """Bans the last token, and raises those that stand anywhere before it."""
    ids = jnp.arange(scores.shape[1])
    seen = (input_ids[:, :, None] == ids).any(axis=1)
    return jnp.where(ids[None] == input_ids[:, -1:], -jnp.inf, scores + seen)


def no_doubles_in_torch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The same, for prompts without padding."""
    scores = scores + (torch.nn.functional.one_hot(input_ids, scores.shape[1]).sum(dim=1) > 0)
    return scores.scatter(1, input_ids[:, -1:], -torch.inf)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("after", [[], [in_place]])
def test_a_function_of_jax_arrays_runs_inside_the_program(pairs: Any, name: str, after: list[Any]) -> None:
    model, plain = pairs(name)
    row = {n: t[1:2] for n, t in BATCH.items()}
    theirs = plain.generate(**row, **GREEDY, logits_processor=LogitsProcessorList([no_doubles_in_torch, *after]))
    agree(model.generate(**row, **GREEDY, logits_processor=[no_doubles, *after]), theirs)


def test_a_function_of_jax_arrays_sees_no_padding(pairs: Any) -> None:
    model, _ = pairs("llama")
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "logits_processor": [no_doubles]}
    together = model.generate(**BATCH, **options)
    for row, mask in enumerate(BATCH["attention_mask"]):
        alone = model.generate(BATCH["input_ids"][row : row + 1, mask.bool()], **options)
        assert together[row, 6:].tolist() == alone[0, -7:].tolist()


def test_programs_of_other_device_functions_are_others(pairs: Any) -> None:
    model, _ = pairs("llama")
    drawn = []
    for token in (3, 4, 3):
        bias = jnp.zeros(VOCAB).at[token].set(1e4)
        processor = hfax.device_processor(lambda ids, scores, bias=bias: scores + bias)
        drawn.append(model.generate(**BATCH, max_new_tokens=1, do_sample=False, logits_processor=[processor])[0, -1])
    assert drawn == [3, 4, 3]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ([3], "holds \\[3\\]"),
        (in_place, "takes callables, in a list"),
        ([lambda ids, scores: scores[:1]], "returns shape"),
        ([lambda ids, scores: None], "returns NoneType"),
        ([hfax.device_processor(lambda ids, scores: scores[0])], "returns ShapeDtypeStruct"),
        ([hfax.device_processor(lambda ids, scores: scores if ids[0, 0] else -scores)], "cannot be traced"),
    ],
)
def test_what_is_no_processor_is_named(pairs: Any, given: Any, what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        pairs("llama")[0].generate(**BATCH, max_new_tokens=2, do_sample=False, logits_processor=given)


def test_python_on_the_host_is_announced_once(pairs: Any, caplog: pytest.LogCaptureFixture) -> None:
    def once(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    for _ in range(2):
        pairs("llama")[0].generate(**BATCH, max_new_tokens=2, do_sample=False, logits_processor=[once])
    assert [r.message.split(" runs on")[0] for r in caplog.records] == ["The logits processor once"]


# Allowed prefixes


def neighbours(prompt: int, ids: torch.Tensor) -> list[int]:
    last = int(ids[-1])
    return [(last + n + prompt) % VOCAB for n in range(1, 6)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("further", [{}, {"forced_eos_token_id": 9}, {"suppress_tokens": [1, 8, 9, 10, 11, 12]}])
def test_prefix_allowed_tokens_fn_is_transformers(pairs: Any, name: str, further: dict[str, Any]) -> None:
    model, plain = pairs(name)
    options = {**GREEDY, **further, "prefix_allowed_tokens_fn": neighbours}
    agree(model.generate(**batch_of(name), **options), plain.generate(**batch_of(name), **options))


def test_sampled_sequences_of_a_prompt_keep_to_its_prefixes(pairs: Any) -> None:
    model, _ = pairs("llama")
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3, "seed": 5}
    out = model.generate(**BATCH, **options, prefix_allowed_tokens_fn=neighbours, logits_processor=[in_place])
    assert len({tuple(row) for row in out.tolist()}) > 3
    for index, row in enumerate(out):
        for column in range(6, 12):
            assert int(row[column]) in neighbours(index // 3, row[:column])


def test_an_empty_list_of_allowed_tokens_is_an_error(pairs: Any) -> None:
    with pytest.raises(InvalidInputError, match="allows no token"):
        pairs("llama")[0].generate(**BATCH, max_new_tokens=2, prefix_allowed_tokens_fn=lambda prompt, ids: [])


# Stopping


def sums_up(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    """Ends rows at different lengths."""
    assert len(scores) == input_ids.shape[1] - 6
    return input_ids[:, 6:].sum(dim=1) > 150


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("make", "further"),
    [
        (lambda: [sums_up], {"eos_token_id": 96}),
        (lambda: [lambda ids, scores: ids.shape[1] >= 9], {}),
        (lambda: [criteria.MaxLengthCriteria(10)], {"max_new_tokens": 3}),
        (lambda: [criteria.EosTokenCriteria([*range(5, 60, 2)])], {"eos_token_id": 3}),
        (lambda: [criteria.MaxTimeCriteria(0.0, initial_timestamp=0.0)], {}),
    ],
)
def test_stopping_criteria_end_a_text_where_transformers_does(pairs: Any, name: str, make: Any, further: Any) -> None:
    model, plain = pairs(name)
    options = {**GREEDY, "pad_token_id": 0, "max_new_tokens": 12, **further}
    theirs = plain.generate(**BATCH, **options, stopping_criteria=StoppingCriteriaList(make()))
    agree(model.generate(**BATCH, **options, stopping_criteria=make()), theirs)


def test_stop_strings_as_a_criterion_end_a_text(pairs: Any) -> None:
    model, plain = pairs("llama")
    letters = Tokenizer(BPE({chr(33 + i): i for i in range(VOCAB)}, merges=[]))
    letters.pre_tokenizer, letters.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters)
    row = {n: t[1:2] for n, t in BATCH.items()}
    written = plain.generate(**row, max_new_tokens=20, do_sample=False)[0, 6:]
    stop = criteria.StopStringCriteria(tokenizer, [tokenizer.decode(written[10:12])])
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": [stop]}
    theirs = plain.generate(**row, **{**options, "stopping_criteria": StoppingCriteriaList([stop])})
    assert model.generate(**row, **options).tolist() == theirs.tolist()


def test_max_time_ends_a_text_after_the_token_of_that_time(pairs: Any) -> None:
    model, _ = pairs("llama")
    assert model.generate(**BATCH, max_new_tokens=20, do_sample=False, max_time=0.0).shape == (3, 7)
    config = GenerationConfig(max_new_tokens=20, do_sample=False, max_time=3600.0)
    assert model.generate(**BATCH, generation_config=config).shape == (3, 26)
    late = criteria.MaxTimeCriteria(5.0, initial_timestamp=time.time() - 6)
    assert model.generate(**BATCH, max_new_tokens=20, do_sample=False, stopping_criteria=[late]).shape == (3, 7)


def test_drafts_are_refused_beside_python_on_the_host(pairs: Any) -> None:
    row = BATCH["input_ids"][1:2]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "prompt_lookup_num_tokens": 2}
    with pytest.raises(UnsupportedOptionError, match="Speculative decoding") as caught:
        pairs("llama")[0].generate(row, **options, logits_processor=[in_place])
    assert "host" in caught.value.why


@pytest.mark.parametrize(
    "given",
    [{"logits_processor": [in_place]}, {"prefix_allowed_tokens_fn": neighbours}, {"stopping_criteria": [sums_up]}],
    ids=lambda given: next(iter(given)),
)
def test_python_on_the_host_is_refused_beside_beams(pairs: Any, given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOptionError, match="num_beams=2 with a logits processor or a stopping criterion"):
        pairs("llama")[0].generate(**BATCH, max_new_tokens=3, do_sample=False, num_beams=2, **given)
