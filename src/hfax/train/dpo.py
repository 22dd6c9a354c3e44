"""Direct preference optimization and its variants, with the names, defaults and formulas of trl 1.16's `DPOTrainer`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid

from hfax.errors import InvalidInputError
from hfax.train.ignored import IGNORED
from hfax.train.losses import Apply, num_labels, pair_logits, pair_metrics, token_log_probs

_OF_DIFFERENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
"""Losses of the difference of two rewards alone, which other divergences apply to."""
_SMOOTHED = ("robust", "exo_pair", "aot", "aot_unpaired")
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOLoss:
    """Direct preference optimization: Rafailov et al., 2023, equation 7 (https://arxiv.org/abs/2305.18290).

    Args:
        beta: strength of the penalty for deviating from the reference; tau of "ipo".
        loss_type: one or several of trl's: "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
            "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm".
        loss_weights: a weight for each of several losses; None: 1.
        label_smoothing: probability that a preference is flipped, of "robust", "exo_pair", "aot" and "aot_unpaired".
        reference_free: compare with a reference that gives all completions the same probability.
        ld_alpha: weight of the tokens beyond the length of the pair's shorter completion, from 0 to 1; None: 1.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence".
        f_alpha_divergence_coef: alpha of "alpha_divergence".
        discopop_tau: temperature of "discopop".
        use_weighting: weigh pairs by the model's own probability of them (WPO: https://arxiv.org/abs/2406.11827).

    Called with `apply` and a batch (see `hfax.train.losses.pair_logits`), it returns the loss and trl's "rewards/…".

    Raises:
        InvalidInputError: an unknown loss or divergence, or an option that the loss does not have.
    """

    beta: float = 0.1
    loss_type: str | tuple[str, ...] = "sigmoid"
    loss_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    reference_free: bool = False
    ld_alpha: float | None = None
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05
    use_weighting: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @property
    def loss_types(self) -> tuple[str, ...]:
        """All losses."""
        return (self.loss_type,) if isinstance(self.loss_type, str) else tuple(self.loss_type)

    @property
    def reference_names(self) -> tuple[str, ...]:
        """Columns of a batch that `reference` computes."""
        return () if self.reference_free else ("ref_chosen_logps", "ref_rejected_logps")

    def reference(self, apply: Apply, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Log-probabilities of chosen and rejected completions, [batch] float32 each."""
        logits, labels = pair_logits(apply, batch)
        chosen, rejected = jnp.split(self._summed(token_log_probs(logits, labels), labels), 2)
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def __call__(self, apply: Apply, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and metrics by trl's names."""
        logits, labels = pair_logits(apply, batch)
        log_probs = token_log_probs(logits, labels)
        chosen, rejected = jnp.split(self._summed(log_probs, labels), 2)
        zero = jnp.zeros_like(chosen)
        pair = _Pair(
            loss=self,
            chosen=chosen - batch.get("ref_chosen_logps", zero),
            rejected=rejected - batch.get("ref_rejected_logps", zero),
            ref_ratio=batch.get("ref_chosen_logps", zero) - batch.get("ref_rejected_logps", zero),
            log_probs=log_probs,
            labels=labels,
        )
        weights = self.loss_weights or (1.0,) * len(self.loss_types)
        each = [weight * _LOSSES[kind](pair) for kind, weight in zip(self.loss_types, weights, strict=True)]
        factor = _policy_weights(logits, log_probs, labels) if self.use_weighting else 1.0
        total = sum((one * factor).mean() for one in each)
        metrics = {
            **pair_metrics(pair.chosen, pair.rejected, self.beta),
            "logps/chosen": chosen.mean(),
            "logps/rejected": rejected.mean(),
        }
        return jnp.asarray(total), metrics

    def _summed(self, log_probs: jax.Array, labels: jax.Array) -> jax.Array:
        """Log-probabilities of completions, [2 · batch]."""
        if self.ld_alpha is None:
            return log_probs.sum(axis=-1)
        counts = labels[:, 1:] != IGNORED
        places, lengths = counts.cumsum(axis=-1), counts.sum(axis=-1)
        shared = jnp.tile(jnp.minimum(*jnp.split(lengths, 2)), 2)[:, None]
        return (log_probs * jnp.where(places <= shared, 1.0, self.ld_alpha)).sum(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pair:
    """What losses read of a batch: log-ratios [batch], labels [2 · batch, length] and their log-probabilities."""

    loss: DPOLoss
    chosen: jax.Array
    rejected: jax.Array
    ref_ratio: jax.Array
    log_probs: jax.Array
    labels: jax.Array

    @property
    def scores(self) -> tuple[jax.Array, jax.Array]:
        return _divergence(self.loss, self.chosen), _divergence(self.loss, self.rejected)

    @property
    def delta(self) -> jax.Array:
        """Beta times the difference of the scores."""
        chosen, rejected = self.scores
        return self.loss.beta * (chosen - rejected)

    @property
    def delta_of_means(self) -> jax.Array:
        """The difference of the scores a token."""
        chosen, rejected = self.scores
        of_chosen, of_rejected = jnp.split(num_labels(self.labels), 2)
        return chosen / of_chosen - rejected / of_rejected

    def smoothed(self, delta: jax.Array) -> jax.Array:
        """The sigmoid loss of a difference that is flipped with the probability `label_smoothing`."""
        delta, share = self.loss.beta * delta, self.loss.label_smoothing
        return -log_sigmoid(delta) * (1 - share) - log_sigmoid(-delta) * share


def _divergence(loss: DPOLoss, ratio: jax.Array) -> jax.Array:
    """Derivative of the divergence's generator at `exp(ratio)`: https://arxiv.org/abs/2309.16240."""
    match loss.f_divergence_type:
        case "forward_kl":
            return 1 - jnp.exp(-ratio)
        case "js_divergence":
            return math.log(2) + log_sigmoid(ratio)
        case "alpha_divergence" if abs(loss.f_alpha_divergence_coef - 1) >= 1e-6:
            power = loss.f_alpha_divergence_coef - 1
            return (jnp.exp(jnp.minimum(power * ratio, 80.0)) - 1) / power
        case _:
            return ratio


def _exo(pair: _Pair) -> jax.Array:
    flipped, delta = pair.loss.label_smoothing, pair.delta
    right = sigmoid(delta) * (log_sigmoid(delta) - math.log1p(-flipped))
    return right + sigmoid(-delta) * (log_sigmoid(-delta) - math.log(flipped))


def _nca(pair: _Pair) -> jax.Array:
    chosen, rejected = pair.loss.beta * pair.chosen, pair.loss.beta * pair.rejected
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def _robust(pair: _Pair) -> jax.Array:
    flipped, delta = pair.loss.label_smoothing, pair.delta
    return (-(1 - flipped) * log_sigmoid(delta) + flipped * log_sigmoid(-delta)) / (1 - 2 * flipped)


def _sppo(pair: _Pair) -> jax.Array:
    half = 0.5 / pair.loss.beta
    return (pair.chosen - half) ** 2 + (pair.rejected + half) ** 2


def _discopop(pair: _Pair) -> jax.Array:
    share = sigmoid(pair.delta / pair.loss.discopop_tau)
    return -log_sigmoid(pair.delta) * (1 - share) + jnp.exp(-pair.delta) * share


def _sft(pair: _Pair) -> jax.Array:
    rows = pair.chosen.shape[0]
    mean = -pair.log_probs[:rows].sum() / jnp.maximum((pair.labels[:rows, 1:] != IGNORED).sum(), 1)
    return jnp.broadcast_to(mean, (rows,))


def _aot(pair: _Pair) -> jax.Array:
    ratio = pair.chosen - pair.rejected + pair.ref_ratio
    return pair.smoothed(jnp.sort(ratio) - jnp.sort(pair.ref_ratio))


_LOSSES: dict[str, Callable[[_Pair], jax.Array]] = {
    "sigmoid": lambda pair: -log_sigmoid(pair.delta),
    "hinge": lambda pair: jax.nn.relu(1 - pair.delta),
    "ipo": lambda pair: (pair.delta_of_means - 1 / (2 * pair.loss.beta)) ** 2,
    "exo_pair": _exo,
    "nca_pair": _nca,
    "robust": _robust,
    "bco_pair": lambda p: -log_sigmoid(p.loss.beta * p.chosen) - log_sigmoid(-p.loss.beta * p.rejected),
    "sppo_hard": _sppo,
    "aot": _aot,
    "aot_unpaired": lambda p: p.smoothed(jnp.sort(p.chosen) - jnp.sort(p.rejected)),
    "apo_zero": lambda p: 1 - sigmoid(p.loss.beta * p.chosen) + sigmoid(p.loss.beta * p.rejected),
    "apo_down": lambda p: sigmoid(p.loss.beta * p.chosen) + 1 - sigmoid(p.loss.beta * (p.chosen - p.rejected)),
    "discopop": _discopop,
    "sft": _sft,
    "sigmoid_norm": lambda pair: -log_sigmoid(pair.loss.beta * pair.delta_of_means),
}
"""By trl's name: the loss of each pair, [batch]."""


def _policy_weights(logits: jax.Array, log_probs: jax.Array, labels: jax.Array) -> jax.Array:
    """Weight of each pair: the completions' probabilities a token, relative to those of a token drawn from the model."""
    all_probs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32), axis=-1)
    counts = labels[:, 1:] != IGNORED
    aligned = jnp.where(counts, log_probs - jax.nn.logsumexp(2 * all_probs, axis=-1), 0.0)
    means = aligned.sum(axis=-1) / jnp.maximum(counts.sum(axis=-1), 1)
    chosen, rejected = jnp.split(jax.lax.stop_gradient(jnp.exp(means)), 2)
    return chosen * rejected


def _check(loss: DPOLoss) -> None:
    kinds = loss.loss_types
    if unknown := [kind for kind in kinds if kind not in _LOSSES] or ([] if kinds else ["none"]):
        raise _wrong(f"loss_type {unknown[0]!r} is unknown", "Losses have trl's names", f"Use {', '.join(_LOSSES)}")
    if loss.loss_weights is not None and len(loss.loss_weights) != len(kinds):
        raise _wrong(
            f"loss_weights has {len(loss.loss_weights)} numbers for {len(kinds)} losses",
            "Each loss of loss_type has a weight",
            f"Give {len(kinds)}",
        )
    if loss.f_divergence_type not in _DIVERGENCES:
        raise _wrong(
            f"f_divergence_type {loss.f_divergence_type!r} is unknown", "It has trl's names", f"Use {_DIVERGENCES}"
        )
    if loss.f_divergence_type != "reverse_kl" and (others := [k for k in kinds if k not in _OF_DIFFERENCE]):
        raise _wrong(
            f"f_divergence_type {loss.f_divergence_type!r} does not go with loss_type {others[0]!r}",
            "It is defined for the difference of two rewards only",
            f"Leave it out, or use {', '.join(_OF_DIFFERENCE)}",
        )
    if loss.label_smoothing and not set(kinds) & set(_SMOOTHED):
        raise _wrong(
            f"label_smoothing={loss.label_smoothing} has no effect on {', '.join(kinds)}",
            "An option is honoured or refused, never ignored",
            f"Leave it out, or use {', '.join(_SMOOTHED)}",
        )
    if not 0 <= loss.label_smoothing < 0.5 or ("exo_pair" in kinds and not loss.label_smoothing):
        raise _wrong(
            f"label_smoothing={loss.label_smoothing} is out of range",
            "It is a probability from 0 to below 0.5, and above 0 for exo_pair",
            "Pass another one, such as 1e-3 for exo_pair",
        )
    if not loss.beta > 0 or not loss.discopop_tau > 0:
        raise _wrong(
            "beta and discopop_tau must be above 0", f"They are {loss.beta} and {loss.discopop_tau}", "Raise them"
        )
    if loss.ld_alpha is not None and not 0 <= loss.ld_alpha <= 1:
        raise _wrong(f"ld_alpha={loss.ld_alpha} is out of range", "It is a weight from 0 to 1", "Pass another one")


def _wrong(what: str, why: str, fix: str) -> InvalidInputError:
    return InvalidInputError(f"{what}.", f"{why}.", f"{fix}.")
