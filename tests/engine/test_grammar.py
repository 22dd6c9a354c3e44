"""Which tokens a grammar lets pass, also one that begins only after the model's reasoning."""

from __future__ import annotations

import pytest
from grammars import END, is_allowed
from tokenizers import AddedToken
from transformers import AutoTokenizer

from hfax.demo import demo_folder
from hfax.engine.grammar import GrammarCompiler, Matcher
from hfax.engine.sampling_params import StructuredOutputsParams
from hfax.errors import InvalidInputError

OBJECT = StructuredOutputsParams(json_object=True, after="</think>")


def compiler_of(*tokens: str | AddedToken) -> GrammarCompiler:
    """Of the demo's tokenizer, with these tokens besides."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    for token in tokens:
        tokenizer.add_tokens([token], special_tokens=isinstance(token, AddedToken) and token.special)
    return GrammarCompiler(tokenizer, len(tokenizer), (END,))


def write(compiler: GrammarCompiler, matcher: Matcher, *pieces: str) -> str | None:
    """Feed pieces, each one token if there is such a token; returns the first token that the mask refuses."""
    tokenizer = compiler._tokenizer
    vocabulary = tokenizer.get_vocab()
    for piece in pieces:
        ids = [vocabulary[piece]] if piece in vocabulary else tokenizer(piece, add_special_tokens=False)["input_ids"]
        for token in ids:
            if not is_allowed(matcher, token, len(tokenizer)):
                return tokenizer.convert_ids_to_tokens(token)
            matcher.accept(token)
    return None


SPELLED = ("</", "think", ">")
"""The end marker in several tokens of the demo's own vocabulary."""
INSIDE = ("</thi", "nk>{", 'k>x"', " a</think>\n\n")
"""Tokens with a part of the marker and text around it."""


@pytest.mark.parametrize(
    "tokens",
    [(), ("</think>",), (AddedToken("</think>", special=True),), INSIDE],
    ids=["several tokens", "one token", "one special token", "larger tokens"],
)
def test_a_constraint_after_a_marker_leaves_the_text_before_it_free(tokens):
    compiler = compiler_of(*tokens)
    endings = [SPELLED]
    if tokens and tokens != INSIDE:
        endings.append(("</think>",))
    for ending in endings:
        for before in ("", "Maybe { or </thin or < /think> — 日本語 🙂.\n\n", "<|user|>", "a<|system|>b<|system|>"):
            for after in (("{}",), ("\n\n", '{"a":1}'), ("\n", "{}")):
                matcher = compiler.compile(OBJECT)
                assert write(compiler, matcher, before, *ending, *after) is None
                assert matcher.is_stopped
            matcher = compiler.compile(OBJECT)
            assert write(compiler, matcher, before, *ending) is None
            assert write(compiler, matcher.copy(), "b") == "b"
            assert write(compiler, matcher.copy(), "</think>") is not None
            assert write(compiler, matcher, '{"b":', "[]", "}") is None


def test_a_token_that_ends_the_marker_and_begins_the_constraint_is_held_to_both():
    compiler = compiler_of(*INSIDE)
    for pieces in (("why</thi", "nk>{", "}"), (" a</think>\n\n", "{}"), ("</thin", 'k>x"')):
        matcher = compiler.compile(OBJECT)
        refused = write(compiler, matcher, *pieces)
        assert refused == ('k>x"' if 'k>x"' in pieces else None)
        assert matcher.is_stopped == (refused is None)


def test_a_sequence_cannot_end_before_its_constraint_holds():
    compiler = compiler_of("</think>")
    matcher = compiler.compile(OBJECT)
    assert not is_allowed(matcher, END, 4097)
    assert write(compiler, matcher, "Hm.", "</think>") is None
    assert not is_allowed(matcher, END, 4097)


def test_copies_are_independent_on_both_sides_of_the_marker():
    compiler = compiler_of("</think>")
    matcher = compiler.compile(OBJECT)
    assert write(compiler, matcher, "Hm") is None
    copy = matcher.copy()
    assert write(compiler, matcher, "</think>", "{") is None
    assert write(compiler, copy, "</thi", "ck", "</think>", "{}") is None
    assert copy.is_stopped
    assert not matcher.is_stopped


@pytest.mark.parametrize(
    ("wanted", "text", "wrong"),
    [
        ({"regex": "a/b|c"}, "a/b", "d"),
        ({"choice": ("yes", "no")}, "no", "maybe"),
        ({"grammar": 'start: "x" rest\nrest: /[0-9]/\n'}, "x7", "7"),
        ({"json": {"type": "integer", "maximum": 9}}, "7", '"'),
        ({"json_object": True}, "{}", "7"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_kind_of_constraint_can_begin_after_a_marker(wanted, text, wrong):
    compiler = compiler_of()
    for after in (None, "</think>", 'say "so"/\\d'):
        params = StructuredOutputsParams(**wanted, after=after)
        begin = () if after is None else ("Well 7 no yes x7 {} ", after)
        matcher = compiler.compile(params)
        assert write(compiler, matcher, *begin, text) is None
        assert write(compiler, compiler.compile(params), *begin, wrong) is not None


def test_compiled_grammars_are_kept_up_to_a_number_of_bytes():
    """64 of them were kept, whatever their size: one regular expression of a few characters takes 180 MB."""
    compiler = compiler_of()
    for index in range(6):
        compiler.compile(StructuredOutputsParams(regex=f"x{index}", num_bytes=3 << 20))
        assert compiler.num_bytes == min(index + 1, 2) * 3 << 20
    compiler.compile(StructuredOutputsParams(regex="y", num_bytes=1 << 30))
    assert compiler.num_bytes == 0
    compiler.compile(StructuredOutputsParams(regex="z"))
    assert compiler.num_bytes > 0


def test_a_marker_alone_is_no_constraint():
    with pytest.raises(InvalidInputError, match="got nothing"):
        StructuredOutputsParams(after="</think>")
    with pytest.raises(InvalidInputError, match="after"):
        StructuredOutputsParams(json_object=True, after="")


def test_a_panic_is_an_error_of_the_request_alone():
    """The exception of a Rust panic derives from BaseException, which ended the engine's loop."""

    class PanicException(BaseException):
        pass

    class Broken:
        def is_stopped(self):
            return False

        def is_error(self):
            return False

        def consume_token(self, token):
            raise PanicException("index out of bounds")

    with pytest.raises(InvalidInputError, match="index out of bounds"):
        Matcher(Broken()).accept(1)
