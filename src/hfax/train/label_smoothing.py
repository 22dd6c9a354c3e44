"""Label smoothing: Szegedy et al., 2016 (https://arxiv.org/abs/1512.00567), in the form of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError
from hfax.train.ignored import IGNORED
from hfax.train.labels import labels_of
from hfax.train.losses import Apply, Loss
from hfax.train.step import TrainStep
from hfax.train.updates import ByWeight


class SmoothedTrainStep(TrainStep):
    """A training step whose loss is smoothed; a batch weighs as many labels as it has, as with the model's own loss.

    Args:
        model: see `make_train_step`.
        optimizer: see `make_train_step`.
        factor: probability that is spread over all classes, above 0.
        options: the others of `make_train_step`, without a loss.
    """

    def __init__(
        self, model: JaxModel, optimizer: optax.GradientTransformation | ByWeight, *, factor: float, **options: Any
    ) -> None:
        super().__init__(model, optimizer, make_smoothed_loss(model, factor), **options)
        self._labels = labels_of(model)


def make_smoothed_loss(model: JaxModel, factor: float) -> Loss:
    """The cross entropy with smoothed labels, the mean over all labels. It leaves out a model's auxiliary losses, as there.

    Args:
        model: says whether labels are those of the next token.
        factor: probability that is spread over all classes.
    """
    is_shifted = labels_of(model).is_shifted

    def loss(apply: Apply, batch: Mapping[str, Any]) -> jax.Array:
        labels = batch.get("labels")
        if labels is None or not jnp.issubdtype(labels.dtype, jnp.integer):
            raise InvalidInputError(
                "label_smoothing_factor needs labels that are classes.",
                f"The batch has {', '.join(sorted(batch))}; its labels are {getattr(labels, 'dtype', 'missing')}.",
                'Add "labels" of token or class ids, or leave label_smoothing_factor out.',
            )
        inputs = {"use_cache": False, **batch} if "input_ids" in batch and model.can_generate() else dict(batch)
        logits = apply(**inputs).logits
        if is_shifted:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        chosen = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        each = (1.0 - factor) * chosen + factor * log_probs.mean(axis=-1)
        counts = labels != IGNORED
        return -jnp.where(counts, each, 0.0).sum() / jnp.maximum(counts.sum(), 1)

    return loss
