"""Options of `generate` that read a second text or torch's random numbers, against transformers: encoders, guidance, watermarks."""

from typing import Any

import generation_pairs
import pytest
import torch
import transformers
from generation_pairs import BATCH, GREEDY, agree, batch_of
from transformers.generation import logits_process as processors

from hfax.errors import InvalidInputError, UnsupportedOptionError

pairs = generation_pairs.pairs

_LETTERS = [3, 5, 7, 9, 11, 13]


@pytest.mark.parametrize("name", ["llama", "t5", "bart"])
@pytest.mark.parametrize(
    "options",
    [
        {"encoder_repetition_penalty": 2.5},
        {"encoder_no_repeat_ngram_size": 1},
        {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 0.4},
    ],
)
def test_encoder_penalties_are_transformers(pairs: Any, name: str, options: dict[str, Any]) -> None:
    model, plain = pairs(name)
    row = {"input_ids": torch.tensor([[5, 17, 40, 5, 5, 3, 17, 2]])}
    theirs = plain.generate(**row, **GREEDY, **options)
    agree(model.generate(**row, **GREEDY, **options), theirs)


def test_several_sequences_of_a_prompt_avoid_what_its_encoder_read(pairs: Any) -> None:
    model, _ = pairs("t5")
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 20, "seed": 1}
    out = model.generate(**BATCH, **options, encoder_no_repeat_ngram_size=1)
    for index, row in enumerate(out[:, 1:].tolist()):
        read = BATCH["input_ids"][index // 3][BATCH["attention_mask"][index // 3] == 1]
        assert not set(row) & set(read.tolist())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba"])
@pytest.mark.parametrize("scale", [1.7, 0.5])
@pytest.mark.parametrize("negative", [None, [[3, 5, 7, 8], [2, 2, 9, 9], [0, 0, 4, 7]]], ids=["last token", "given"])
def test_guidance_moves_away_from_the_second_text_as_in_transformers(
    pairs: Any, name: str, scale: float, negative: Any
) -> None:
    model, plain = pairs(name)
    batch = batch_of(name)
    rows = slice(1, 2) if name == "mamba" else slice(None)
    options = {**GREEDY, "guidance_scale": scale, "output_logits": True}
    if negative is not None:
        ids = torch.tensor(negative)[rows]
        options |= {"negative_prompt_ids": ids, "negative_prompt_attention_mask": (ids != 0).long()}
    # with a cache transformers gives Mamba the whole mask with each token, which repeats the token as often
    theirs = plain.generate(**batch, **options, use_cache=name != "mamba")
    mine = model.generate(**batch, **options)
    agree(mine, theirs, rtol=1e-3)
    for ours, other in zip(mine.logits, theirs.logits, strict=True):  # the model's own, without guidance
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-3)


def test_guidance_with_a_processor_on_the_host(pairs: Any) -> None:
    model, plain = pairs("llama")
    given = transformers.LogitsProcessorList([lambda ids, scores: scores.roll(1, dims=1)])
    options = {**GREEDY, "guidance_scale": 1.5, "logits_processor": given}
    agree(model.generate(**BATCH, **options), plain.generate(**BATCH, **options), rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"negative_prompt_ids": [[3]] * 3}, InvalidInputError, "without guidance_scale"),
        ({"negative_prompt_ids": [[3]], "guidance_scale": 2.0}, InvalidInputError, "has 1 rows; there are 3 prompts"),
        ({"guidance_scale": 2.0, "num_beams": 2}, UnsupportedOptionError, "guidance_scale=2.0 with"),
        ({"max_time": 2.0, "num_beams": 2}, UnsupportedOptionError, "num_beams=2 with max_time=2.0"),
        ({"guidance_scale": "much"}, InvalidInputError, "guidance_scale"),
    ],
)
def test_guidance_that_cannot_be_is_named(pairs: Any, options: Any, error: type, what: str) -> None:
    with pytest.raises(error, match=what):
        pairs("llama")[0].generate(**BATCH, max_new_tokens=2, do_sample=False, **options)


def test_guidance_is_refused_for_encoder_decoders_and_beside_drafts(pairs: Any) -> None:
    with pytest.raises(UnsupportedOptionError, match="with an encoder-decoder"):
        pairs("t5")[0].generate(**BATCH, max_new_tokens=2, guidance_scale=2.0)
    row = BATCH["input_ids"][1:2]
    with pytest.raises(UnsupportedOptionError, match="Speculative decoding") as caught:
        pairs("llama")[0].generate(row, max_new_tokens=2, guidance_scale=2.0, prompt_lookup_num_tokens=2)
    assert "Guidance" in caught.value.why


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("config", [{"bias": 4.0}, {"context_width": 3, "greenlist_ratio": 0.5, "bias": 2.0}], ids=str)
def test_a_watermark_raises_transformers_green_lists(pairs: Any, name: str, config: dict[str, Any]) -> None:
    model, plain = pairs(name)
    options = {**GREEDY, "watermarking_config": transformers.WatermarkingConfig(**config)}
    theirs = plain.generate(**BATCH, **options)
    agree(model.generate(**BATCH, **options), theirs)
    assert theirs.sequences.tolist() != plain.generate(**BATCH, **GREEDY).sequences.tolist()


def test_watermarks_that_depend_on_scores_are_refused(pairs: Any) -> None:
    for config in (
        transformers.WatermarkingConfig(seeding_scheme="selfhash"),
        transformers.SynthIDTextWatermarkingConfig(ngram_len=5, keys=_LETTERS),
    ):
        with pytest.raises(UnsupportedOptionError, match="depends on the scores"):
            pairs("llama")[0].generate(**BATCH, max_new_tokens=2, watermarking_config=config)


def test_a_processor_that_draws_a_watermark_from_scores_runs_on_the_host(pairs: Any) -> None:
    model, plain = pairs("llama")
    mark = processors.WatermarkLogitsProcessor(97, "cpu", seeding_scheme="selfhash", bias=6.0)
    options = {**GREEDY, "logits_processor": transformers.LogitsProcessorList([mark])}
    agree(model.generate(**BATCH, **options), plain.generate(**BATCH, **options))
