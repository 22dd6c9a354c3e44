"""Training options, named as in `transformers.TrainingArguments` where possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import optax

from hfax.errors import InvalidInputError
from hfax.known_words import reject_arguments

_REPORTERS = ("jsonl", "tensorboard")


@dataclasses.dataclass(frozen=True)
class TrainingArguments:
    """Options of `Trainer`.

    Args:
        output_dir: folder for checkpoints, metrics and the trained model.
        num_train_epochs: number of epochs, if `max_steps` is not given.
        max_steps: number of optimizer steps.
        per_device_train_batch_size: rows per forward pass on each data-parallel shard of the mesh (the axes "data" and "fsdp"; 1
            on one device).
        per_device_eval_batch_size: rows per shard in evaluation; None: `per_device_train_batch_size`.
        gradient_accumulation_steps: forward passes per step.
        learning_rate: peak learning rate.
        lr_scheduler_type: decay after warm-up: "linear" or "cosine" to 0, or "constant".
        warmup_steps: number of steps over which the learning rate rises from 0.
        weight_decay: AdamW weight decay; not applied to biases and norms, as in transformers' Trainer.
        adam_beta1: AdamW beta1.
        adam_beta2: AdamW beta2.
        adam_epsilon: AdamW epsilon.
        max_grad_norm: maximum gradient norm for clipping; None: no clipping.
        gradient_checkpointing: keep only each layer's input and recompute the layer in the backward pass.
        dropout: False disables dropout, regardless of the config.
        logging_steps: steps between logged metrics.
        eval_steps: steps between evaluations; None: after each epoch, if there is an evaluation data set.
        save_steps: steps between checkpoints; None: only at the end.
        save_total_limit: number of latest checkpoints to keep; None: all.
        early_stopping_patience: stop after this many evaluations without a lower loss; None: never.
        seed: seed for shuffling and dropout.
        shuffle: reshuffle rows each epoch.
        report_to: "jsonl" (metrics.jsonl) and "tensorboard" (runs/): one, several, "all" or "none".
        progress: show a progress bar if stderr is a terminal.
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
        """Reject unknown arguments with a clear error, before `__init__` raises a bare TypeError."""
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
                "Counts must be at least 1; rates must not be negative.",
                f"Pass a larger {wrong[0]}.",
            )
        words: dict[str, tuple[str, ...]] = {"all": _REPORTERS, "none": ()}
        given = words.get(self.report_to, (self.report_to,)) if isinstance(self.report_to, str) else self.report_to
        if unknown := set(given) - set(_REPORTERS):
            raise InvalidInputError(
                f"report_to={self.report_to!r} names {sorted(unknown)[0]!r}.",
                "Metrics can be written as JSON Lines and to TensorBoard.",
                'Pass report_to="jsonl", "tensorboard", "all" or "none".',
            )
        object.__setattr__(self, "report_to", tuple(given))

    def schedule(self, steps: int) -> Callable[[Any], Any]:
        """Learning rate schedule over `steps` steps, as in transformers' schedulers."""

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

    def optimizer(self, steps: int, decays: Callable[[str], bool]) -> optax.GradientTransformation:
        """AdamW with the schedule for `steps` steps, after gradient clipping; `decays` tells the weights that decay by name."""

        def mask(params: Any) -> Any:
            return {name: decays(name) for name in params}

        adamw = optax.adamw(
            self.schedule(steps),
            b1=self.adam_beta1,
            b2=self.adam_beta2,
            eps=self.adam_epsilon,
            weight_decay=self.weight_decay,
            mask=mask,
        )
        return (
            adamw if self.max_grad_norm is None else optax.chain(optax.clip_by_global_norm(self.max_grad_norm), adamw)
        )
