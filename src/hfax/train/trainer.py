"""The training loop: data, evaluation, checkpoints, metrics. The step itself is `hfax.train.step`, usable on its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optax

from hfax.backends.jax.model import JaxModel
from hfax.errors import HfaxError, InvalidInputError
from hfax.known_words import keywords, reject_arguments
from hfax.sharding.mesh import BATCH_AXES, size_of
from hfax.train.arguments import TrainingArguments
from hfax.train.checkpoints import Checkpoints
from hfax.train.data import BatchOrder, Collator, PackedCollator, PaddingCollator, in_batches
from hfax.train.logs import MetricsLog
from hfax.train.losses import Loss
from hfax.train.packing import check_packing
from hfax.train.speed import Speed
from hfax.train.step import Trainable, TrainState, TrainStep
from hfax.train.updates import choose_decay

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a model on rows of a data set.

    Args:
        model: the model to train, on the mesh it was loaded with. It has the trained weights when `train` returns or raises.
        args: training options.
        train_dataset: mappings with `input_ids` and optionally `labels` (default: the ids), as a list, a `datasets` data set or
            a re-iterable; or rows from `hfax.train.data.pack`.
        eval_dataset: evaluation data, in the same formats as `train_dataset`.
        data_collator: collates rows into a batch; None: `PaddingCollator`, or `PackedCollator` for packed rows.
        optimizer: an optax optimizer; None: AdamW configured by `args`.
        loss: see `make_train_step`.
        trainable: see `make_train_step`.

    Raises:
        InvalidInputError: the model cannot be trained with these options, or the data set has fewer rows than a step needs.
        UnsupportedOptionError: an argument of transformers' Trainer that hfax lacks; the message names the alternative.

    Example:
        >>> rows = [{"input_ids": [5, 6, 7, 8]}] * 8
        >>> trainer = Trainer(model, TrainingArguments(folder, max_steps=1, report_to="none"), rows)
        >>> trainer.train()["steps"]
        1
        >>> trainer.save().name
        'model'
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
        reject_arguments("Trainer", others, keywords(Trainer.__init__))
        self.model, self.args = model, args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._folder = Path(args.output_dir)
        self._num_parts = 1 if model.mesh is None else size_of(model.mesh, BATCH_AXES)
        """Number of data-parallel shards of the mesh."""
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
            optimizer or args.optimizer(self._total, choose_decay(model.module)),
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
            resume_from_checkpoint: resume from the last complete checkpoint in `output_dir`, if any, with the same losses as an
                uninterrupted run.

        Returns:
            The last metrics: "loss" and "grad_norm" of the last step, "eval_loss" if evaluated, and "steps".

        Raises:
            InvalidInputError: rows lack required columns, or there are too few.
            HfaxError: the loss was non-finite (weights and last checkpoint are from before that step), or a checkpoint could
                not be written.
        """
        if self._order is None:
            raise InvalidInputError(
                "There is no training data.", "No train_dataset was given.", "Pass train_dataset to Trainer."
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
        """Resume `train` from the last complete checkpoint."""
        return self.train(resume_from_checkpoint=True)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """The mean loss over a data set, without dropout.

        Args:
            eval_dataset: data to evaluate on; None: the trainer's eval_dataset.

        Returns:
            "eval_loss", the mean over all labels, and "eval_perplexity".

        Raises:
            InvalidInputError: there is no data.
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
            raise InvalidInputError("There is no evaluation data.", "The data set has no labels.", "Pass eval_dataset.")
        loss = total / weight
        return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}

    def save(self, folder: str | Path | None = None) -> Path:
        """Save the trained model with `save_pretrained`; if an adapter is active, save only the adapter in PEFT format.

        Args:
            folder: output folder; None: "model" in `output_dir`.
        """
        folder = self._folder / "model" if folder is None else Path(folder)
        if self.model.active_adapters():
            self.model.save_adapter(folder)
        else:
            self.model.save_pretrained(folder)
        return folder

    # The loop

    def _begin(self, checkpoints: Checkpoints, resume: bool) -> int:
        """Initialise or restore the state; returns the number of steps already taken."""
        latest = checkpoints.latest()
        if latest is not None and not resume:
            raise InvalidInputError(
                f"{checkpoints.folder} has a checkpoint of step {latest}.",
                "A new run would mix its checkpoints with the earlier run's.",
                "Resume it (trainer.resume(), hfax train --resume), or use another output_dir.",
            )
        if latest is None:
            self.state = self._step.init(self.args.seed)
            return 0
        self.state, run = checkpoints.restore(latest, self._step.described_state())
        self._best, self._worse = run["best_eval_loss"], run["evaluations_without_better"]
        logger.info("resuming training after step %d", latest)
        return latest

    def _run(self, checkpoints: Checkpoints, log: MetricsLog, done: int) -> dict[str, float]:
        args, speed = self.args, Speed(self.model, self._step.trainable)
        last: dict[str, float] = {}
        held: dict[str, float] = {}
        losses: list[float] = []
        pending: tuple[int, Any] | None = None
        step = done

        def settle() -> None:
            """Read the metrics of the last started step."""
            nonlocal pending
            if pending is not None:
                last.update(self._checked(*pending))
                losses.append(last["loss"])
                pending = None

        for step, epoch, rows in self._steps(done):
            batch = self._collate(rows)
            state, metrics = self._step(self._require_state(), batch)
            self.state = state
            settle()  # the previous step, while the device runs this one
            pending = step, metrics
            speed.note(batch)
            log.advance(step)
            ends = step == self._total
            if step % args.logging_steps == 0 or ends:
                settle()
                rate = {} if self._rate is None else {"learning_rate": float(self._rate(step - 1))}
                mean = {"loss": sum(losses) / len(losses)}  # over the steps since the last line
                log.write(step, {**last, **mean, **rate, "epoch": epoch, **speed.read()})
                losses.clear()
            if self._is_evaluated(step, ends):
                settle()
                held = self.evaluate()
                log.write(step, held)
                ends = self._is_enough(held["eval_loss"]) or ends
                speed.pause()
            if ends or (args.save_steps is not None and step % args.save_steps == 0):
                settle()  # never save a step with a non-finite loss
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
        """A step's metrics as floats.

        Raises:
            HfaxError: the loss or the gradients are non-finite.
        """
        values = {name: float(value) for name, value in metrics.items()}
        if not values.pop("is_finite"):
            raise HfaxError(
                f"The loss of step {step} is {values['loss']}, and its gradient norm is {values['grad_norm']}.",
                "Training diverged, or a data row produced non-finite values. The weights are those from before this step.",
                "Lower the learning rate or max_grad_norm, lengthen the warm-up, or check the rows of this step; then resume from "
                "the last checkpoint.",
            )
        return values

    def _is_evaluated(self, step: int, ends: bool) -> bool:
        if self.eval_dataset is None:
            return False
        every = self.args.eval_steps or (self._order.steps_per_epoch if self._order is not None else None)
        return ends or (every is not None and step % every == 0)

    def _is_enough(self, loss: float) -> bool:
        """Whether early stopping applies: no improvement for `early_stopping_patience` evaluations."""
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
                "The data set has no length, so the number of steps is unknown.",
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
