"""Prompts padded on the right: written on as transformers writes the same prompts padded on the left."""

from typing import Any

import generation_pairs
import numpy as np
import pytest
import torch
from generation_pairs import BATCH, GREEDY, agree

from hfax.errors import InvalidInputError
from hfax.generation import generation_request
from hfax.programs.buckets import Buckets

pairs = generation_pairs.pairs

RIGHT = {
    "input_ids": torch.tensor([[5, 17, 40, 8, 0, 0], [9, 3, 61, 33, 2, 7], [4, 4, 4, 50, 6, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6, [1, 1, 1, 1, 1, 0]]),
}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("beside", ["mask", "no mask", "embeddings"])
def test_padding_on_the_right_moves_to_the_left(
    pairs: Any, name: str, beside: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = pairs(name)
    given = {n: t for n, t in RIGHT.items() if beside != "no mask" or n == "input_ids"}
    if beside == "embeddings":
        given["inputs_embeds"] = plain.get_input_embeddings()(given.pop("input_ids")).detach()
    theirs = plain.generate(**BATCH, **GREEDY)
    generation_request._say_that_padding_moves.cache_clear()
    for _ in range(2):
        mine = model.generate(**given, **GREEDY)
        if beside == "embeddings":
            mine.sequences = torch.cat([BATCH["input_ids"], mine.sequences], dim=1)
        agree(mine, theirs)
    assert [r.message.split(";")[0] for r in caplog.records] == ["Prompts are padded on the right"]


@pytest.mark.parametrize("beside", [{"is_exact": True}, {"extras": {"pixel_values": np.zeros((3, 3, 8, 8))}}])
def test_padding_that_cannot_move_is_refused(beside: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"vocab_size": 97, "pad_token_id": 0, "eos_token_ids": (), "context": None}
    with pytest.raises(InvalidInputError, match="Prompt 0 is padded on the right"):
        generation_request.pad_decoder_prompts(*RIGHT.values(), **sizes, buckets=Buckets(), **beside)
