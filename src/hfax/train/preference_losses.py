"""ORPO, KTO and reward modelling, with the names, defaults and formulas of trl 1.16."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

from hfax.errors import InvalidInputError
from hfax.train.ignored import IGNORED
from hfax.train.losses import Apply, num_labels, pair_logits, pair_metrics, token_log_probs


@dataclasses.dataclass(frozen=True, kw_only=True)
class ORPOLoss:
    """Odds ratio preference optimization: Hong et al., 2024 (https://arxiv.org/abs/2403.07691), without a reference.

    Args:
        beta: weight of the odds ratio beside the cross entropy of prompt and chosen completion; lambda in the paper.

    Called with `apply` and a batch (see `hfax.train.losses.pair_logits`, with attention masks), it returns the loss and metrics.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_positive(self, "beta")

    def __call__(self, apply: Apply, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and metrics by trl's names."""
        logits, labels = pair_logits(apply, batch)
        chosen, rejected = jnp.split(token_log_probs(logits, labels).sum(axis=-1) / num_labels(labels), 2)
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        ratio = log_sigmoid(log_odds)
        rows = chosen.shape[0]
        texts = jnp.where(batch["chosen_attention_mask"] == 1, batch["chosen_ids"], IGNORED)
        cross_entropy = -token_log_probs(logits[:rows], texts).sum() / (texts[:, 1:] != IGNORED).sum()
        metrics = {
            **pair_metrics(chosen, rejected, self.beta),
            "logps/chosen": chosen.mean(),
            "logps/rejected": rejected.mean(),
            "nll_loss": cross_entropy,
            "log_odds_ratio": ratio.mean(),
            "log_odds_chosen": log_odds.mean(),
        }
        return cross_entropy - self.beta * ratio.mean(), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTOLoss:
    """Kahneman-Tversky optimization of single completions: Ethayarajh et al., 2024 (https://arxiv.org/abs/2402.01306).

    Args:
        beta: strength of the penalty for deviating from the reference.
        loss_type: "kto", or "apo_zero_unpaired" (https://arxiv.org/abs/2408.06266), which has no KL term.
        desirable_weight: weight of the losses of desirable completions.
        undesirable_weight: weight of those of undesirable ones.

    Called with `apply` and a batch of `input_ids`, `attention_mask` and `labels` [batch, length], `label` [batch], and for "kto"
    `KL_input_ids`, `KL_attention_mask` and `KL_labels`, with completions of other rows; returns the loss and metrics.
    """

    beta: float = 0.1
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "beta")
        if self.loss_type not in ("kto", "apo_zero_unpaired"):
            raise InvalidInputError(
                f"loss_type {self.loss_type!r} is unknown.", "It has trl's names.", "Use kto or apo_zero_unpaired."
            )

    @property
    def has_kl(self) -> bool:
        """Whether rewards are compared with the mean of mismatched completions."""
        return self.loss_type == "kto"

    @property
    def reference_names(self) -> tuple[str, ...]:
        """Columns of a batch that `reference` computes."""
        return ("ref_logps", "ref_KL_logps") if self.has_kl else ("ref_logps",)

    def reference(self, apply: Apply, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Log-probabilities of the completions, and of the mismatched ones; [batch] float32."""
        own = {"ref_logps": _completion_log_probs(apply, batch, "")}
        return own | ({"ref_KL_logps": _completion_log_probs(apply, batch, "KL_")} if self.has_kl else {})

    def __call__(self, apply: Apply, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and metrics by trl's names."""
        ratios = _completion_log_probs(apply, batch, "") - batch["ref_logps"]
        is_desirable = batch["label"].astype(bool)
        kl = jnp.zeros(())
        if self.has_kl:
            mismatched = _completion_log_probs(apply, batch, "KL_") - batch["ref_KL_logps"]
            kl = jax.lax.stop_gradient(jnp.maximum(mismatched.mean(), 0.0))
        desired = 1 - sigmoid(self.beta * (ratios - kl))
        undesired = 1 - sigmoid(self.beta * (kl - ratios))
        each = jnp.where(is_desirable, self.desirable_weight * desired, self.undesirable_weight * undesired)
        rewards = self.beta * ratios
        metrics = {
            "kl": kl,
            "rewards/chosen": _mean_where(is_desirable, rewards),
            "rewards/rejected": _mean_where(~is_desirable, rewards),
        }
        return each.mean(), metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardLoss:
    """Bradley-Terry loss of a reward model: Ouyang et al., 2022, equation 1 (https://arxiv.org/abs/2203.02155).

    Args:
        center_rewards_coefficient: weight of the squared sum of a pair's rewards, which centres them at 0
            (https://arxiv.org/abs/2312.09244); None: 0.

    Called with `apply` of a sequence classifier with one label and a batch of `chosen_ids`, `rejected_ids` and attention masks
    [batch, length], and optionally `margin` [batch]; returns the loss and metrics.
    """

    center_rewards_coefficient: float | None = None

    def __call__(self, apply: Apply, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and metrics by trl's names."""
        ids, mask = (
            jnp.concatenate([batch[f"{side}_{part}"] for side in ("chosen", "rejected")])
            for part in ("ids", "attention_mask")
        )
        rewards = apply(input_ids=ids, attention_mask=mask).logits.astype(jnp.float32)[:, 0]
        chosen, rejected = jnp.split(rewards, 2)
        loss = -log_sigmoid(chosen - rejected - batch.get("margin", 0.0)).mean()
        if self.center_rewards_coefficient is not None:
            loss += self.center_rewards_coefficient * ((chosen + rejected) ** 2).mean()
        metrics = {
            **{"accuracy": (chosen > rejected).mean(), "margin": (chosen - rejected).mean()},
            **{"min_reward": rewards.min(), "mean_reward": rewards.mean(), "max_reward": rewards.max()},
        }
        return loss, metrics


def _completion_log_probs(apply: Apply, batch: Mapping[str, Any], prefix: str) -> jax.Array:
    inputs = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
    return token_log_probs(apply(**inputs, use_cache=False).logits, batch[f"{prefix}labels"]).sum(axis=-1)


def _mean_where(counts: jax.Array, values: jax.Array) -> jax.Array:
    """The mean of some values; 0 of none."""
    return jnp.where(counts, values, 0.0).sum() / jnp.maximum(counts.sum(), 1)


def _log1mexp(x: jax.Array) -> jax.Array:
    """`log(1 - exp(x))` of x < 0, without cancellation."""
    is_low = x < -0.6931471805599453
    low, high = jnp.where(is_low, x, -1.0), jnp.where(is_low, -0.1, x)  # neither branch may have a gradient of NaN
    return jnp.where(is_low, jnp.log1p(-jnp.exp(low)), jnp.log(-jnp.expm1(high)))


def _check_positive(loss: Any, name: str) -> None:
    if not (value := getattr(loss, name)) > 0:
        raise InvalidInputError(f"{name}={value} is too small.", "It must be above 0.", f"Pass another {name}.")
