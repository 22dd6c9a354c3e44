"""Data-dependent checks of modelling code: programs return the conditions, and the host raises."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hfax.errors import InvalidInputError
from hfax.tracing.traits import ModelTraits


def raise_failed(checks: Mapping[str, Any]) -> None:
    """Raise if a condition returned by a program is false.

    Args:
        checks: description of each condition, mapped to a scalar bool.

    Raises:
        InvalidInputError: names the condition.
    """
    for what, holds in checks.items():
        if not bool(holds):
            raise InvalidInputError(
                f"The inputs are inconsistent: {what}.",
                "The model's code checks this condition, and it is false for these inputs.",
                "Pass all outputs of the model's processor for the prompt, unchanged.",
            )


_NEED_NOT_BE_READ = ("input_ids", "attention_mask", "position_ids", "decoder_input_ids", "mm_token_type_ids")
"""Inputs that every tokenizer or processor returns, or that hfax adds: models may leave them unused."""


def raise_unread(unread: Iterable[str], inputs: Mapping[str, Any], traits: ModelTraits) -> None:
    """Raise if a prefill program does not depend on one of its inputs.

    Integer inputs of a decoder may be unused: forward received them, so transformers ignores them too.

    Args:
        unread: names of the inputs that no result depends on.
        inputs: inputs of the program, by name.
        traits: traits of the model.

    Raises:
        InvalidInputError: names the input.
    """
    for name in unread:
        is_content = traits.is_encoder_decoder or inputs[name].dtype.kind not in "biu"
        if name not in _NEED_NOT_BE_READ and is_content:
            raise InvalidInputError(
                f"The model does not use {name} in generate().",
                "No logit depends on it: the output would be the same without it.",
                "Remove it; if the model should use it, report the architecture to the project.",
            )
