"""What modelling code checks of values, which a program can only give back, raised by the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hfax.errors import InvalidInputError
from hfax.tracing.traits import ModelTraits


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


_NEED_NOT_BE_READ = ("input_ids", "attention_mask", "position_ids", "decoder_input_ids", "mm_token_type_ids")
"""Inputs that every tokenizer or processor returns, or that hfax adds: models that need none are run without."""


def raise_unread(unread: Iterable[str], inputs: Mapping[str, Any], traits: ModelTraits) -> None:
    """Raise if a program that reads prompts does not depend on something that was given for it.

    A decoder's whole numbers may go unread: its forward got them, so transformers does not read them either.

    Args:
        unread: names of the inputs on which none of its results depends.
        inputs: of the program, by name.
        traits: of the model.

    Raises:
        InvalidInputError: naming it.
    """
    for name in unread:
        is_content = traits.is_encoder_decoder or inputs[name].dtype.kind not in "biu"
        if name not in _NEED_NOT_BE_READ and is_content:
            raise InvalidInputError(
                f"The model does not read {name} while it writes.",
                "No logit depends on it: the text would be the same without.",
                "Leave it out; if the model should read it, report the architecture to the project.",
            )
