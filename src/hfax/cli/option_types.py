"""What options of several commands hold: lists of numbers, and a mesh."""

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


def mesh_sizes(option: str, text: str | None) -> dict[str, int] | None:
    """The sizes; None for nothing.

    Raises:
        InvalidInputError: it is written otherwise.
    """
    if not text:
        return None
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not size.isdigit() or int(size) < 1 or name in sizes:
            raise InvalidInputError(
                f"{option} {text!r} is no mesh.",
                "It takes sizes by axis, each once: data, fsdp, expert, tensor.",
                f"For example {option} data=2,tensor=4.",
            )
        sizes[name] = int(size)
    return sizes


def parallelism_of(option: str, text: str | None) -> str | dict[str, int] | None:
    """The same where "auto" may stand, too."""
    return "auto" if text == "auto" else mesh_sizes(option, text)
