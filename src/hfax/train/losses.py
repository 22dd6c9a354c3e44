"""Training losses: the model's own loss, and DPO. Losses are functions of `apply` and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hfax.errors import InvalidInputError
from hfax.train.labels import IGNORED

Apply = Callable[..., Any]
Loss = Callable[[Apply, Mapping[str, Any]], Any]


def models_own_loss(apply: Apply, batch: Mapping[str, Any]) -> jax.Array:
    """The loss that the transformers class computes from labels.

    Raises:
        InvalidInputError: the model computes no loss for this batch.
    """
    inputs = {"use_cache": False, **batch} if "input_ids" in batch else dict(batch)
    loss = getattr(apply(**inputs), "loss", None)
    if loss is None:
        raise InvalidInputError(
            "The model returned no loss.",
            f"Its inputs were {', '.join(sorted(batch))}.",
            'Add "labels" to the batches, or pass a loss function of your own.',
        )
    return loss


def sequence_log_probs(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Sum of each row's label log-probabilities.

    Args:
        logits: [batch, length, vocab], next-token logits.
        labels: [batch, length] token ids, -100 at ignored positions.

    Returns:
        [batch] float32.
    """
    logits, labels = logits[:, :-1].astype(jnp.float32), labels[:, 1:]
    chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(labels != IGNORED, log_probs, 0.0).sum(axis=-1)


def preference_log_probs(apply: Apply, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Log-probabilities of chosen and rejected completions; with `TrainStep.compute`, those of a reference model.

    Args:
        apply: the model.
        batch: `chosen_ids`, `rejected_ids`, `chosen_labels` and `rejected_labels`, each [batch, length]; labels are -100 for
            prompts and padding.

    Returns:
        "chosen_log_probs" and "rejected_log_probs", [batch] float32; add the reference model's to batches for `make_dpo_loss`.
    """
    ids = jnp.concatenate([batch["chosen_ids"], batch["rejected_ids"]])
    labels = jnp.concatenate([batch["chosen_labels"], batch["rejected_labels"]])
    log_probs = sequence_log_probs(apply(input_ids=ids, use_cache=False).logits, labels)
    chosen, rejected = jnp.split(log_probs, 2)
    return {"chosen_log_probs": chosen, "rejected_log_probs": rejected}


def make_dpo_loss(beta: float = 0.1) -> Loss:
    """Direct preference optimization: Rafailov et al., 2023, equation 7 (https://arxiv.org/abs/2305.18290).

    Args:
        beta: strength of the penalty for deviating from the reference.

    Returns:
        A loss for batches with the inputs of `preference_log_probs` and its outputs for the reference model. It also reports the
        reward "accuracy" and "margin".
    """

    def loss(apply: Apply, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        own = preference_log_probs(apply, batch)
        chosen, rejected = (own[name] - batch[name] for name in ("chosen_log_probs", "rejected_log_probs"))
        margin = beta * (chosen - rejected)
        return -jax.nn.log_sigmoid(margin).mean(), {"accuracy": (margin > 0).mean(), "margin": margin.mean()}

    return loss
