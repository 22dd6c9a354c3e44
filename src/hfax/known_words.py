"""Names that people know from transformers, peft and torch and that hfax does not have: why, and what to write instead.

A name that hfax has in the same sense is an alias where it is used; the others stand in `known_words.toml`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import tomllib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from hfax.errors import UnsupportedAttributeError, UnsupportedOptionError


def reject_arguments(call: str, given: Iterable[str], known: Collection[str], *, like: str | None = None) -> None:
    """Raise for keyword arguments that a call does not have.

    Args:
        call: its name, such as "from_pretrained".
        given: names that it does not have.
        known: names that it has, for a hint at misspelt ones.
        like: the call of the table whose words it shares; None: its own.

    Raises:
        UnsupportedOptionError: for the first of `given`.
    """
    for name in given:
        if (word := words()["arguments"].get(like or call, {}).get(name)) is not None:
            raise UnsupportedOptionError(f"{call}() does not take {name}.", word["why"], word["fix"])
        near = difflib.get_close_matches(name, known, n=1)
        raise UnsupportedOptionError(
            f"{call}() got an unknown argument {name!r}.",
            "An argument is honoured or refused, never ignored.",
            f"Did you mean {near[0]!r}?" if near else f"Leave it out; {call}() takes {', '.join(sorted(known))}.",
        )


def missing_attribute(kind: str, name: str) -> AttributeError:
    """The error for an attribute that an object does not have.

    Args:
        kind: of the object, such as "JaxModel".
        name: of the attribute.
    """
    if (word := words()["attributes"].get(name)) is None:
        return AttributeError(f"{kind!r} object has no attribute {name!r}")
    return UnsupportedAttributeError(f"{kind} has no {name}.", word["why"], word["fix"])


def keywords(function: Callable[..., Any]) -> set[str]:
    """The names of a function's arguments, `self` and `**kwargs` left out."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD}


def has_word(call: str, name: str) -> bool:
    """Whether there is a word for an argument that a call does not take."""
    return name in words()["arguments"].get(call, {})


@functools.cache
def words() -> dict[str, Any]:
    """The table: under "arguments" by call and name, under "attributes" by name; each with "why" and "fix"."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
