"""The CTC loss (Graves et al., 2006) of classes whose names end with ForCTC, which read values of their labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from hfax.patches.control_flow import note_check
from hfax.patches.patch import ForwardPatch, OpPatch, Patch

_IMPOSSIBLE = -1e30
"""The logarithm of 0, with a gradient."""


def ctc_loss(
    log_probs: jax.Array,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> jax.Array:
    """torch's `ctc_loss`, by the forward algorithm in log space.

    Args:
        log_probs: [frames, batch, classes], or [frames, classes] for one row.
        targets: [batch, length], padded at the end; [all], rows one after another; or a selection by a traced mask.
        input_lengths: frames of each row.
        target_lengths: targets of each row.
        blank: the class without a label.
        reduction: "mean" (over rows, each divided by its number of targets), "sum" or "none".
        zero_infinity: rows that have too few frames for their targets count 0, not infinity.
    """
    if is_single := log_probs.ndim == 2:
        log_probs = log_probs[:, None]
    log_probs = log_probs.astype(jnp.float32)
    lengths = jnp.atleast_1d(jnp.asarray(input_lengths, jnp.int32))
    counts = jnp.atleast_1d(jnp.asarray(target_lengths, jnp.int32))
    labels = targets.left_aligned() if hasattr(targets, "left_aligned") else _by_row(jnp.asarray(targets), counts)
    loss = -_log_likelihoods(log_probs, labels, lengths, counts, blank)
    is_impossible = loss > -_IMPOSSIBLE / 2
    loss = jnp.where(is_impossible, 0.0 if zero_infinity else jnp.inf, loss)
    if reduction == "mean":
        return (loss / jnp.maximum(counts, 1)).mean()
    return loss.sum() if reduction == "sum" else loss[0] if is_single else loss


def _by_row(targets: jax.Array, counts: jax.Array) -> jax.Array:
    """Targets as [batch, length]."""
    if targets.ndim == 2:
        return targets
    if len(counts) == 1:
        return targets[None]
    starts = jnp.cumsum(counts) - counts
    return targets[jnp.minimum(starts[:, None] + jnp.arange(len(targets)), len(targets) - 1)]


def _log_likelihoods(
    log_probs: jax.Array, labels: jax.Array, lengths: jax.Array, counts: jax.Array, blank: int
) -> jax.Array:
    """[batch], of the labels of each row."""
    batch, most = labels.shape
    states = jnp.full((batch, 2 * most + 1), blank, jnp.int32).at[:, 1::2].set(labels.astype(jnp.int32))
    states = jnp.clip(states, 0, log_probs.shape[-1] - 1)  # what is behind a row's labels is not read
    scores = jnp.take_along_axis(log_probs, states[None], axis=-1)
    before = jnp.pad(states, ((0, 0), (2, 0)), constant_values=-1)[:, :-2]
    may_skip = (states != blank) & (states != before)
    place = jnp.arange(states.shape[1])
    first = jnp.where((place == 0) | ((place == 1) & (counts[:, None] > 0)), scores[0], _IMPOSSIBLE)

    def step(alpha: jax.Array, frame: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        time, score = frame
        padded = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=_IMPOSSIBLE)
        stays, moves, skips = padded[:, 2:], padded[:, 1:-1], jnp.where(may_skip, padded[:, :-2], _IMPOSSIBLE)
        new = jnp.maximum(jnp.logaddexp(jnp.logaddexp(stays, moves), skips) + score, _IMPOSSIBLE)
        return jnp.where(time < lengths[:, None], new, alpha), None

    alpha, _ = jax.lax.scan(step, first, (jnp.arange(1, len(scores)), scores[1:]))
    ends = [jnp.take_along_axis(alpha, jnp.maximum(2 * counts - i, 0)[:, None], axis=1)[:, 0] for i in (0, 1)]
    return jnp.where(counts > 0, jnp.logaddexp(*ends), ends[0])


def _bounded(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose labels are known to be below the vocabulary's size, which it asks for; the program checks that they are."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if isinstance(labels, torch.Tensor) and getattr(labels, "host", None) is None and hasattr(labels, "at_most"):
            size = module.config.vocab_size
            note_check(labels < size, f"labels must be below the vocabulary's size, {size}")
            labels = kwargs["labels"] = labels.clone()
            labels.at_most = size - 1  # pyright: ignore[reportAttributeAccessIssue]
        return original(*args, **kwargs)

    return forward


PATCHES: list[Patch] = [
    OpPatch(
        name="ctc-loss",
        why="`aten::_ctc_loss` has no lowering, and its targets are as many as the labels' values say",
        ops=("torch.nn.functional.ctc_loss",),
        lower=ctc_loss,
    ),
    ForwardPatch(
        name="ctc-labels",
        why="before the loss, the largest label is compared with the vocabulary's size",
        classes=(),
        only_if=lambda module: type(module).__name__.endswith("ForCTC"),
        make=_bounded,
    ),
]
