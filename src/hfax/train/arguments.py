"""What a run of training is told, with the names of `transformers.TrainingArguments` where it has them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import optax

from hfax.errors import InvalidInputError
from hfax.known_words import reject_arguments

_REPORTERS = ("jsonl", "tensorboard")
_WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)", re.IGNORECASE)
"""Weights that AdamW leaves undiminished, by name, as transformers' Trainer has it."""


@dataclasses.dataclass(frozen=True)
class TrainingArguments:
    """Options of `Trainer`.

    Args:
        output_dir: checkpoints, metrics and the trained model go there.
        num_train_epochs: passes over the data, if `max_steps` is not given.
        max_steps: steps of the optimizer.
        per_device_train_batch_size: rows of a forward pass for each part of the mesh that has rows of its own (the axes "data" and
            "fsdp"; 1 on one device).
        per_device_eval_batch_size: likewise, of evaluation; None: the same.
        gradient_accumulation_steps: forward passes a step.
        learning_rate: at its highest.
        lr_scheduler_type: how it falls after the warm-up: "linear" or "cosine" to 0, or "constant".
        warmup_steps: over which it rises from 0.
        weight_decay: of AdamW; biases and norms are left out.
        adam_beta1: of AdamW.
        adam_beta2: likewise.
        adam_epsilon: likewise.
        max_grad_norm: gradients are scaled down to this norm; None: never.
        gradient_checkpointing: keep each layer's input alone and compute the layer again.
        dropout: False: none, whatever the config says.
        logging_steps: steps between lines of metrics.
        eval_steps: steps between evaluations; None: after each epoch, if there is data for it.
        save_steps: steps between checkpoints; None: at the end alone.
        save_total_limit: of the checkpoints the latest so many are kept; None: all.
        early_stopping_patience: evaluations without a lower loss after which training ends; None: never.
        seed: of the order of rows and of dropout.
        shuffle: rows of each epoch in an order of its own.
        report_to: "jsonl" (metrics.jsonl) and "tensorboard" (runs/): one, several, "all" or "none".
        progress: a bar, where stderr is a terminal.
    """

    output_dir: str | Path
    _: dataclasses.KW_ONLY
    num_train_epochs: int = 1
    max_steps: int | None = None
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int | None = None
    gradient_accumulation_steps: int = 1
    learning_rate: float = 5e-5
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    gradient_checkpointing: bool = False
    dropout: bool = True
    logging_steps: int = 10
    eval_steps: int | None = None
    save_steps: int | None = None
    save_total_limit: int | None = 2
    early_stopping_patience: int | None = None
    seed: int = 42
    shuffle: bool = True
    report_to: str | tuple[str, ...] = ("jsonl",)
    progress: bool = True

    def __new__(cls, *args: Any, **options: Any) -> TrainingArguments:
        """Refuse names that mean nothing here, before `__init__` ends in a bare TypeError."""
        names = {field.name for field in dataclasses.fields(cls)}
        reject_arguments("TrainingArguments", [name for name in options if name not in names], names)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        positive = ("num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps")
        optional = ("max_steps", "per_device_eval_batch_size", "eval_steps", "save_steps", "save_total_limit")
        wrong = [n for n in positive if getattr(self, n) < 1]
        wrong += [n for n in optional if getattr(self, n) is not None and getattr(self, n) < 1]
        wrong += [n for n in ("warmup_steps", "learning_rate", "weight_decay") if getattr(self, n) < 0]
        if wrong:
            raise InvalidInputError(
                f"{wrong[0]}={getattr(self, wrong[0])} is too small.",
                "Counts are 1 or more; rates are not negative.",
                f"Pass another {wrong[0]}.",
            )
        words: dict[str, tuple[str, ...]] = {"all": _REPORTERS, "none": ()}
        given = words.get(self.report_to, (self.report_to,)) if isinstance(self.report_to, str) else self.report_to
        if unknown := set(given) - set(_REPORTERS):
            raise InvalidInputError(
                f"report_to={self.report_to!r} names {sorted(unknown)[0]!r}.",
                "Metrics go to JSON lines and to TensorBoard.",
                'Pass report_to="jsonl", "tensorboard", "all" or "none".',
            )
        object.__setattr__(self, "report_to", tuple(given))

    def schedule(self, steps: int) -> Callable[[Any], Any]:
        """The learning rate of each of `steps` steps, as transformers' schedulers give it."""

        def rate(step: Any) -> Any:
            warm = step / max(self.warmup_steps, 1)
            done = (step - self.warmup_steps) / max(steps - self.warmup_steps, 1)
            done = jnp.clip(done, 0.0, 1.0)
            fall = {
                "linear": 1.0 - done,
                "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done)),
                "constant": jnp.ones_like(done),
            }[self.lr_scheduler_type]
            return self.learning_rate * jnp.where(step < self.warmup_steps, warm, fall)

        return rate

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """AdamW with the schedule for `steps` steps, after the gradients' norm is bounded."""
        adamw = optax.adamw(
            self.schedule(steps),
            b1=self.adam_beta1,
            b2=self.adam_beta2,
            eps=self.adam_epsilon,
            weight_decay=self.weight_decay,
            mask=_decays,
        )
        return (
            adamw if self.max_grad_norm is None else optax.chain(optax.clip_by_global_norm(self.max_grad_norm), adamw)
        )


def _decays(params: Any) -> Any:
    """Whether a weight is diminished, by name."""
    return {name: _WITHOUT_DECAY.search(name) is None for name in params}
