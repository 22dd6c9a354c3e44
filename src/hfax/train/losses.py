"""Training losses are functions of `apply` and a batch. Here are the model's own loss and what losses of log-probabilities share.

A loss that compares with another model also has `reference_names`, the columns that it reads of the other model, and
`reference(apply, batch)`, which computes them; `hfax.train.step` calls it with the reference's `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hfax.errors import InvalidInputError
from hfax.train.ignored import IGNORED

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


def sequence_logits(apply: Apply, batch: Mapping[str, Any]) -> jax.Array:
    """Next-token logits of `input_ids` with `attention_mask`, [batch, length, vocab]."""
    return apply(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits


def token_log_probs(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Log-probability of each label, 0 at ignored ones.

    Args:
        logits: [batch, length, vocab], next-token logits.
        labels: [batch, length] token ids, -100 at ignored positions.

    Returns:
        [batch, length - 1] float32, of the labels after the first.
    """
    logits, labels = logits[:, :-1].astype(jnp.float32), labels[:, 1:]
    chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(labels != IGNORED, chosen - jax.nn.logsumexp(logits, axis=-1), 0.0)


def num_labels(labels: jax.Array) -> jax.Array:
    """Number of labels of each row, at least 1: [batch] float32 of [batch, length]."""
    return jnp.maximum((labels != IGNORED).sum(axis=-1), 1).astype(jnp.float32)


def pair_logits(apply: Apply, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Logits and labels of chosen and rejected sequences, computed together.

    Args:
        apply: the model.
        batch: `chosen_ids`, `rejected_ids`, `chosen_labels`, `rejected_labels` and optionally `chosen_attention_mask` and
            `rejected_attention_mask`, each [batch, length]; labels are -100 for prompts and padding.

    Returns:
        Logits [2 · batch, length, vocab] and labels [2 · batch, length]: chosen sequences, then rejected ones.
    """
    joined = {
        part: jnp.concatenate([batch[f"chosen_{part}"], batch[f"rejected_{part}"]])
        for part in ("ids", "labels", "attention_mask")
        if f"chosen_{part}" in batch
    }
    masks = {name: array for name, array in joined.items() if name == "attention_mask"}
    return apply(input_ids=joined["ids"], use_cache=False, **masks).logits, joined["labels"]


def pair_metrics(chosen: jax.Array, rejected: jax.Array, beta: float) -> dict[str, jax.Array]:
    """Rewards of a batch of pairs by trl's names.

    Args:
        chosen: [batch] log-probabilities of chosen completions, or their difference from the reference's.
        rejected: [batch], of rejected ones.
        beta: factor of rewards.
    """
    chosen, rejected = beta * chosen, beta * rejected
    return {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).mean(),
        "rewards/margins": (chosen - rejected).mean(),
    }
