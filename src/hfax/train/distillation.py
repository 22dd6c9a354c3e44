"""Distillation: a student learns the next-token distributions of a teacher. Formulas of trl 1.16's `GKDTrainer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from hfax.errors import InvalidInputError
from hfax.train.ignored import IGNORED
from hfax.train.losses import Apply, sequence_logits, token_log_probs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """Generalized Jensen-Shannon divergence from a teacher: Agarwal et al., 2023, equation 1 (https://arxiv.org/abs/2306.13649).

    Args:
        temperature: divides the logits of both models.
        beta: 0: forward KL divergence, from the teacher; 1: reverse KL divergence; between: the divergence of both from their
            mixture.
        alpha: share of the divergence in the loss; the rest is the cross entropy of the labels.

    Called with `apply` and a batch of `input_ids`, `attention_mask` and `labels` [batch, length] and `teacher_logits` [batch,
    length, vocab]; the mean over labels.

    Raises:
        InvalidInputError: a value is out of range.
    """

    temperature: float = 1.0
    beta: float = 0.5
    alpha: float = 1.0
    is_mean_over_labels: ClassVar[bool] = True
    reference_names: ClassVar[tuple[str, ...]] = ("teacher_logits",)

    def __post_init__(self) -> None:
        for name in ("beta", "alpha"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise InvalidInputError(
                    f"{name}={value} is out of range.", "It is from 0 to 1.", f"Pass another {name}."
                )
        if not self.temperature > 0:
            raise InvalidInputError(f"temperature={self.temperature} is too small.", "It divides logits.", "Raise it.")

    def reference(self, apply: Apply, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The teacher's logits, [batch, length, vocab]."""
        return {"teacher_logits": sequence_logits(apply, batch)}

    def __call__(self, apply: Apply, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and its two parts."""
        logits, labels = sequence_logits(apply, batch), batch["labels"]
        own, teacher = (
            jax.nn.log_softmax(each[:, :-1].astype(jnp.float32) / self.temperature, axis=-1)
            for each in (logits, batch["teacher_logits"])
        )
        counts = labels[:, 1:] != IGNORED
        total = jnp.maximum(counts.sum(), 1)
        divergence = jnp.where(counts, self._divergence(own, teacher), 0.0).sum() / total
        cross_entropy = -token_log_probs(logits, labels).sum() / total
        loss = self.alpha * divergence + (1 - self.alpha) * cross_entropy
        return loss, {"divergence": divergence, "cross_entropy": cross_entropy}

    def _divergence(self, own: jax.Array, teacher: jax.Array) -> jax.Array:
        """Of log-probabilities [.., vocab]: [..]."""
        if self.beta == 0:
            return _kl(teacher, own)
        if self.beta == 1:
            return _kl(own, teacher)
        mixture = jnp.logaddexp(own + jnp.log1p(-self.beta), teacher + jnp.log(self.beta))
        return self.beta * _kl(teacher, mixture) + (1 - self.beta) * _kl(own, mixture)


def _kl(of: jax.Array, to: jax.Array) -> jax.Array:
    return (jnp.exp(of) * (of - to)).sum(axis=-1)
