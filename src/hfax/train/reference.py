"""The model that a loss compares with: its weights, and whether it fits the trained model."""

from __future__ import annotations

import jax

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError


def weights_of_reference(model: JaxModel) -> dict[str, jax.Array]:
    """A model's weights and buffers by name, without its adapter."""
    adapters = model.adapters
    return {**model.buffers, **(model.params if adapters.active is None else adapters.without(model.params))}


def check_reference(model: JaxModel, reference: JaxModel | None, *, needed: bool) -> None:
    """Raise for a reference that is not needed, or that does not read the model's batches.

    Args:
        model: the trained model.
        reference: None: the trained model itself, before training.
        needed: whether the loss has a reference.

    Raises:
        InvalidInputError: says what differs.
    """
    if reference is None:
        return
    if not needed:
        raise InvalidInputError(
            "ref_model is given, but the loss has no reference.",
            "The model would not be used.",
            "Leave it out, or pass a loss such as DPOLoss.",
        )
    if reference.mesh != model.mesh or reference.vocabulary_size != model.vocabulary_size:
        raise InvalidInputError(
            f"ref_model has a vocabulary of {reference.vocabulary_size} ids on the mesh {reference.mesh}; the model has "
            f"{model.vocabulary_size} on {model.mesh}.",
            "Both read the same ids in one program.",
            "Load a model with the same tokenizer, with the same parallelism.",
        )
