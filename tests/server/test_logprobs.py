"""Bytes, names and places of tokens in log-probabilities."""

from __future__ import annotations

import json

import pytest

from hfax.server.token_text import TextPlaces, TokenText

CHAT = [{"role": "user", "content": "What does list.append do?"}]


def post(server, **body):
    with server.client() as client:
        return client.post(
            "/v1/chat/completions", json={"model": "demo", "messages": CHAT, "max_completion_tokens": 2, **body}
        )


def spell(server, text: str, **body) -> dict:
    """An answer that is this text, by a grammar, in as many tokens as its characters have bytes."""
    body |= {"response_format": {"type": "regex", "regex": text}, "temperature": 0}
    return post(server, max_completion_tokens=60, **body).json()["choices"][0]


def test_bytes_of_tokens_within_a_character_are_their_own(server):
    text = "a — 日本 🙂!"
    choice = spell(server, text, logprobs=True, top_logprobs=4)
    entries = choice["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.decode() == choice["message"]["content"] == text
    parts = [entry for entry in entries if "\ufffd" in entry["token"]]
    assert parts
    assert b"\xef\xbf\xbd" not in joined
    for entry in entries:
        for one in (entry, *entry["top_logprobs"]):
            if "\ufffd" not in one["token"]:
                assert bytes(one["bytes"]).decode() == one["token"]


def complete(server, **body) -> dict:
    with server.client() as client:
        answer = client.post("/v1/completions", json={"model": "demo", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def chars_of(token: str) -> bytes:
    """A token of a completion as bytes; parts of characters are written as OpenAI writes them, bytes:\\xf0\\x9f."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes(int(part, 16) for part in token[len("bytes:") :].split("\\x")[1:])


@pytest.mark.parametrize("is_stream", [False, True])
def test_tokens_within_a_character_are_told_apart_in_completions(server, is_stream):
    text = "日本🙂 é"
    body = {"prompt": "Say", "logprobs": 5, "max_tokens": 40, "response_format": {"type": "regex", "regex": text}}
    if is_stream:
        with server.client() as client:
            answer = client.post("/v1/completions", json={"model": "demo", "temperature": 0, "stream": True, **body})
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
        found = {name: [one for part in parts for one in part[name]] for name in parts[0]}
    else:
        found = complete(server, **body)["logprobs"]
    assert b"".join(map(chars_of, found["tokens"])).decode() == text
    assert any(token.startswith("bytes:\\x") for token in found["tokens"])
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert token in top
        assert 5 <= len(top) <= 6
    written = b""
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert offset == len(written.decode("utf-8", "ignore"))
        written += chars_of(token)


def test_offsets_with_echo_are_places_in_the_text(server, demo):
    """The begin-of-sequence token's text counted, though it is not in the text."""
    _, tokenizer = demo
    for prompt in ("Return a naïve 🙂 list", tokenizer("Return a naïve 🙂 list")["input_ids"]):
        choice = complete(server, prompt=prompt, echo=True, logprobs=1, max_tokens=6)
        found = choice["logprobs"]
        begin = 0 if isinstance(prompt, str) else len("<|begin|>")
        assert found["text_offset"][:2] == [0, begin]
        text = choice["text"]
        for token, offset in zip(found["tokens"][1:], found["text_offset"][1:], strict=True):
            if not token.startswith("bytes:") and token not in tokenizer.all_special_tokens:
                assert text[offset : offset + len(token)] == token


def test_bytes_of_a_vocabulary_with_byte_fallback():
    """<0xF0> and its like, as in Llama 2's vocabulary."""
    import tokenizers
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        "<unk>": 0,
        **{f"<0x{i:02X}>": i + 1 for i in range(256)},
        "▁a": 257,
        "é": 258,
        "\ufffd": 259,
        "▁▁": 260,
    }
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    texts = TokenText(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    assert texts.bytes_of(0xF0 + 1) == b"\xf0"
    assert texts.bytes_of(0x41 + 1) == b"A"
    assert texts.bytes_of(258) == "é".encode()
    assert texts.bytes_of(259) == "\ufffd".encode()
    assert texts.bytes_of(257) == b" a"
    assert texts.bytes_of(260) == b"  "
    places = TextPlaces(texts)
    assert [places.add(token) for token in (257, 0xC3 + 1, 0xA9 + 1, 258, 260)] == [0, 2, 2, 3, 4]
