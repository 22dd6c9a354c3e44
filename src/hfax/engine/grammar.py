"""Structured outputs: token masks for a JSON schema, a regular expression or a grammar, computed by llguidance.

A constraint can begin after the model's reasoning, whose tokens are free. Grammars are limited in size, depth and complexity;
compiled grammars are kept up to a number of bytes. Imports neither jax nor torch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from hfax.engine.sampling_params import StructuredOutputsParams
from hfax.errors import InvalidInputError, UnsupportedOptionError

COMPACT: Any = {"whitespace_flexible": False}
"""JSON without optional white space, which weak models repeat endlessly; llguidance's "x-guidance"."""
_MAX_CHARACTERS = 100_000
_MAX_DEPTH = 100
_MAX_CACHED = 64
_MAX_CACHED_BYTES = 8 << 20
_ASSUMED_BYTES = 1 << 20
"""Of a compiled grammar that was not measured."""
_LEXER_FUEL = 200_000
"""llguidance's limit on lexer work; expressions that need more are rejected. It bounds a grammar's memory to about 40 MB a step."""


class Matcher:
    """The grammar state of one sequence.

    Args:
        matcher: an llguidance matcher.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> Matcher:
        """An independent copy in the same state."""
        return Matcher(self._matcher.deep_copy())

    def mask(self, vocab_size: int) -> np.ndarray:
        """Bitmask of the allowed next tokens, [ceil(vocab / 32)] int32.

        Raises:
            InvalidInputError: the grammar exceeds llguidance's limits.
        """
        from llguidance.numpy import fill_next_token_bitmask

        mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
        with _panics_refused():
            fill_next_token_bitmask(self._matcher, mask)
        self._raise_error()
        return mask[0]

    def accept(self, token: int) -> None:
        """Advance by one token.

        Raises:
            InvalidInputError: the token is not allowed, or the grammar exceeds llguidance's limits.
        """
        if not self._matcher.is_stopped():
            with _panics_refused():
                self._matcher.consume_token(token)
        self._raise_error()

    @property
    def is_stopped(self) -> bool:
        """Whether only the end of the sequence can follow."""
        return self._matcher.is_stopped()

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            raise _refused(self._matcher.get_error())


class GrammarCompiler:
    """Compiles grammars to matchers for a tokenizer.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: size of the logits' last axis.
        eos_token_ids: tokens that end a sequence.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._lock = threading.Lock()
        self._made: OrderedDict[StructuredOutputsParams, tuple[Matcher, int]] = OrderedDict()
        self._ll_tokenizer: Any = None

    def compile(self, wanted: StructuredOutputsParams) -> Matcher:
        """Compile to a matcher in its initial state.

        Raises:
            InvalidInputError: the grammar is malformed, too large or too complex.
            UnsupportedOptionError: llguidance is not installed, or the tokenizer is not a fast one.
        """
        with self._lock:
            if (found := self._made.get(wanted)) is not None:
                self._made.move_to_end(wanted)
                return found[0].copy()
        with _panics_refused():
            made = self._make(wanted)
        with self._lock:
            self._made[wanted] = made, _ASSUMED_BYTES if wanted.num_bytes is None else wanted.num_bytes
            while len(self._made) > _MAX_CACHED or self.num_bytes > _MAX_CACHED_BYTES:
                self._made.popitem(last=False)
        return made.copy()

    @property
    def num_bytes(self) -> int:
        """Memory of the compiled grammars that are kept, as far as measured."""
        return sum(num_bytes for _, num_bytes in self._made.values())

    def warm_up(self) -> None:
        """Prepare the tokenizer's vocabulary for grammars, if the tokenizer supports them."""
        with contextlib.suppress(UnsupportedOptionError, ImportError):
            self._tokens()

    def try_out(self, wanted: StructuredOutputsParams) -> list[Matcher]:
        """Compile to a matcher and its first mask, and keep nothing.

        Returns:
            What was compiled, for measuring it.

        Raises:
            InvalidInputError: the grammar is malformed, too large or too complex.
            UnsupportedOptionError: llguidance is not installed, or the tokenizer is not a fast one.
        """
        with _panics_refused():
            made = [self._make(wanted)]
            if wanted.after is not None:  # the first mask is of the reasoning alone
                made.append(self._make(dataclasses.replace(wanted, after=None)))
            for matcher in made:
                matcher.mask(self._vocab_size)
        return made

    def _make(self, wanted: StructuredOutputsParams) -> Matcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise UnsupportedOptionError(
                "Structured outputs require llguidance, which is not installed.",
                str(error),
                "Run: pip install 'hfax[serve]'",
            ) from error
        _check_size(wanted)
        try:
            if wanted.regex is not None:
                made = LLMatcher.grammar_from_regex(wanted.regex)
            elif wanted.grammar is not None:
                made = LLMatcher.grammar_from_lark(wanted.grammar)
            elif wanted.choice is not None:
                made = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, wanted.choice)))
            else:
                schema = wanted.text if wanted.json is not None else '{"type": "object"}'
                made = LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)
            limits = LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, step_lexer_fuel=_LEXER_FUEL)
            tokens = self._tokens()
            if wanted.after is not None:
                made = _begin_after(wanted.after, made, self._special_tokens(tokens))
            matcher = LLMatcher(tokens, made, log_level=0, limits=limits)
        except ValueError as error:
            raise _refused(str(error)) from error
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return Matcher(matcher)

    def _special_tokens(self, tokens: Any) -> dict[str, int]:
        """Ids of the tokens that llguidance keeps apart from text, by content; without those that end a sequence.

        They are the tokenizer's special tokens and also ordinary added tokens in angle brackets.
        """
        found = self._tokenizer.added_tokens_decoder.items()
        return {t.content: i for i, t in found if i not in self._eos and tokens.is_special_token(i)}

    def _tokens(self) -> Any:
        with self._lock:
            if self._ll_tokenizer is None:
                from llguidance import LLTokenizer

                try:
                    if (backend := getattr(self._tokenizer, "backend_tokenizer", None)) is None:
                        raise TypeError("Only fast tokenizers are supported.")
                    plain = copy.copy(backend)  # of the library tokenizers, as llguidance reads it
                    plain.no_padding()
                    plain.no_truncation()
                    self._ll_tokenizer = LLTokenizer(
                        plain.to_str(),
                        n_vocab=max(self._vocab_size, len(self._tokenizer)),
                        eos_token=self._eos or self._tokenizer.eos_token_id,
                    )
                except (ValueError, TypeError) as error:
                    raise UnsupportedOptionError(
                        "The model's tokenizer does not support structured outputs.",
                        str(error),
                        "Remove structured_outputs.",
                    ) from error
            return self._ll_tokenizer


