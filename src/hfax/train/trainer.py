"""The loop around a step: data, evaluation, checkpoints, metrics. Thin: the step is `hfax.train.step`'s, and usable by itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optax

from hfax.backends.jax.model import JaxModel
from hfax.errors import HfaxError, InvalidInputError
from hfax.known_words import reject_arguments
from hfax.sharding.mesh import BATCH_AXES, size_of
from hfax.train.arguments import TrainingArguments
from hfax.train.checkpoints import Checkpoints
from hfax.train.data import BatchOrder, Collator, PackedCollator, PaddingCollator, in_batches
from hfax.train.logs import MetricsLog
from hfax.train.losses import Loss
from hfax.train.packing import check_packing
from hfax.train.speed import Speed
from hfax.train.step import Trainable, TrainState, TrainStep

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a model on rows of a data set.

    Args:
        model: what is trained; over the mesh that it was loaded with. Its weights follow the training: they are the trained ones
            when `train` returns or raises.
        args: see `TrainingArguments`.
        train_dataset: rows, mappings with `input_ids` and, if they are not the ids themselves, `labels`: a list, a data set of
            `datasets`, any iterable that can be gone through again; or rows of `hfax.train.data.pack`.
        eval_dataset: likewise.
        data_collator: makes a batch of rows; None: `PaddingCollator`, or `PackedCollator` for packed rows.
        optimizer: of optax; None: AdamW as `args` says.
        loss: see `make_train_step`.
        trainable: likewise.

    Raises:
        InvalidInputError: the model cannot be trained so, or the data set has fewer rows than a step reads.
        UnsupportedOptionError: an argument of transformers' Trainer that this one does not have; it says what to do instead.

    Example:
        >>> trainer = Trainer(model, TrainingArguments(output_dir="run", max_steps=100), rows)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
        >>> trainer.save()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: JaxModel,
        args: TrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        data_collator: Collator | None = None,
        optimizer: optax.GradientTransformation | None = None,
        loss: Loss | None = None,
        trainable: Trainable = None,
        **others: Any,
    ) -> None:
        known = ("model", "args", "train_dataset", "eval_dataset", "data_collator", "optimizer", "loss", "trainable")
        reject_arguments("Trainer", others, known)
        self.model, self.args = model, args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._folder = Path(args.output_dir)
        self._num_parts = 1 if model.mesh is None else size_of(model.mesh, BATCH_AXES)
        """Parts of the mesh that have rows of their own."""
        first = next(iter(train_dataset if train_dataset is not None else eval_dataset or []), None)
        self._collate = data_collator or _choose_collator(model, first)
        if isinstance(self._collate, PackedCollator):
            check_packing(model)
        self._order: BatchOrder | None = None
        if train_dataset is not None:
            rows = args.per_device_train_batch_size * self._num_parts * args.gradient_accumulation_steps
            self._order = BatchOrder(train_dataset, rows, args.seed, args.shuffle)
        self._total = self._count_steps()
        self._rate = None if optimizer is not None else args.schedule(self._total)
        self._step = TrainStep(
            model,
            optimizer or args.optimizer(self._total),
            loss,
            trainable=trainable,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            remat=args.gradient_checkpointing,
            dropout=args.dropout,
        )
        self.state: TrainState | None = None
        self._best: float | None = None
        self._worse = 0

    def train(self, *, resume_from_checkpoint: bool = False) -> dict[str, float]:
        """Train to the end.

        Args:
            resume_from_checkpoint: go on after the last whole checkpoint in `output_dir`, if there is one: with the same losses
                as a run that was never interrupted.

        Returns:
            The last metrics: "loss" and "grad_norm" of the last step, "eval_loss" if there was an evaluation, "steps".

        Raises:
            InvalidInputError: rows without the needed columns, or too few.
            HfaxError: the loss was not a number (the weights and the last checkpoint are those from before it), or a checkpoint
                could not be written.
        """
        if self._order is None:
            raise InvalidInputError(
                "There is nothing to train on.", "No train_dataset was given.", "Pass train_dataset to Trainer."
            )
        checkpoints = Checkpoints(self._folder, self.args.save_total_limit)
        try:
            done = self._begin(checkpoints, resume_from_checkpoint)
            log = MetricsLog(
                self._folder, self.args.report_to, after=done, total=self._total, progress=self.args.progress
            )
            try:
                return self._run(checkpoints, log, done)
            finally:
                log.close()
        finally:
            if self.state is not None:
                self._step.update_model(self.state)
            checkpoints.close()

    def resume(self) -> dict[str, float]:
        """`train`, after the last whole checkpoint."""
        return self.train(resume_from_checkpoint=True)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """The mean loss over a data set, without dropout.

        Args:
            eval_dataset: None: the trainer's.

        Returns:
            "eval_loss", over all labels, and for language models "eval_perplexity".

        Raises:
            InvalidInputError: there are no data.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        params = self.model.params if self.state is None else self.state.params
        total = weight = 0.0
        size = self.args.per_device_eval_batch_size or self.args.per_device_train_batch_size
        for rows in in_batches(dataset or [], size * self._num_parts):
            metrics = self._step.evaluate(params, self._collate(rows))
            total += float(metrics["loss"]) * float(metrics["weight"])
            weight += float(metrics["weight"])
        if not weight:
            raise InvalidInputError(
                "There is nothing to evaluate on.", "The data set gave no labels.", "Pass eval_dataset."
            )
        loss = total / weight
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}

    def save(self, folder: str | Path | None = None) -> Path:
        """Write the trained model, as `save_pretrained` does; of an adapter the adapter alone, as peft does.

        Args:
            folder: None: "model" in `output_dir`.
        """
        folder = self._folder / "model" if folder is None else Path(folder)
        if self.model.active_adapters():
            self.model.save_adapter(folder)
        else:
            self.model.save_pretrained(folder)
        return folder

    # The loop

    def _begin(self, checkpoints: Checkpoints, resume: bool) -> int:
        """Set the state; gives the steps that were taken already."""
        latest = checkpoints.latest()
        if latest is not None and not resume:
            raise InvalidInputError(
                f"{checkpoints.folder} has a checkpoint of step {latest}.",
                "A new run would mix its checkpoints with those of an earlier one.",
                "Resume it (trainer.resume(), hfax train --resume), or use another output_dir.",
            )
        if latest is None:
            self.state = self._step.init(self.args.seed)
            return 0
        self.state, run = checkpoints.restore(latest, self._step.described_state())
        self._best, self._worse = run["best_eval_loss"], run["evaluations_without_better"]
        logger.info("training goes on after step %d", latest)
        return latest

    def _run(self, checkpoints: Checkpoints, log: MetricsLog, done: int) -> dict[str, float]:
        args, speed = self.args, Speed(self.model, self._step.trainable)
        last: dict[str, float] = {}
        held: dict[str, float] = {}
        losses: list[float] = []
        pending: tuple[int, Any] | None = None
        step = done

        def settle() -> None:
            """Read the numbers of the step that was begun last."""
            nonlocal pending
            if pending is not None:
                last.update(self._checked(*pending))
                losses.append(last["loss"])
                pending = None

        for step, epoch, rows in self._steps(done):
            batch = self._collate(rows)
            state, metrics = self._step(self._require_state(), batch)
            self.state = state
            settle()  # of the step before, while the device is at work on this one
            pending = step, metrics
            speed.note(batch)
            log.advance(step)
            ends = step == self._total
            if step % args.logging_steps == 0 or ends:
                settle()
                rate = {} if self._rate is None else {"learning_rate": float(self._rate(step - 1))}
                mean = {"loss": sum(losses) / len(losses)}  # of the steps since the last line
                log.write(step, {**last, **mean, **rate, "epoch": epoch, **speed.read()})
                losses.clear()
            if self._is_evaluated(step, ends):
                settle()
                held = self.evaluate()
                log.write(step, held)
                ends = self._is_enough(held["eval_loss"]) or ends
                speed.pause()
            if ends or (args.save_steps is not None and step % args.save_steps == 0):
                settle()  # nothing is kept of a step whose loss is no number
                checkpoints.save(state, {"best_eval_loss": self._best, "evaluations_without_better": self._worse})
            if ends:
                break
        checkpoints.wait()
        return {**last, **held, "steps": step}

    def _steps(self, done: int) -> Iterator[tuple[int, float, Any]]:
        assert self._order is not None
        per_epoch = self._order.steps_per_epoch
        for step, (epoch, rows) in enumerate(self._order.after(done), start=done + 1):
            if step > self._total:
                return
            yield step, step / per_epoch if per_epoch else float(epoch), rows

    def _checked(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """The metrics of a step as numbers.

        Raises:
            HfaxError: the loss or the gradients are no numbers.
        """
        values = {name: float(value) for name, value in metrics.items()}
        if not values.pop("is_finite"):
            raise HfaxError(
                f"The loss of step {step} is {values['loss']}, and the norm of its gradients {values['grad_norm']}.",
                "Training has diverged, or a row of the data makes the model compute something that is no number.",
                "The weights are those from before that step, and the last checkpoint is kept. Lower the learning rate, lengthen "
                "the warm-up, bound max_grad_norm, or look at the rows of that step; then resume.",
            )
        return values

    def _is_evaluated(self, step: int, ends: bool) -> bool:
        if self.eval_dataset is None:
            return False
        every = self.args.eval_steps or (self._order.steps_per_epoch if self._order is not None else None)
        return ends or (every is not None and step % every == 0)

    def _is_enough(self, loss: float) -> bool:
        """Whether evaluations have not become better for as long as was asked."""
        if self._best is None or loss < self._best:
            self._best, self._worse = loss, 0
        else:
            self._worse += 1
        patience = self.args.early_stopping_patience
        return patience is not None and self._worse >= patience

    def _count_steps(self) -> int:
        if self.args.max_steps is not None:
            return self.args.max_steps
        per_epoch = None if self._order is None else self._order.steps_per_epoch
        if self._order is not None and per_epoch is None:
            raise InvalidInputError(
                "max_steps is not given.",
                "The data set does not say how long it is, so the schedule has no end.",
                "Pass max_steps=….",
            )
        return self.args.num_train_epochs * (per_epoch or 1)

    def _require_state(self) -> TrainState:
        assert self.state is not None
        return self.state


def _choose_collator(model: JaxModel, row: Any) -> Collator:
    if isinstance(row, Mapping) and {"input_ids", "position_ids", "labels"} <= set(row):
        return PackedCollator()
    pad: Any = model.generation_config.pad_token_id
    is_causal = model.can_generate() and not model.config.is_encoder_decoder
    return PaddingCollator(pad_token_id=pad or 0, is_causal=is_causal)
