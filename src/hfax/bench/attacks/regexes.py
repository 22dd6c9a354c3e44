"""Regular expressions that are expensive, invalid or beyond what automata can express."""

from __future__ import annotations

import random

_NESTED = (
    "(a+)+", "(a+)+$", "((a+)+)+b", "(a*)*", "((a*)*)*", "(a|a)*", "(a|aa)+$", "(a|b|ab)*c", "(.*)*x", "(.+)+x", "(.*a){20}",
    "(.*a){12}b", "(a?){500}a{500}", "(x+x+)+y", r"(\s*\w+\s*)*;", r"([^,]*,){50}x", "(([a-z])+.)+[A-Z]([a-z])+$", r"^(\d+)*$",
    "((ab)*|(ba)*)*c", "(a*b*c*)*d",
)  # fmt: skip
_COUNTED = (
    "a{1000}{1000}", "(a{100}){100}", "((a{50}){50}){50}", "a{1000000}", "a{4294967296}", "a{0,65535}", "(a{0,1000}){0,1000}",
    "(ab?){5000}", ".{5000}", ".*a.{20}", ".*a.{100}", "(a|b)*a(a|b){16}", "(a|b)*a(a|b){25}", "[a-z]{0,500}[0-9]{0,500}x",
    r"\d{1,3}(\.\d{1,3}){1000}", "(.{0,50},){50}", "a{5,2}", "a{-1}", "a{,}", "x{2}{3}{4}{5}{6}{7}{8}{9}",
)  # fmt: skip
_UNICODE = (
    r"\p{L}+", r"\p{L}{300}", r"\p{Any}{500}", r"[\p{L}\p{N}\p{P}\p{S}]{100}", r"\P{L}{300}", r"(?i)\p{Lu}{100}", r"\w{1000}",
    r"(\w|\d|\s){200}", r"[^\x00-\x7f]{500}", "[\U00010000-\U0010ffff]{200}", r"\p{Script=Greek}{200}", r"\p{Nothing}",
    r"[\w--\d]", r"\X{100}", "(?iu)\u017ftra\u00dfe{50}", r"[[:alpha:]]{200}", r"\u{110000}", r"\ud800", "\U0001f600{1000}",
)  # fmt: skip
_BEYOND = (
    "(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", r"(a)\1", r"(?P<x>a)(?P=x)", r"\k<x>", "(?>a+)b", "a++b", "(?R)", "(?1)", "(?(1)a|b)",
    r"\Aab\z", r"\bword\b", r"^$", "(?m)^a$", "$a^", r"\G", "(?#comment)a", "(?x) a  b # c",
)  # fmt: skip
_INVALID = (
    "(", ")", "((((((((((", "[", "[]", "[^]", "[z-a]", "*", "+a", "a**", "?", "|", "||", "\\", "\\q", "\\x", "\\xZZ", "\\u12",
    "(?P<>a)", "(?P<a>b)(?P<a>c)", "(?z)a", "a{1", "\0", "a\0b", "\x01\x7f", "[a-\\d]", "",
)  # fmt: skip


def regexes(seed: int) -> dict[str, str]:
    """At least 80 regular expressions by name; the seed chooses the words of alternations."""
    found = {
        f"{kind} {pattern!a}": pattern
        for kind, patterns in {
            "nested": _NESTED, "counted": _COUNTED, "unicode": _UNICODE, "beyond": _BEYOND, "invalid": _INVALID,
        }.items()
        for pattern in patterns
    }  # fmt: skip
    numbers = random.Random(seed)
    words = ["".join(numbers.choices("abcdef", k=numbers.randint(2, 14))) for _ in range(9000)]
    return found | {
        "alternation of 1,000 words": "|".join(words[:1000]),
        "alternation of 9,000 words": "|".join(words),
        "starred alternation": f"({'|'.join(words[:2000])})*x",
        "alternation of .*": "|".join(f".*{word}.*" for word in words[:200]),
        "alternation of prefixes": "|".join("a" * size for size in range(1, 400)),
        "empty alternatives": "|" * 50_000,
        "20,000 groups": "(" * 20_000 + "a" + ")" * 20_000,
        "200 groups": "(" * 200 + "a" + ")*" * 200,
        "90,000 characters": "a?" * 45_000,
        "200,000 characters": "a" * 200_000,
        "classes": "".join(f"[{a}-z]?" for a in "abcdefghijklm") * 300,
        "conjunction of .*": "".join(f"(.*{c})?" for c in "abcdefghijklmnopqrst"),
    }
