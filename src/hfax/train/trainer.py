"""The training loop: data, evaluation, checkpoints, metrics. The step itself is `hfax.train.step`, usable on its own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from hfax.backends.jax.model import JaxModel
from hfax.errors import CheckpointCorruptError, HfaxError, InvalidInputError, UnsupportedOptionError
from hfax.known_words import keywords, reject_arguments
from hfax.sharding.mesh import BATCH_AXES, size_of
from hfax.train.arguments import TrainingArguments
from hfax.train.callbacks import Callbacks
from hfax.train.checkpoints import Checkpoints
from hfax.train.data import BatchOrder, Collator, PackedCollator, PaddingCollator, in_batches
from hfax.train.label_smoothing import SmoothedTrainStep
from hfax.train.logs import MetricsLog
from hfax.train.losses import Loss
from hfax.train.occasions import BestEvaluation, evaluations, saves
from hfax.train.optimizers import Weights
from hfax.train.packing import check_packing
from hfax.train.predictions import ComputeMetrics, Predictor
from hfax.train.resumption import check_unchanged, described, fingerprint
from hfax.train.speed import Speed
from hfax.train.step import Trainable, TrainState, TrainStep
from hfax.train.streaming import Position, StreamOrder, make_order
from hfax.train.updates import ByWeight

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a model on rows of a data set.

    Args:
        model: the model to train, on the mesh it was loaded with. It has the trained weights when `train` returns or raises.
        args: training options.
        train_dataset: mappings with `input_ids` and optionally `labels` (default: the ids), as a list, a `datasets` data set or
            a re-iterable; rows from `hfax.train.data.pack`; or a `StreamingDataset`.
        eval_dataset: evaluation data, in the same formats as `train_dataset`.
        data_collator: collates rows into a batch; None: `PaddingCollator`, or `PackedCollator` for packed rows.
        optimizer: an optax optimizer; None: the one that `args.optim` names.
        loss: see `make_train_step`.
        ref_model: see `make_train_step`.
        trainable: see `make_train_step`.
        compute_metrics: takes transformers' `EvalPrediction` (numpy arrays of logits and labels of the evaluation data, padded with
            -100) and returns metrics by name, which evaluations report; with the model's own loss.
        preprocess_logits_for_metrics: maps logits and labels to what is kept of them, such as `logits.argmax(-1)`. Both are JAX
            arrays in the compiled program.
        callbacks: transformers' `TrainerCallback`s, called at its events except those within a step. `model` is this one, which
            has the current weights at `on_evaluate`, `on_save` and `on_train_end`.

    Raises:
        InvalidInputError: the model cannot be trained with these options, or the data set has fewer rows than a step needs.
        UnsupportedOptionError: an argument of transformers' Trainer that hfax lacks; the message names the alternative.

    Examples:
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
        ref_model: JaxModel | None = None,
        trainable: Trainable = None,
        compute_metrics: ComputeMetrics | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        **others: Any,
    ) -> None:
        reject_arguments("Trainer", others, keywords(Trainer.__init__))
        _check_optimizer(optimizer)
        self.model, self.args = model, args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._folder = Path(args.output_dir)
        self._num_parts = 1 if model.mesh is None else size_of(model.mesh, BATCH_AXES)
        """Number of data-parallel shards of the mesh."""
        first = next(iter(train_dataset if train_dataset is not None else eval_dataset or []), None)
        self._predictor = _make_predictor(compute_metrics, preprocess_logits_for_metrics, loss)
        self._first, self._loss, self._ref_model = first, loss, ref_model
        self._collate = data_collator or _choose_collator(model, first)
        if isinstance(self._collate, PackedCollator):
            check_packing(model)
        self._order: BatchOrder | StreamOrder | None = None
        if train_dataset is not None:
            self._order = self._make_order()
        self._position: Position | None = None
        self._total = self._count_steps()
        self._rate = None if optimizer is not None else args.schedule(self._total)
        weights = Weights.of(model.module)
        self._step = self._make_step(optimizer or args.optimizer(self._total, weights), trainable)
        self.state: TrainState | None = None
        self._best = BestEvaluation(args.metric_for_best_model, args.greater_is_better)
        self._callbacks = Callbacks(callbacks or (), args, model)
        self._callbacks.call("on_init_end")

    def train(self, *, resume_from_checkpoint: bool = False, accept_changes: Collection[str] = ()) -> dict[str, float]:
        """Train to the end.

        Args:
            resume_from_checkpoint: resume from the last whole checkpoint in `output_dir`, if any, with the same losses as an
                uninterrupted run.
            accept_changes: names of options that may differ from those of the run to resume, although they change its losses.

        Returns:
            The last metrics: "loss" and "grad_norm" of the last step, "eval_loss" if evaluated, and "steps".

        Raises:
            InvalidInputError: rows lack required columns, there are too few, or the run to resume had other options.
            CheckpointCorruptError: every checkpoint is damaged.
            HfaxError: the loss was non-finite (weights and last checkpoint are from before that step), or a checkpoint could
                not be written.
        """
        self._check_start(resume_from_checkpoint, accept_changes)
        checkpoints = Checkpoints(self._folder, self.args.save_total_limit)
        try:
            done = self._begin(checkpoints, resume_from_checkpoint, accept_changes)
            log = MetricsLog(self._folder, self.args, after=done, total=self._total)
            try:
                metrics = self._run(checkpoints, log, done)
            finally:
                log.close()
        finally:
            if self.state is not None:
                self._step.update_model(self.state)
            checkpoints.close()
        self._callbacks.call("on_train_end")
        if self.args.push_to_hub:
            self.push_to_hub()
        return metrics

    def resume(self, *, accept_changes: Collection[str] = ()) -> dict[str, float]:
        """Resume `train` from the last whole checkpoint.

        Args:
            accept_changes: see `train`.
        """
        return self.train(resume_from_checkpoint=True, accept_changes=accept_changes)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """The mean loss over a data set, without dropout.

        Args:
            eval_dataset: data to evaluate on; None: the trainer's eval_dataset.

        Returns:
            "eval_loss", the mean over all labels, and "eval_perplexity"; for a loss of your own, its mean over rows (or labels)
            and that of each of its metrics, with "eval_" before the name; and what `compute_metrics` returns.

        Raises:
            InvalidInputError: there is no data.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        params = self.model.params if self.state is None else self.state.params
        totals: dict[str, float] = {}
        weight = 0.0
        predictions, labels = list[np.ndarray](), list[np.ndarray]()
        size = self.args.per_device_eval_batch_size or self.args.per_device_train_batch_size
        for rows in in_batches(dataset or [], size * self._num_parts):
            batch = self._collate(rows)
            found = self._step.evaluate(params, batch, self._predictor and self._predictor.outputs)
            if self._predictor is not None:
                predictions.append(np.asarray(found.pop("outputs")))
                labels.append(np.asarray(batch["labels"]))
            metrics = {name: float(value) for name, value in found.items()}
            self._callbacks.call("on_prediction_step")
            share = metrics.pop("weight")
            weight += share
            totals = {n: totals.get(n, 0.0) + share * value for n, value in metrics.items()}
        if not weight:
            raise InvalidInputError("There is no evaluation data.", "The data set has no labels.", "Pass eval_dataset.")
        means = {f"eval_{name}": total / weight for name, total in totals.items()}
        if self._loss is None:
            means["eval_perplexity"] = math.exp(min(means["eval_loss"], 700.0))
        return means if self._predictor is None else {**means, **self._predictor.metrics(predictions, labels)}

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

    def push_to_hub(self, commit_message: str = "End of training", *, folder: str | Path | None = None) -> str:
        """Save the model, or the adapter, and upload it to `hub_model_id`.

        Args:
            commit_message: commit message.
            folder: a folder that is uploaded as it is; None: what `save` writes to "model" in `output_dir`.

        Returns:
            The URL of the commit.

        Raises:
            CheckpointAccessError: the token has no write access, or the Hub cannot be reached.
        """
        from hfax.load.hub import upload_folder

        self._callbacks.call("on_push_begin")
        return upload_folder(
            self.save() if folder is None else Path(folder),
            self.args.hub_model_id or self._folder.resolve().name,
            commit_message=commit_message,
            private=self.args.hub_private_repo,
            token=self.args.hub_token,
            revision=None,
            create_pr=False,
        )

    def add_callback(self, callback: Any) -> None:
        """Add a callback, see `callbacks`."""
        self._callbacks.add(callback)

    # The loop

    def _check_start(self, resume: Any, accepted: Collection[str]) -> None:
        if self._order is None:
            raise InvalidInputError(
                "There is no training data.", "No train_dataset was given.", "Pass train_dataset to Trainer."
            )
        if self.eval_dataset is None and (
            self.args.load_best_model_at_end or self.args.eval_strategy in ("steps", "epoch")
        ):
            raise InvalidInputError(
                "There is no evaluation data.",
                "eval_strategy and load_best_model_at_end evaluate the model.",
                "Pass eval_dataset to Trainer, or leave them out.",
            )
        if not isinstance(resume, bool):
            raise InvalidInputError(
                f"resume_from_checkpoint={resume!r} is not True or False.",
                "A run resumes from the last whole checkpoint of its own output_dir.",
                "Pass True; or copy the checkpoint to output_dir/checkpoints.",
            )
        if isinstance(accepted, str):
            raise InvalidInputError(
                f"accept_changes={accepted!r} is a text.", "It takes several names.", f"Pass [{accepted!r}]."
            )

    def _begin(self, checkpoints: Checkpoints, resume: bool, accepted: Collection[str]) -> int:
        """Initialise or restore the state; returns the number of steps already taken."""
        latest = checkpoints.latest()
        if latest is not None and not resume:
            raise InvalidInputError(
                f"{checkpoints.folder} has a checkpoint of step {latest}.",
                "A new run would mix its checkpoints with the earlier run's.",
                "Resume it (trainer.resume(), hfax train --resume), or use another output_dir.",
            )
        self._shape = described(self._shape_of_run())
        if resume and (whole := checkpoints.latest_whole()) is not None:
            run = checkpoints.run_of(whole)
            like = self._step.described_state()
            checkpoints.check_shapes(whole, like)  # another model has a clearer error than its options
            check_unchanged(run["shape"], self._shape, accepted)
            self.state = checkpoints.restore(whole, like)
            self._best.restore(run["best"])
            self._position = run.get("data")
            checkpoints.best = self._best.step if self.args.load_best_model_at_end else None
            logger.info("resuming training after step %d", whole)
            return whole
        self.state = self._step.init(self.args.seed)
        return 0

    def _shape_of_run(self) -> dict[str, Any]:
        """What shapes the losses, by the name that a user knows it by."""
        args, adapters = self.args, self.model.active_adapters()
        return {
            **({} if self._rate is None else args.shape(self._total)),
            **{
                name: getattr(args, name)
                for name in (
                    "seed",
                    "shuffle",
                    "group_by_length",
                    "dropout",
                    "label_smoothing_factor",
                    "neftune_noise_alpha",
                )
            },
            "rows_per_step": self._rows_per_step(),
            "train_dataset": fingerprint(self.train_dataset, self._first),
            "data_collator": self._collate,
            "loss": self._loss,
            "dtype": str(self.model.dtype),
            "adapter": self.model.adapters.configs[adapters[0]] if adapters else None,
        }

    def _make_step(self, optimizer: optax.GradientTransformation | ByWeight, trainable: Trainable) -> TrainStep:
        args = self.args
        options: dict[str, Any] = {
            "trainable": trainable,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "remat": args.gradient_checkpointing,
            "dropout": args.dropout,
            "neftune_noise_alpha": args.neftune_noise_alpha,
        }
        if not args.label_smoothing_factor:
            return TrainStep(self.model, optimizer, self._loss, ref_model=self._ref_model, **options)
        if self._loss is not None:
            raise InvalidInputError(
                f"label_smoothing_factor={args.label_smoothing_factor} does not go with a loss of your own.",
                "Smoothing is part of the loss.",
                "Smooth the labels in the loss, or leave one of them out.",
            )
        return SmoothedTrainStep(self.model, optimizer, factor=args.label_smoothing_factor, **options)

    def _make_order(self) -> BatchOrder | StreamOrder:
        """The order in which the rows of the data set are used."""
        return make_order(self.train_dataset, self._rows_per_step(), self.args)

    @property
    def _steps_per_epoch(self) -> int | None:
        """Steps of an epoch; None: the data set has no length."""
        return None if self._order is None else self._order.steps_per_epoch

    def _rows_per_step(self) -> int:
        args = self.args
        return args.per_device_train_batch_size * self._num_parts * args.gradient_accumulation_steps

    def _run(self, checkpoints: Checkpoints, log: MetricsLog, done: int) -> dict[str, float]:
        args, speed, calls = self.args, Speed(self.model, self._step.trainable), self._callbacks
        per_epoch = self._steps_per_epoch
        evaluated, saved = evaluations(args, per_epoch), saves(args, per_epoch)
        last: dict[str, float] = {}
        held: dict[str, float] = {}
        losses: list[float] = []
        pending: tuple[int, Any] | None = None
        step, current = done, None

        def settle() -> None:
            """Read the metrics of the last started step."""
            nonlocal pending
            if pending is not None:
                last.update(self._checked(*pending))
                losses.append(last["loss"])
                pending = None

        calls.start(done, self._total, self._best.value)
        for step, epoch, rows in self._steps(done):
            if current != (current := epoch):
                calls.call("on_epoch_begin")
            calls.begin_step()
            batch = self._collate(rows)
            state, metrics = self._step(self._require_state(), batch)
            self.state = state
            calls.call("on_optimizer_step")
            settle()  # the previous step, while the device runs this one
            pending = step, metrics
            speed.note(batch)
            log.advance(step)
            share = step / per_epoch if per_epoch else float(epoch)
            calls.state.global_step, calls.state.epoch = step, share
            calls.call("on_step_end")
            ends = step == self._total or calls.control.should_training_stop
            if step % args.logging_steps == 0 or ends or calls.control.should_log:
                settle()
                rate = {} if self._rate is None else {"learning_rate": float(self._rate(step - 1))}
                mean = {"loss": sum(losses) / len(losses)}  # over the steps since the last line
                last |= self._metrics_of_data()
                line = {**last, **mean, **rate, "epoch": share, **speed.read()}
                log.write(step, line)
                calls.log(step, line)
                losses.clear()
            if ends or (per_epoch and step % per_epoch == 0):
                calls.call("on_epoch_end")
            is_best = False
            if self.eval_dataset is not None and (evaluated.is_due(step, ends=ends) or calls.control.should_evaluate):
                settle()
                held = self.evaluate()
                log.write(step, held)
                calls.log(step, held)
                self._call_with_weights("on_evaluate", metrics=held)
                is_best = self._best.note(step, held) and args.load_best_model_at_end
                calls.state.best_metric, calls.state.best_global_step = self._best.value, self._best.step
                ends = ends or self._best.worse >= (args.early_stopping_patience or math.inf)
                ends = ends or calls.control.should_training_stop
                speed.pause()
            if is_best or saved.is_due(step, ends=ends) or calls.control.should_save:
                settle()  # never save a step with a non-finite loss
                checkpoints.best = self._best.step if args.load_best_model_at_end else None
                assert self._order is not None
                run = {"best": self._best.state(), "shape": self._shape, "data": self._order.position}
                checkpoints.save(state, run)
                self._call_with_weights("on_save")
            if ends:
                settle()
                break
        checkpoints.wait()
        if args.load_best_model_at_end:
            self._load_best(checkpoints)
        return {**last, **held, "steps": step}

    def _call_with_weights(self, event: str, **more: Any) -> None:
        """Call callbacks while the model has the current weights."""
        if self._callbacks:
            self._step.update_model(self._require_state())
            self._callbacks.call(event, **more)

    def _load_best(self, checkpoints: Checkpoints) -> None:
        """Replace the last step's weights with those of the best evaluation."""
        best, like = self._best.step, self._step.described_state()
        if best is None or best == int(self._require_state().step):
            return
        if (damage := checkpoints.damage(best)) is not None:
            raise CheckpointCorruptError(
                f"The checkpoint of step {best}, which has the best model, is damaged.",
                f"{damage[0].upper()}{damage[1:]}. The model has the weights of the last step.",
                "Save these, or resume from an earlier checkpoint.",
            )
        self._step.update_model(self._require_state())
        self.state = None  # two states may not fit on the device
        self.state = checkpoints.restore(best, like)
        logger.info("loaded the best model, of step %d", best)

    def _steps(self, done: int) -> Iterator[tuple[int, int, Any]]:
        """Number, epoch and rows of each step."""
        assert self._order is not None
        for step, (epoch, rows) in enumerate(self._order.after(done, self._position), start=done + 1):
            if step > self._total:
                return
            yield step, epoch, rows

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

    def _count_steps(self) -> int:
        if self.args.max_steps is not None:
            return self.args.max_steps
        per_epoch = self._steps_per_epoch
        if self._order is not None and per_epoch is None:
            raise InvalidInputError(
                "max_steps is not given.",
                "The data set has no length, so the number of steps is unknown.",
                "Pass max_steps=….",
            )
        return self.args.num_train_epochs * (per_epoch or 1)

    def _metrics_of_data(self) -> dict[str, float]:
        """Metrics of the rows since the last call."""
        return {}

    def _require_state(self) -> TrainState:
        assert self.state is not None
        return self.state


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InvalidInputError(
            f"optimizer={optimizer!r} is not an optimizer of optax.",
            "An optimizer has the functions init and update; names are given in TrainingArguments(optim=…).",
            "Pass one like optax.adamw(1e-4), adafactor, sgd, lion or lamb; or leave it out.",
        )


def _make_predictor(compute: ComputeMetrics | None, preprocess: Any, loss: Loss | None) -> Predictor | None:
    if compute is not None and jax.process_count() > 1:
        raise UnsupportedOptionError(
            f"compute_metrics is not supported in a run of {jax.process_count()} processes.",
            "Each process has the logits of its own rows only.",
            "Evaluate the saved model in one process.",
        )
    if compute is not None and loss is None:
        return Predictor(compute, preprocess)
    if compute is None and preprocess is None:
        return None
    raise InvalidInputError(
        "preprocess_logits_for_metrics is given without compute_metrics."
        if compute is None
        else "compute_metrics does not go with a loss of your own.",
        "It takes the logits and labels that the model's own loss reads.",
        "Report metrics from the loss, which may return a dict of them.",
    )


def _choose_collator(model: JaxModel, row: Any) -> Collator:
    if isinstance(row, Mapping) and {"input_ids", "position_ids", "labels"} <= set(row):
        return PackedCollator()
    pad: Any = model.generation_config.pad_token_id
    is_causal = model.can_generate() and not model.config.is_encoder_decoder
    return PaddingCollator(pad_token_id=pad or 0, is_causal=is_causal)
