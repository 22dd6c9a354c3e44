"""Lists of numbers on a command line."""

from __future__ import annotations

from hfax.errors import InvalidInputError


def positive_numbers(option: str, text: str) -> list[int]:
    """The numbers of "1,8,64".

    Raises:
        InvalidInputError: something else than positive numbers stands there.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InvalidInputError(
            f"{option} {text!r} is no list of positive numbers.",
            "It takes numbers with commas between them.",
            f"For example {option} 1,8.",
        )
    return [int(part) for part in parts]
