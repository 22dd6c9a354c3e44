"""Hostile JSON: bodies that are cut, of wrong types, deep, huge or not text; and extreme numbers in every field."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hfax.bench.attacks.case import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, Case, body_case, field_case, valid_body

_TYPES = {"list": b"[[]]", "object": b'{"a": 1}', "text": b'"\\u0000"', "number": b"-7.5", "true": b"true"}
_COMPLETION_FIELDS = (
    "model", "prompt", "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "min_tokens", "max_tokens", "ignore_eos", "priority",
    "stream", "stream_options", "user", "logprobs", "echo", "suffix", "best_of", "response_format",
)  # fmt: skip
_CHAT_FIELDS = (
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs",
    "add_generation_prompt", "store", "metadata", "modalities", "service_tier", "chat_template", "functions",
)  # fmt: skip
_NUMBERS = ("1e-38", "5e-324", "1e308", "1e400", "-1e308", "-0.0", "9223372036854775808", "18446744073709551616",
            "-9223372036854775809", "true", '"1"', "NaN")  # fmt: skip
_NUMBER_FIELDS = {
    COMPLETIONS: (
        "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
        "min_tokens", "max_tokens", "priority", "logprobs", "best_of",
    ),
    CHAT: ("max_completion_tokens", "top_logprobs"),
}  # fmt: skip
_KEYS = 500_000


def json_cases(seed: int) -> Iterator[Case]:
    """Bodies whose JSON is malformed, of wrong types, deep or huge."""
    for fields, path in ((_COMPLETION_FIELDS, COMPLETIONS), (_CHAT_FIELDS, CHAT)):
        for index, field in enumerate(fields):
            for offset in range(2):
                kind = list(_TYPES)[(index + 2 * offset) % len(_TYPES)]
                yield field_case("json", f"{kind} as {field}", path, **{field: _TYPES[kind]})
    numbers = random.Random(seed)
    whole = valid_body(CHAT, '"demo"', tools=[], stream=False)
    for place in sorted(numbers.sample(range(1, len(whole)), 8)):
        yield body_case("json", f"cut after {place} bytes", CHAT, lambda model, place=place: whole[:place])
    for name, body in _RAW.items():
        yield body_case("json", name, COMPLETIONS, lambda model, body=body: body)
    for name, value in _VALUES.items():
        yield field_case("json", name, COMPLETIONS, prompt=value)
    for path in (COMPLETIONS, CHAT, TOKENIZE):
        yield body_case(
            "json", f"nulls by the million at {path}", path, lambda model: b"[" + b"null," * 1_000_000 + b"0]"
        )
    yield body_case("json", "a million nulls as prompt", COMPLETIONS, _million_nulls)
    for name, key in (("wrong", "a%d"), ("outside", "%d")):
        yield body_case(
            "json", f"{_KEYS} {name} logit_bias keys", COMPLETIONS, lambda model, key=key: _biases(model, key)
        )
    yield body_case("json", f"{_KEYS} unknown fields", CHAT, lambda model: b"{" + _many_keys("field%d") + b"}")
    yield body_case("json", "300 logit_bias keys twice", COMPLETIONS, lambda model: _biases(model, "%d", 300, 2))
    yield body_case("json", "a million stops", COMPLETIONS, lambda m: valid_body(COMPLETIONS, m, stop=_million('"a"')))
    yield body_case("json", "a million tools", CHAT, lambda m: valid_body(CHAT, m, tools=_million("{}")))
    yield body_case("json", "a million messages", CHAT, lambda m: valid_body(CHAT, m, messages=_million("{}")))
    yield body_case("json", "a million tokens to decode", DETOKENIZE, lambda m: b'{"tokens":' + _million("1") + b"}")


def number_cases(seed: int) -> Iterator[Case]:
    """Extremes in each numeric field."""
    for path, fields in _NUMBER_FIELDS.items():
        for field in fields:
            for text in _NUMBERS:
                more: dict[str, object] = {"logprobs": True} if field == "top_logprobs" else {}
                if field == "max_completion_tokens":
                    more["max_tokens"] = None
                yield field_case("numbers", f"{text} as {field}", path, **(more | {field: text.encode()}))
    for text in _NUMBERS:
        yield field_case("numbers", f"{text} as a bias", COMPLETIONS, logit_bias=b'{"5": %s}' % text.encode())
        yield field_case("numbers", f"{text} as a stop token", COMPLETIONS, stop_token_ids=b"[%s]" % text.encode())
    yield field_case("numbers", "all at their extremes", COMPLETIONS, temperature=1e-38, top_p=5e-324, min_p=1.0,
                     repetition_penalty=1e-38, presence_penalty=-2, frequency_penalty=2, seed=2**63 - 1)  # fmt: skip
    digits = random.Random(seed).choice("123456789")
    yield field_case("numbers", "a number of 4 million digits", COMPLETIONS, seed=digits.encode() * 4_000_000)


_RAW = {
    "nothing": b"",
    "white space": b" " * (4 << 20),
    "null": b"null",
    "a number": b"1e5",
    "a text": b'"model"',
    "a list": b"[]",
    "an empty object": b"{}",
    "invalid UTF-8": b'{"model": "demo", "prompt": "\xff\xfe\x80"}',
    "overlong UTF-8": b'{"model": "demo", "prompt": "\xc0\xaf"}',
    "UTF-16": '{"model": "demo", "prompt": "a"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"model": "demo", "prompt": "a"}',
    "NUL bytes": b"\0" * 100_000,
    "200,000 lists": b"[" * 200_000,
    "200,000 objects": b'{"a":' * 200_000,
    "200,000 lists, closed": b"[" * 200_000 + b"]" * 200_000,
    "two documents": b'{"model": "demo", "prompt": "a"}{"model": "demo", "prompt": "a"}',
    "comments": b'{"model": "demo", /* "prompt": "a" */ "prompt": "b"}',
    "single quotes": b"{'model': 'demo'}",
    "a key of 4 MB": b'{"' + b"k" * (4 << 20) + b'": 1}',
    "form data": b"model=demo&prompt=a",
}
_VALUES = {
    "duplicate keys": b'"a","prompt":"b","prompt":["c"],"model":"x"',
    "duplicate model": b'"a","max_tokens":2,"max_tokens":999999999',
    "a lone surrogate": b'"\\ud800"',
    "a reversed surrogate pair": b'"\\udc00\\ud800"',
    "NaN": b"NaN",
    "Infinity": b"-Infinity",
    "a list of texts and numbers": b'["a", 1, [2], null]',
    "lists in lists": b"[[[[1]]]]",
    "an unknown escape": b'"\\x41"',
    "a tab": b'"\t"',
    "1,000,000 escapes": b'"' + b"\\u0041" * 1_000_000 + b'"',
}


def _million(item: str) -> bytes:
    return b"[" + f"{item},".encode() * 999_999 + item.encode() + b"]"


def _million_nulls(model: str) -> bytes:
    return valid_body(COMPLETIONS, model, prompt=_million("null"))


def _many_keys(key: str, count: int = _KEYS) -> bytes:
    return ",".join(f'"{key % index}":1' for index in range(count)).encode()


def _biases(model: str, key: str, count: int = _KEYS, times: int = 1) -> bytes:
    return valid_body(COMPLETIONS, model, logit_bias=b"{" + b",".join([_many_keys(key, count)] * times) + b"}")
