"""Tokens to text, and text to reasoning and calls."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from hfax.demo import demo_folder
from hfax.engine.detokenizer import Detokenizer
from hfax.server.output_parser import TOOL_FORMATS, OutputParser


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_folder())


TEXTS = ["Return a new list.", "naïve — “quoted” 日本語 🙂🙃 end", "    indented\n\n\ttext\n", "a"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text(tokenizer, text):
    ids = tokenizer("Say: " + text)["input_ids"]
    prompt, rest = ids[:3], ids[3:]
    detokenizer = Detokenizer(tokenizer, tuple(prompt), ())
    pieces = []
    for token in rest:
        detokenizer.add(token)
        pieces.append(detokenizer.take(is_finished=False))
    detokenizer.finish()
    pieces.append(detokenizer.take(is_finished=True))
    assert (
        "".join(pieces)
        == tokenizer.decode(ids, skip_special_tokens=True)[len(tokenizer.decode(prompt, skip_special_tokens=True)) :]
    )
    assert "\ufffd" not in "".join(pieces)


def test_what_may_become_a_stop_string_is_held_back(tokenizer):
    ids = tokenizer("alpha STOP beta", add_special_tokens=False)["input_ids"]
    detokenizer = Detokenizer(tokenizer, (), (" STOP",))
    given, found = "", None
    for token in ids:
        found = detokenizer.add(token)
        given += detokenizer.take(is_finished=found is not None)
        assert "alpha".startswith(given)
        if found:
            break
    assert (given, found) == ("alpha", " STOP")


def test_the_stop_string_can_be_kept(tokenizer):
    detokenizer = Detokenizer(tokenizer, (), ("b",), keeps_stop=True)
    for token in tokenizer("abc", add_special_tokens=False)["input_ids"]:
        if detokenizer.add(token):
            break
    assert detokenizer.take(is_finished=True) == "ab"


CASES = [
    ("plain text", {}, [("content", "plain text")]),
    ("<think>\nwhy\n</think>\n\nbecause", {"splits_reasoning": True}, [("reasoning", "why\n"), ("content", "because")]),
    (
        "why\n</think>\nbecause",
        {"splits_reasoning": True, "starts_in_reasoning": True},
        [("reasoning", "why\n"), ("content", "because")],
    ),
    ("<thinking about it", {"splits_reasoning": True}, [("content", "<thinking about it")]),
    ("never <think>here</think>", {"splits_reasoning": True}, [("content", "never <think>here</think>")]),
    (
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        {"tools": 0},
        [("content", "Sure."), ("call", "f", '{"a": 1}')],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"b": "é"}}</tool_call>',
        {"tools": 0},
        [("call", "f", "{}"), ("call", "g", '{"b": "é"}')],
    ),
    ("<tool_call>not json</tool_call> after", {"tools": 0}, [("content", "<tool_call>not json</tool_call> after")]),
    ("a < b and <tool", {"tools": 0}, [("content", "a < b and <tool")]),
    (
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        {"tools": 1},
        [("call", "f", '{"a": 1}'), ("call", "g", "{}")],
    ),
    ('<|python_tag|>{"name": "f", "parameters": {"a": [1]}}', {"tools": 2}, [("call", "f", '{"a": [1]}')]),
]


def parse(pieces: list[str], options: dict):
    options = dict(options)
    tools = TOOL_FORMATS[options.pop("tools")] if "tools" in options else None
    parser = OutputParser(tools, **options)
    found: list[tuple] = []
    for index, piece in enumerate(pieces):
        for one in parser.feed(piece, is_last=index == len(pieces) - 1):
            if one.kind == "call":
                found.append((one.kind, one.name, one.arguments))
            elif found and found[-1][0] == one.kind:
                found[-1] = (one.kind, found[-1][1] + one.text)
            else:
                found.append((one.kind, one.text))
    return found


@pytest.mark.parametrize(("text", "options", "expected"), CASES, ids=[case[0][:24] for case in CASES])
def test_a_text_is_taken_apart_alike_whole_and_in_pieces(text, options, expected):
    assert parse([text], options) == [(kind, *rest) for kind, *rest in expected]
    numbers = random.Random(0)
    for _ in range(30):
        cuts = sorted(numbers.sample(range(len(text) + 1), min(6, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(pieces, options) == parse([text], options)
