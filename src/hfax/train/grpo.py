"""Group relative policy optimization and its variants, with the names, defaults and formulas of trl 1.16's `GRPOTrainer`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hfax.errors import InvalidInputError
from hfax.train.ignored import IGNORED
from hfax.train.losses import Apply, sequence_logits, token_log_probs

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*_CLIPPED, "cispo", "sapo", "vespo")
_LEVELS = ("token", "sequence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """Group relative policy optimization: Shao et al., 2024, equation 3 (https://arxiv.org/abs/2402.03300).

    Args:
        beta: weight of the KL divergence from the reference; 0: no reference.
        use_bias_correction_kl: weigh that divergence by the importance ratios (https://arxiv.org/abs/2512.02556).
        loss_type: how tokens' losses are clipped and averaged: "dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo" or
            "vespo".
        importance_sampling_level: ratios of each "token", or of a "sequence" (GSPO: https://arxiv.org/abs/2507.18071).
        epsilon: lower clipping bound of ratios, below 1.
        epsilon_high: upper bound, above 1; of "cispo" the bound itself; None: `epsilon`.
        delta: upper bound of ratios in two-sided clipping; None: none.
        temperature: what completions are sampled with; divides the logits here, too.
        max_completion_length: most tokens of a completion, the divisor of "dr_grpo".
        top_entropy_quantile: share of the tokens, those of highest entropy, which have a policy loss.
        entropy_coef: weight of the entropy, which is subtracted from the loss.
        off_policy_mask_threshold: completions with negative advantages, and a larger divergence per token from the policy that
            wrote them, have no policy loss; None: all have one.
        sapo_temperature_neg: temperature of "sapo" for advantages up to 0.
        sapo_temperature_pos: its temperature for positive advantages.
        vespo_k_pos: power of "vespo" for advantages of at least 0.
        vespo_lambda_pos: decay of "vespo" for these.
        vespo_k_neg: power for negative advantages.
        vespo_lambda_neg: decay for these.

    Called with `apply` and a batch of `input_ids`, `attention_mask` and `labels` [batch, length], -100 except for completions, and
    [batch] float32 `advantages` and `tokens_per_pass` (labels of a micro-batch, on average over the completions that were generated
    together). Optional, [batch, length - 1] float32: `old_logps`, log-probabilities under the policy that wrote the completions
    (without: the present one), and `sampling_logps`, those that the sampler reported, at temperature 1. Returns the loss and
    metrics.

    Raises:
        InvalidInputError: an unknown name, or a value out of range.
    """

    beta: float = 0.0
    use_bias_correction_kl: bool = True
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    temperature: float = 1.0
    max_completion_length: int = 512
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def reference_names(self) -> tuple[str, ...]:
        """Columns of a batch that `reference` computes."""
        return ("ref_logps",) if self.beta else ()

    def reference(self, apply: Apply, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Log-probabilities of the completions' tokens, [batch, length - 1] float32."""
        return {"ref_logps": self.log_probs(sequence_logits(apply, batch), batch["labels"])}

    def log_probs(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Log-probabilities of labels when sampled with `temperature`, [batch, length - 1] float32; 0 at ignored ones."""
        return token_log_probs(logits.astype(jnp.float32) / self.temperature, labels)

    def __call__(self, apply: Apply, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and metrics by trl's names."""
        logits, labels = sequence_logits(apply, batch), batch["labels"]
        now = self.log_probs(logits, labels)
        mask = (labels[:, 1:] != IGNORED).astype(jnp.float32)
        entropies = _entropies(logits[:, :-1] / self.temperature)
        old = batch.get("old_logps", jax.lax.stop_gradient(now))
        tokens = _Tokens(
            now=now,
            old=old,
            mask=mask,
            advantages=batch["advantages"][:, None],
            log_weights=self._log_weights(now - old, mask),
        )
        each, clipping = self._policy_loss(tokens)
        if self.off_policy_mask_threshold is not None:
            drift = _row_means(old - jax.lax.stop_gradient(now), mask)
            is_kept = (tokens.advantages >= 0) | (drift[:, None] <= self.off_policy_mask_threshold)
            each = each * is_kept
        chosen = mask
        if self.top_entropy_quantile < 1:
            chosen = mask * _most_uncertain(jax.lax.stop_gradient(entropies), mask, 1 - self.top_entropy_quantile)
            each = each * chosen
        metrics = {"entropy": _mean(jax.lax.stop_gradient(entropies), mask), **clipping}
        if self.beta:
            away = batch["ref_logps"] - now
            divergence = jnp.exp(away) - away - 1
            if self.use_bias_correction_kl:
                divergence = divergence * jnp.exp(tokens.log_weights)
            each = each + self.beta * divergence
            metrics["kl"] = _mean(jax.lax.stop_gradient(divergence), mask)
        loss = self._mean_of(each, mask, batch["tokens_per_pass"])
        if self.entropy_coef:
            loss = loss - self.entropy_coef * _mean(entropies, chosen)
        return loss, {**metrics, **sampling_difference(logits, batch)}

    def _log_weights(self, log_ratios: jax.Array, mask: jax.Array) -> jax.Array:
        """Logarithms of the importance ratios, [batch, length - 1] or [batch, 1]."""
        return log_ratios if self.importance_sampling_level == "token" else _row_means(log_ratios, mask)[:, None]

    def _policy_loss(self, tokens: _Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Loss of each token, [batch, length - 1] or [batch, 1], and metrics of the clipping."""
        advantages, ratios = tokens.advantages, jnp.exp(tokens.log_weights)
        low, high = self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high
        match self.loss_type:
            case "cispo":
                weights = jax.lax.stop_gradient(jnp.minimum(ratios, high))
                clipped = (ratios > high) & (advantages > 0)
                return -weights * advantages * tokens.now, {"cispo_clip_ratio": tokens.share(clipped)}
            case "sapo":
                heat = jnp.where(advantages > 0, self.sapo_temperature_pos, self.sapo_temperature_neg)
                return -jax.nn.sigmoid(heat * (ratios - 1)) * 4 / heat * advantages, {}
            case "vespo":
                weights = jax.lax.stop_gradient(self._gamma_weights(tokens))
                return -weights * advantages * tokens.now, {"vespo/phi_seq_mean": weights.mean()}
            case _:
                bounded = jnp.clip(ratios, 1 - low, 1 + high)
                ratios = ratios if self.delta is None else jnp.minimum(ratios, self.delta)
                is_low = (ratios < 1 - low) & (advantages < 0)
                is_high = (ratios > 1 + high) & (advantages > 0)
                metrics = {
                    "clip_ratio/low_mean": tokens.share(is_low),
                    "clip_ratio/high_mean": tokens.share(is_high),
                    "clip_ratio/region_mean": tokens.share(is_low | is_high),
                }
                return -jnp.minimum(ratios * advantages, bounded * advantages), metrics

    def _gamma_weights(self, tokens: _Tokens) -> jax.Array:
        """Weights of completions, [batch, 1]: e^λ w^k e^(-λw) of the ratio w of whole completions (https://arxiv.org/abs/2602.10693)."""
        log_ratio = (jnp.clip(tokens.now - tokens.old, -20, 20) * tokens.mask).sum(axis=-1, keepdims=True)
        log_ratio = jnp.clip(log_ratio, math.log(1e-8), 20)
        is_good = tokens.advantages >= 0
        power = jnp.where(is_good, self.vespo_k_pos, self.vespo_k_neg)
        decay = jnp.maximum(jnp.where(is_good, self.vespo_lambda_pos, self.vespo_lambda_neg), 1e-4)
        return jnp.exp(decay + power * log_ratio - decay * jnp.exp(log_ratio))

    def _mean_of(self, each: jax.Array, mask: jax.Array, tokens_per_pass: jax.Array) -> jax.Array:
        """The loss of a micro-batch; a step's is the mean over its micro-batches."""
        masked = each * mask
        match self.loss_type:
            case "grpo" | "sapo":
                return _row_means(each, mask).mean()
            case "bnpo":
                return masked.sum() / jnp.maximum(mask.sum(), 1)
            case "dr_grpo":
                return masked.sum() / (mask.shape[0] * self.max_completion_length)
            case "luspo":
                return masked.sum(axis=-1).mean()
            case _:
                return masked.sum() / jnp.maximum(tokens_per_pass.mean(), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tokens:
    """What the losses read of a batch: [batch, length - 1], advantages [batch, 1]."""

    now: jax.Array
    old: jax.Array
    mask: jax.Array
    advantages: jax.Array
    log_weights: jax.Array

    def share(self, condition: jax.Array) -> jax.Array:
        """Share of the tokens, or of the completions for ratios of sequences."""
        values = condition.astype(jnp.float32)
        return values.mean() if values.shape[1] == 1 else _mean(values, self.mask)


def sampling_difference(logits: jax.Array, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """How far the log-probabilities that the sampler reported are from those here; empty if the policy is another one by now.

    Args:
        logits: [batch, length, vocab], of the policy.
        batch: with `labels`, and `sampling_logps` of `GRPOLoss`.

    Returns:
        Mean and largest difference, by trl's names.
    """
    if "sampling_logps" not in batch or "old_logps" in batch:
        return {}
    labels = batch["labels"]
    differences = jnp.abs(token_log_probs(jax.lax.stop_gradient(logits), labels) - batch["sampling_logps"])
    mask = (labels[:, 1:] != IGNORED).astype(jnp.float32)
    name = "sampling/sampling_logp_difference"
    return {f"{name}/mean": _mean(differences, mask), f"{name}/max": (differences * mask).max()}


def _entropies(logits: jax.Array) -> jax.Array:
    """Of the distributions of next tokens, [batch, length] of [batch, length, vocab], in nats."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -(jnp.exp(log_probs) * log_probs).sum(axis=-1)


def _most_uncertain(entropies: jax.Array, mask: jax.Array, quantile: float) -> jax.Array:
    """Which entropies are at least the quantile of those that count."""
    return entropies * mask >= jnp.nanquantile(jnp.where(mask > 0, entropies, jnp.nan), quantile)


def _row_means(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of each row where the mask is 1: [batch] of [batch, length]."""
    return (values * mask).sum(axis=-1) / jnp.maximum(mask.sum(axis=-1), 1)


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    return (values * mask).sum() / jnp.maximum(mask.sum(), 1)


def _check(loss: GRPOLoss) -> None:
    if loss.loss_type not in LOSS_TYPES:
        raise InvalidInputError(
            f"loss_type {loss.loss_type!r} is unknown.", "Losses have trl's names.", f"Use {', '.join(LOSS_TYPES)}."
        )
    if loss.importance_sampling_level not in _LEVELS:
        raise InvalidInputError(
            f"importance_sampling_level {loss.importance_sampling_level!r} is unknown.",
            "Levels have trl's names.",
            f"Use {' or '.join(_LEVELS)}.",
        )
    if loss.loss_type == "cispo" and loss.epsilon_high is None:
        raise InvalidInputError(
            "loss_type cispo has no epsilon_high.",
            "It is the bound of the ratios themselves.",
            "Add epsilon_high: 5.0.",
        )
    if loss.delta is not None and loss.loss_type not in _CLIPPED:
        raise InvalidInputError(
            f"delta={loss.delta} has no effect on loss_type {loss.loss_type}.",
            "It bounds clipped ratios.",
            f"Leave it out, or use {', '.join(_CLIPPED)}.",
        )
    for name in ("sapo", "vespo"):
        fields = [f for f in dataclasses.fields(loss) if f.name.startswith(name)]
        if loss.loss_type != name and (given := [f.name for f in fields if getattr(loss, f.name) != f.default]):
            raise InvalidInputError(
                f"{given[0]} has no effect on loss_type {loss.loss_type}.",
                "An option is honoured or refused, never ignored.",
                f"Leave it out, or use loss_type {name}.",
            )
    least = {
        "beta": 0,
        "epsilon": 0,
        "epsilon_high": 0,
        "delta": 0,
        "max_completion_length": 1,
        "off_policy_mask_threshold": 0,
    }
    least |= {field.name: 0 for field in dataclasses.fields(loss) if field.name.startswith("vespo")}
    for name, low in least.items():
        if (value := getattr(loss, name)) is not None and not low <= value < math.inf:
            raise InvalidInputError(
                f"{name}={value} is out of range.", f"It is at least {low}.", f"Pass another {name}."
            )
    for name in ("temperature", "sapo_temperature_neg", "sapo_temperature_pos"):
        if not 0 < getattr(loss, name) < math.inf:
            raise InvalidInputError(
                f"{name}={getattr(loss, name)} is out of range.", "It is above 0.", f"Pass another {name}."
            )
    if not 0 <= loss.top_entropy_quantile <= 1:
        raise InvalidInputError(
            f"top_entropy_quantile={loss.top_entropy_quantile} is out of range.",
            "It is a share.",
            "Pass one from 0 to 1.",
        )
