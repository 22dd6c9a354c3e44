"""Training options, named as in `transformers.TrainingArguments` where possible."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import optax

from hfax.errors import InvalidInputError
from hfax.known_words import reject_arguments
from hfax.train.argument_values import check_values
from hfax.train.occasions import check_strategies
from hfax.train.optimizers import Weights, check_optimizer, make_optimizer, optim_args
from hfax.train.schedules import check_schedule, depends_on_end, make_schedule
from hfax.train.trackers import TRACKERS, installed_trackers
from hfax.train.updates import ByWeight

_REPORTERS = ("jsonl", "tensorboard", *TRACKERS)


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
        optim: "adamw_torch", "adafactor", "lion", "sgd" or "muon", as in transformers (Muon for the matrices of hidden layers,
            AdamW for other weights); "adamw_8bit" or "lion_8bit", with moments in 8 bits but for those of embeddings, on one
            device; or the name of an optimizer of optax, such as "lamb".
        optim_args: its options: for "sgd" `momentum` and `nesterov`, for "adafactor" `decay_rate` and `clip_threshold`, for "muon"
            `momentum`, `nesterov`, `ns_steps` and `adjust_lr_fn`; for others those of optax's function.
        lr_scheduler_type: schedule of the learning rate, as in transformers: "linear", "cosine", "cosine_with_restarts",
            "polynomial", "constant", "constant_with_warmup", "inverse_sqrt" or "warmup_stable_decay".
        lr_scheduler_kwargs: the schedule's options, as in transformers.
        warmup_steps: number of steps over which the learning rate rises from 0; below 1: their share of all steps.
        warmup_ratio: share of all steps over which it rises, in place of `warmup_steps`.
        weight_decay: weight decay, decoupled except with "sgd"; not applied to biases and norms, as in transformers' Trainer.
        adam_beta1: beta1 of AdamW and Lion.
        adam_beta2: beta2 of AdamW and Lion.
        adam_epsilon: AdamW epsilon.
        max_grad_norm: maximum gradient norm for clipping; None: no clipping.
        label_smoothing_factor: probability of each label that is spread over all classes, in training and in evaluation.
        neftune_noise_alpha: noise on the input embeddings in training (NEFTune); None: none.
        gradient_checkpointing: keep only each layer's input and recompute the layer in the backward pass.
        dropout: False disables dropout, regardless of the config.
        logging_steps: steps between logged metrics.
        eval_strategy: when the evaluation data set is evaluated, as in transformers: "no", "steps" (every `eval_steps`, by default
            every `logging_steps`, and at the end) or "epoch"; None: "steps" if `eval_steps` is given, else "epoch".
        eval_steps: steps between evaluations.
        save_strategy: when checkpoints are written: "no", "steps" (every `save_steps`, by default 500, and at the end) or
            "epoch", as in transformers; None: every `save_steps`, if given, and at the end.
        save_steps: steps between checkpoints.
        save_total_limit: number of latest checkpoints to keep, beside that of the best model; None: all.
        load_best_model_at_end: train to the end, and then load the weights of the best evaluation, which has a checkpoint.
        metric_for_best_model: what evaluations are compared by, here and for `early_stopping_patience`: "loss", or another
            metric of `Trainer.evaluate`, with or without "eval_".
        greater_is_better: whether larger values of it are better; None: unless it is a loss or the perplexity.
        early_stopping_patience: stop after this many evaluations without a better one; None: never.
        seed: seed for shuffling and dropout.
        shuffle: reshuffle rows each epoch.
        group_by_length: put shuffled rows of similar length into a step, which needs less padding.
        dataloader_num_workers: processes that read the rows of the training data ahead, and tokenize those of a
            `StreamingDataset`; 0: none. The data set is sent to each; iterables are read in this process.
        dataloader_prefetch_factor: steps, or buffers of a `StreamingDataset`, that each reads ahead; None: 2.
        report_to: "jsonl" (metrics.jsonl), "tensorboard" (runs/), "wandb" and "trackio" (through these packages): one, several,
            "all" that are installed, or "none".
        run_name: name of the run in wandb and trackio.
        project: their project.
        push_to_hub: upload the trained model (or adapter) after `train`.
        hub_model_id: repository to upload to, "owner/name" or a name of your own; None: the name of `output_dir`.
        hub_private_repo: visibility of a newly created repository; None: the account's default.
        hub_token: Hub token; None uses the one from `hf auth login`.
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
    optim: str = "adamw_torch"
    optim_args: dict[str, Any] | str | None = None
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "warmup_stable_decay",
    ] = "linear"
    lr_scheduler_kwargs: dict[str, Any] | None = None
    warmup_steps: float = 0
    warmup_ratio: float | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    label_smoothing_factor: float = 0.0
    neftune_noise_alpha: float | None = None
    gradient_checkpointing: bool = False
    dropout: bool = True
    logging_steps: int = 10
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    eval_steps: int | None = None
    save_strategy: Literal["no", "steps", "epoch"] | None = None
    save_steps: int | None = None
    save_total_limit: int | None = 2
    load_best_model_at_end: bool = False
    metric_for_best_model: str = "loss"
    greater_is_better: bool | None = None
    early_stopping_patience: int | None = None
    seed: int = 42
    shuffle: bool = True
    group_by_length: bool = False
    dataloader_num_workers: int = 0
    dataloader_prefetch_factor: int | None = None
    report_to: str | tuple[str, ...] = ("jsonl",)
    run_name: str | None = None
    project: str = "huggingface"
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool | None = None
    hub_token: str | None = dataclasses.field(default=None, repr=False)
    progress: bool = True

    def __new__(cls, *args: Any, **options: Any) -> TrainingArguments:
        """Reject unknown arguments with a clear error, before `__init__` raises a bare TypeError."""
        names = {field.name for field in dataclasses.fields(cls)}
        reject_arguments("TrainingArguments", [name for name in options if name not in names], names)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_values(self)
        check_schedule(self.lr_scheduler_type, self.lr_scheduler_kwargs or {}, self.learning_rate)
        check_strategies(self)
        check_optimizer(self)
        if self.warmup_ratio is not None and self.warmup_steps:
            raise InvalidInputError(
                f"warmup_ratio={self.warmup_ratio} and warmup_steps={self.warmup_steps} are both given.",
                "Both say how long the learning rate rises.",
                "Pass one of them.",
            )
        if self.lr_scheduler_type == "constant" and (self.warmup_ratio or self.warmup_steps):
            raise InvalidInputError(
                'lr_scheduler_type="constant" has no warm-up.',
                "transformers' schedule of this name ignores warmup_steps.",
                'Pass lr_scheduler_type="constant_with_warmup", or no warm-up.',
            )
        if self.group_by_length and not self.shuffle:
            raise InvalidInputError(
                "group_by_length=True does not go with shuffle=False.",
                "Rows of similar length are put together, so the order of the data is not kept.",
                "Leave one of them out.",
            )
        if self.dataloader_prefetch_factor is not None and not self.dataloader_num_workers:
            raise InvalidInputError(
                f"dataloader_prefetch_factor={self.dataloader_prefetch_factor} is given without dataloader_num_workers.",
                "Rows are read ahead by processes.",
                "Add dataloader_num_workers=2, or leave it out.",
            )
        given = self.report_to
        if given == "all":
            given = ("jsonl", "tensorboard", *installed_trackers())
        elif isinstance(given, str):
            given = () if given == "none" else (given,)
        if unknown := set(given) - set(_REPORTERS):
            raise InvalidInputError(
                f"report_to={self.report_to!r} names {sorted(unknown)[0]!r}.",
                "Metrics can be written as JSON Lines, to TensorBoard, wandb and trackio.",
                f"Pass {', '.join(_REPORTERS)}, all or none.",
            )
        object.__setattr__(self, "report_to", tuple(given))
        if self.hub_model_id is not None and not self.push_to_hub:
            raise InvalidInputError(
                f"hub_model_id={self.hub_model_id!r} is given without push_to_hub.",
                "Nothing would be uploaded.",
                "Add push_to_hub=True; or call trainer.push_to_hub(), and leave it out.",
            )

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of the warm-up in a run of `num_training_steps`, as in transformers."""
        share = self.warmup_steps if self.warmup_ratio is None else self.warmup_ratio
        is_count = self.warmup_ratio is None and share >= 1
        return int(share) if is_count else math.ceil(num_training_steps * share)

    def schedule(self, steps: int) -> Callable[[Any], Any]:
        """Learning rate schedule over `steps` steps, as in transformers' schedulers."""
        return make_schedule(
            self.lr_scheduler_type,
            self.lr_scheduler_kwargs or {},
            peak=self.learning_rate,
            warmup_steps=self.get_warmup_steps(steps),
            total_steps=steps,
        )

    def shape(self, steps: int) -> dict[str, Any]:
        """The options that shape the losses of a run of `steps` steps with the optimizer that they configure."""
        names = ("learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm")
        moments = ("adam_beta1", "adam_beta2", "adam_epsilon")
        options = self.lr_scheduler_kwargs or {}
        return {
            **{name: getattr(self, name) for name in (*names, *moments)},
            "optim": self.optim,
            "optim_args": optim_args(self),
            "lr_scheduler_kwargs": options,
            "warmup_steps": self.get_warmup_steps(steps),
            **({"max_steps": steps} if depends_on_end(self.lr_scheduler_type, options) else {}),
        }

    def optimizer(self, steps: int, weights: Weights) -> optax.GradientTransformation | ByWeight:
        """The optimizer with the schedule for `steps` steps, after gradient clipping."""
        return make_optimizer(self, self.schedule(steps), weights)
