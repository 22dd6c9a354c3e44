"""Prompts given as embeddings, with and without their ids, against transformers."""

from typing import Any

import generation_pairs
import pytest
import torch
from generation_pairs import BATCH, GREEDY, agree, batch_of

from hfax.errors import InvalidInputError, UnsupportedOptionError

pairs = generation_pairs.pairs


def embedded(plain: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The embeddings of the ids and something more, so that they are no token's."""
    noise = torch.randn(batch["input_ids"].shape[1], 1, generator=torch.Generator().manual_seed(3))
    return plain.get_input_embeddings()(batch["input_ids"]).detach() + 0.3 * noise


@pytest.mark.filterwarnings("ignore:Passing .* with `inputs_embeds`:UserWarning")
@pytest.mark.parametrize("name", ["llama", "gpt2", "mamba"])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 3}])
def test_text_after_embeddings_is_transformers(pairs: Any, name: str, with_ids: bool, options: dict[str, Any]) -> None:
    model, plain = pairs(name)
    batch = batch_of(name)
    if options and not with_ids:  # transformers leaves out as many new tokens as a prompt has padding
        batch = {n: t[-2:-1] if len(t) > 1 else t for n, t in batch.items()}
    given = {**batch, "inputs_embeds": embedded(plain, batch)}
    if not with_ids:
        del given["input_ids"]
    theirs = plain.generate(**given, **GREEDY, **options)
    assert theirs.sequences.shape[1] == (13 if with_ids else 7)
    agree(model.generate(**given, **GREEDY, **options), theirs)


def test_embeddings_without_a_mask_and_with_a_processor_on_the_host(pairs: Any) -> None:
    model, plain = pairs("llama")
    seen: list[list[int]] = []

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(list(input_ids.shape))
        return scores

    given = {"inputs_embeds": embedded(plain, BATCH)[1:2], "logits_processor": [note]}
    agree(model.generate(**given, **GREEDY), plain.generate(inputs_embeds=given["inputs_embeds"], **GREEDY))
    assert seen == [[1, length] for length in range(7)]


def test_embeddings_that_do_not_fit_are_named(pairs: Any) -> None:
    model, plain = pairs("llama")
    given = embedded(plain, BATCH)
    with pytest.raises(
        InvalidInputError, match=r"inputs_embeds has shape \(3, 6, 64\) beside input_ids of shape \(3, 4\)"
    ):
        model.generate(BATCH["input_ids"][:, :4], inputs_embeds=given, max_new_tokens=2)
    with pytest.raises(InvalidInputError, match=r"inputs_embeds has shape \(6, 64\)"):
        model.generate(inputs_embeds=given[0], max_new_tokens=2)
    with pytest.raises(UnsupportedOptionError, match="an encoder-decoder does not take inputs_embeds"):
        pairs("t5")[0].generate(inputs_embeds=given[..., :32], max_new_tokens=2)