@contextlib.contextmanager
def _panics_refused() -> Iterator[None]:
    """Refuse what llguidance panics on; its exception derives from BaseException and would end the engine."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise _refused(f"llguidance failed: {error}") from error


def _begin_after(marker: str, grammar: str, special: dict[str, int]) -> str:
    """A grammar that lets any text pass up to `marker`, and then demands `grammar`.

    The marker may be written as one token or several, and tokens may hold a part of it and of the text around it: llguidance
    matches bytes. A token that it keeps apart from text (a value of `special`) matches no bytes, so such tokens are named: those
    before the marker, and the marker if it is one.

    Args:
        marker: the text that ends the reasoning.
        grammar: a grammar in llguidance's JSON form, or in Lark syntax.
        special: ids of the tokens that are kept apart from text, by content.
    """
    others = sorted(i for text, i in special.items() if text != marker)
    ends = ["spelled", *([f"text <[{special[marker]}]>"] if marker in special else [])]
    lines = [
        f"start: {'chunk* ' if others else ''}end space @constraint",
        f"end: {' | '.join(ends)}",
        f"spelled[suffix={json.dumps(marker)}]: /(?s:.*)/",  # ends at the first occurrence
        "text: /(?s:.*)/",
        r"space: /\n{0,2}/",
    ]
    if others:
        lines.append(f"chunk: text <[{_ranges(others)}]>")
    (inner,) = json.loads(grammar)["grammars"] if grammar.startswith('{"grammars"') else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, {**inner, "name": "constraint"}]})


def _ranges(ids: list[int]) -> str:
    """Sorted token ids in llguidance's syntax, "0-3,7"; some vocabularies have thousands of special tokens in a row."""
    groups = [[i for _, i in group] for _, group in itertools.groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
    return ",".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)


def _check_size(wanted: StructuredOutputsParams) -> None:
    if len(wanted.text) > _MAX_CHARACTERS:
        raise _refused(f"it has {len(wanted.text)} characters; the limit is {_MAX_CHARACTERS}")
    if wanted.json is not None:
        try:
            schema = json.loads(wanted.text)
        except (ValueError, RecursionError) as error:
            raise _refused(f"it is not valid JSON ({type(error).__name__})") from error
        if _depth(schema) > _MAX_DEPTH:
            raise _refused(f"it is nested deeper than {_MAX_DEPTH} levels")


def _depth(value: Any) -> int:
    """Nesting depth, computed iteratively because the depth is untrusted."""
    deepest, todo = 0, [(value, 1)]
    while todo:
        item, depth = todo.pop()
        deepest = max(deepest, depth)
        if depth > _MAX_DEPTH:
            break
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        todo += [(child, depth + 1) for child in children if isinstance(child, (dict, list))]
    return deepest


def _refused(why: str) -> InvalidInputError:
    return InvalidInputError(
        "The schema, regex or grammar for structured outputs is invalid or too complex.",
        why.strip().splitlines()[0] if why.strip() else "no reason given",
        "Correct or simplify it.",
    )
