"""Option values shared by several commands: lists of numbers, and meshes."""

from __future__ import annotations

import re

from hfax.errors import InvalidInputError

AXES = ("data", "fsdp", "expert", "tensor")
"""Those of `hfax.sharding.mesh.GIVEN_AXES`; here, so that a mistyped one is found before a framework is imported."""


def positive_numbers(option: str, text: str) -> list[int]:
    """Parse a list such as "1,8,64".

    Raises:
        InvalidInputError: the text is not a list of positive integers.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InvalidInputError(
            f"{option} {text!r} is not a list of positive numbers.",
            "The option takes comma-separated integers.",
            f"Pass, for example, {option} 1,8.",
        )
    return [int(part) for part in parts]


def pixels(option: str, text: str | None) -> tuple[int, int] | None:
    """Parse a height and a width such as "1024x768"; None if empty.

    Raises:
        InvalidInputError: the text is malformed.
    """
    if not text:
        return None
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if found is None:
        raise InvalidInputError(
            f"{option} {text!r} is not the size of an image.",
            "The option takes a height and a width in pixels, each below 100,000.",
            f"Pass, for example, {option} 1024x768.",
        )
    return int(found[1]), int(found[2])


def mesh_sizes(option: str, text: str | None) -> dict[str, int] | None:
    """Parse axis sizes such as "data=2,tensor=4"; None if empty.

    Raises:
        InvalidInputError: the text is malformed.
    """
    if not text:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if name not in AXES or not equals or not size.isdigit() or int(size) < 1 or name in sizes:
            raise InvalidInputError(
                f"{option} {text!r} is not a valid mesh.",
                f"The option takes sizes for the axes {', '.join(AXES)}, each at most once.",
                f"Pass, for example, {option} data=2,tensor=4.",
            )
        sizes[name] = int(size)
    return sizes


def parallelism_of(option: str, text: str | None) -> str | dict[str, int] | None:
    """Parse "auto" or axis sizes such as "data=2,tensor=4"."""
    return "auto" if text == "auto" else mesh_sizes(option, text)
