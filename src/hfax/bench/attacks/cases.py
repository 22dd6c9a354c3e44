"""All hostile cases, by class.

Deterministic: the same seed gives the same cases with the same contents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hfax.bench.attacks.case import CHAT, COMPLETIONS, Case, field_case
from hfax.bench.attacks.connections import flood_cases, slow_cases
from hfax.bench.attacks.headers import header_cases
from hfax.bench.attacks.images import image_cases
from hfax.bench.attacks.json_bodies import json_cases, number_cases
from hfax.bench.attacks.prompts import prompt_cases
from hfax.bench.attacks.regexes import regexes
from hfax.bench.attacks.schemas import schemas


def schema_cases(seed: int) -> Iterator[Case]:
    """Requests for texts that fit hostile JSON schemas."""
    for name, schema in schemas(seed).items():
        yield field_case("schemas", name, CHAT, response_format=schema_format(schema))


def regex_cases(seed: int) -> Iterator[Case]:
    """Requests for texts that match hostile regular expressions."""
    for name, regex in regexes(seed).items():
        yield field_case("regexes", name, COMPLETIONS, response_format={"type": "regex", "regex": regex})


def schema_format(schema: Any) -> Any:
    """The `response_format` of a schema; of one that is JSON already, as JSON."""
    if isinstance(schema, bytes):
        return b'{"type":"json_schema","json_schema":{"name":"a","schema":' + schema + b"}}"
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


_MAKERS: dict[str, Callable[[int], Iterator[Case]]] = {
    "json": json_cases,
    "numbers": number_cases,
    "schemas": schema_cases,
    "regexes": regex_cases,
    "prompts": prompt_cases,
    "images": image_cases,
    "headers": header_cases,
    "slow": slow_cases,
    "floods": flood_cases,
}
CLASSES = tuple(_MAKERS)
"""Names of the classes, in the order in which they run."""


def make_cases(seed: int = 0, classes: Sequence[str] = CLASSES) -> list[Case]:
    """Make the cases of some classes.

    Args:
        seed: determines everything random in them.
        classes: names of classes.

    Examples:
        >>> from hfax.bench.attacks.cases import make_cases
        >>> len(make_cases(classes=["schemas"])) >= 120
        True
    """
    return [case for name in classes for case in _MAKERS[name](seed)]


def sample(cases: Sequence[Case], each: int, seed: int = 0) -> list[Case]:
    """Choose at most `each` cases of every class, in their order."""
    numbers = random.Random(seed)
    chosen: list[Case] = []
    for name in dict.fromkeys(case.kind for case in cases):
        own = [case for case in cases if case.kind == name]
        chosen += [own[place] for place in sorted(numbers.sample(range(len(own)), min(each, len(own))))]
    return chosen
