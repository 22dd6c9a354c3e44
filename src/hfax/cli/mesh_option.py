"""A mesh on a command line: "auto", or sizes by axis as in "data=2,tensor=4"."""

from __future__ import annotations

from hfax.errors import InvalidInputError


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
