"""Token ids into pieces of text."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_checkpoints import make_tokenizer

from hfax.cli.text_stream import TextStream, decode_answer

SENTENCE = " quick brown — naïve café 日本語 🙂 fox\n  jumps"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def stream_of(tokenizer, prompt: list[int], ids: list[int]) -> TextStream:
    stream = TextStream(tokenizer, prompt)
    stream.put(np.array([prompt]))
    for token in ids:
        stream.put(np.array([token]))
    stream.end()
    return stream


def test_pieces_are_whole_characters_and_join_to_the_text(tokenizer):
    ids = tokenizer(SENTENCE)["input_ids"]
    stream = stream_of(tokenizer, tokenizer("The")["input_ids"], ids)
    assert stream.text == SENTENCE
    assert all("\ufffd" not in piece for piece in stream.pieces)
    assert len(stream.pieces) > 10
    assert stream.token_ids == ids


def test_prompt_and_special_tokens_are_not_written(tokenizer):
    ids = [*tokenizer("yes")["input_ids"], tokenizer.eos_token_id]
    stream = stream_of(tokenizer, tokenizer("<|im_start|>assistant\n")["input_ids"], ids)
    assert stream.text == "yes"
    assert stream.token_ids[-1] == tokenizer.eos_token_id


def test_nothing_is_written_before_the_second_token(tokenizer):
    """The decoding loop is compiled after the first token; the lines about it fell into the text."""
    written: list[str] = []
    stream = TextStream(tokenizer, [], written.append)
    first, second = tokenizer("quick brown")["input_ids"][:2]
    stream.put(np.array([[7]]))
    stream.put(np.array([first]))
    assert written == []
    stream.put(np.array([second]))
    assert written != []


def test_single_token_is_written_at_the_end(tokenizer):
    assert decode_answer(tokenizer, [], tokenizer("dog")["input_ids"][:1]) != ""


def test_unfinished_character_is_written_at_the_end(tokenizer):
    half = tokenizer("🚀")["input_ids"][:2]
    assert "\ufffd" in decode_answer(tokenizer, [], half)


def test_space_before_the_first_word_is_kept_with_metaspace_tokenizers():
    """Decoding the new tokens alone drops it: "The" + "fox" became "Thefox"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"▁The": 0, "▁fox": 1, "▁jumps": 2}, unk_token="▁The"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    assert decode_answer(tokenizer, [0], [1, 2]) == " fox jumps"


def test_stop_request_ends_at_the_next_token(tokenizer):
    asked: list[bool] = []
    stream = TextStream(tokenizer, [], should_stop=lambda: bool(asked))
    stream.put(np.array([[7]]))
    asked.append(True)
    with pytest.raises(KeyboardInterrupt):
        stream.put(np.array([7]))
