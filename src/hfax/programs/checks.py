"""What modelling code checks of values, which a program can only give back, raised by the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfax.errors import InvalidInputError


def raise_failed(checks: Mapping[str, Any]) -> None:
    """Raise if one of the conditions that a program gave back does not hold.

    Args:
        checks: what each condition says, to a scalar bool.

    Raises:
        InvalidInputError: naming it.
    """
    for what, holds in checks.items():
        if not bool(holds):
            raise InvalidInputError(
                f"The inputs do not fit together: {what}.",
                "The model's own code checks this, and it is false for these inputs.",
                "Pass what the model's processor returned for the prompt, all of it and unchanged.",
            )
