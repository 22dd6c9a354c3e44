"""The training loop of GRPO: prompts are completed by the model in training, and completions that are rewarded become likelier."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from hfax.backends.jax.model import JaxModel
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.known_words import keywords, reject_arguments
from hfax.train.arguments import TrainingArguments
from hfax.train.data import BatchOrder, in_batches
from hfax.train.grpo import GRPOLoss, sampling_difference
from hfax.train.logs import keep_until
from hfax.train.losses import Apply, sequence_logits
from hfax.train.rewards import RewardFunction, Scored, advantages, name_of, reward_metrics, score, total_rewards
from hfax.train.rollouts import (
    Completion,
    RolloutCollator,
    RolloutConfig,
    Writer,
    check_processes,
    prompt_rows,
    seed_of,
    training_row,
)
from hfax.train.step import Trainable
from hfax.train.streaming import StreamOrder, make_order
from hfax.train.trainer import Trainer

COMPLETIONS_NAME = "completions.jsonl"
_EVALUATION = 1
"""Tells seeds of evaluations from those of training."""


class GRPOTrainer(Trainer):
    """Trains a model with rewards for what it writes (GRPO and its variants), with the engine's continuous batching.

    Args:
        model: the model to train, a decoder-only one that generates.
        reward_funcs: one or several functions with trl's signature: they take `prompts`, `completions`, `completion_ids`, the
            data's other columns, `trainer_state`, `log_metric(name, value)` and `log_extra(column, values)` by name, and return a
            number, or None for no reward, for each completion. May be coroutine functions.
        args: training options. `per_device_train_batch_size` counts completions; a generation of `steps_per_generation` times as
            many (on all shards) must be divisible by `num_generations`.
        train_dataset: rows with `prompt`, as text or messages, and any other columns; sized and indexable.
        eval_dataset: evaluation data, in the same format.
        processing_class: the tokenizer; None: that of the model's folder.
        loss: the loss, with the sampling temperature and the maximum length of completions; None: `GRPOLoss()`.
        rollouts: how completions are generated and rewarded; None: `RolloutConfig()`.
        max_length: most tokens of prompt and completion; rows with longer prompts are left out. None: none are.
        ref_model: the reference if `loss.beta` is not 0; None: the model as it is now, without its adapter.
        optimizer: see `Trainer`.
        trainable: see `Trainer`.
        callbacks: see `Trainer`.

    Raises:
        InvalidInputError: the numbers of completions do not fit each other, or a row has no prompt.
        UnsupportedOptionError: a model with an encoder, several processes, or an argument of trl's that hfax lacks.

    Examples:
        >>> rewards = lambda completions, **_: [-len(text) for text in completions]
        >>> args = TrainingArguments(folder, max_steps=1, report_to="none")
        >>> loss = GRPOLoss(max_completion_length=4)
        >>> trainer = GRPOTrainer(model, rewards, args, [{"prompt": "Return a"}], processing_class=tokenizer, loss=loss)
        >>> "reward" in trainer.train()
        True
    """

    def __init__(
        self,
        model: JaxModel,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        args: TrainingArguments,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        processing_class: Any = None,
        loss: GRPOLoss | None = None,
        rollouts: RolloutConfig | None = None,
        max_length: int | None = None,
        ref_model: JaxModel | None = None,
        optimizer: optax.GradientTransformation | None = None,
        trainable: Trainable = None,
        callbacks: Sequence[Any] | None = None,
        **others: Any,
    ) -> None:
        reject_arguments("GRPOTrainer", others, keywords(GRPOTrainer.__init__))
        _check_model(model)
        self._functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._rollouts = rollouts or RolloutConfig()
        self._own_loss = loss or GRPOLoss()
        self._weights = _weights(self._rollouts, self._functions)
        tokenizer = _tokenizer_of(model) if processing_class is None else processing_class
        self._tokenizer = tokenizer
        room = self._own_loss.max_completion_length
        longest = None if max_length is None else max_length - room
        if longest is not None and longest < 1:
            raise InvalidInputError(
                f"max_length={max_length} leaves no room for prompts.",
                f"Completions have up to {room} tokens.",
                f"Raise max_length above {room}, or lower max_completion_length.",
            )
        sets = [
            None if d is None else prompt_rows(d, tokenizer, max_length=longest) for d in (train_dataset, eval_dataset)
        ]
        longest = max((len(row["prompt_ids"]) for rows in sets for row in rows or ()), default=1)
        self._make_writer = functools.partial(
            Writer, model, tokenizer, longest=longest + room, max_num_seqs=self._rollouts.max_num_seqs
        )
        self._found: list[dict[str, float]] = []
        """Metrics of the generations since they were logged."""
        self._writer: Writer | None = None
        if args.metric_for_best_model == "loss":  # evaluations have rewards, and no loss
            args = dataclasses.replace(args, metric_for_best_model="reward")
        super().__init__(
            model,
            args,
            *sets,
            data_collator=RolloutCollator(pad_token_id=tokenizer.pad_token_id or 0, max_length=longest + room),
            loss=self._own_loss,
            ref_model=ref_model,
            optimizer=optimizer,
            trainable=trainable,
            callbacks=callbacks,
        )
        period = self._steps_per_generation
        if args.save_steps is not None and args.save_steps % period:
            raise InvalidInputError(
                f"save_steps={args.save_steps} is not a multiple of {period}.",
                f"Each generation of completions serves {period} steps (steps_per_generation, num_iterations), and a run resumes "
                "with a new one.",
                f"Use save_steps={max(args.save_steps // period, 1) * period}.",
            )

    def train(self, **options: Any) -> dict[str, float]:
        """Train to the end, see `Trainer.train`; the metrics have those of rewards and completions by trl's names."""
        try:
            return super().train(**options)
        finally:
            self._end_writer()

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """Rewards of completions of a data set's prompts: "eval_reward" and others by trl's names, but no loss.

        Args:
            eval_dataset: rows with `prompt`; None: the trainer's eval_dataset.

        Raises:
            InvalidInputError: there is no data.
        """
        rows = (
            self.eval_dataset if eval_dataset is None else prompt_rows(eval_dataset, self._tokenizer, max_length=None)
        )
        if not rows:
            raise InvalidInputError("There is no evaluation data.", "The data set has no rows.", "Pass eval_dataset.")
        count = self._rollouts.num_generations_eval or self._rollouts.num_generations
        is_alone = self._writer is None
        try:
            found: list[tuple[int, dict[str, float]]] = []
            for number, some in enumerate(in_batches(rows, max(self._completions_per_generation // count, 1))):
                completions, scored, _, is_equal = self._generate(some, count, (_EVALUATION, number))
                found.append((len(some), self._metrics_of(completions, scored, is_equal)))
        finally:
            if is_alone:
                self._end_writer()
        return {
            f"eval_{name}": sum(share * metrics.get(name, 0.0) for share, metrics in found) / len(rows)
            for name in found[0][1]
        }

    # What is different from training on rows

    @property
    def _passes_per_generation(self) -> int:
        return self._rollouts.steps_per_generation or self.args.gradient_accumulation_steps

    @property
    def _completions_per_generation(self) -> int:
        return self.args.per_device_train_batch_size * self._num_parts * self._passes_per_generation

    @property
    def _steps_per_generation(self) -> int:
        """Steps that learn from the completions of a generation."""
        return self._passes_per_generation // self.args.gradient_accumulation_steps * self._rollouts.num_iterations

    @property
    def _steps_per_epoch(self) -> int | None:
        per_epoch = super()._steps_per_epoch
        return None if per_epoch is None else per_epoch * self._steps_per_generation

    def _make_order(self) -> BatchOrder | StreamOrder:
        if self.args.group_by_length:
            raise UnsupportedOptionError(
                "group_by_length is not supported with completions.",
                "Their lengths are not known before they are generated.",
                "Leave it out.",
            )
        parts, count = self.args.gradient_accumulation_steps, self._completions_per_generation
        if self._passes_per_generation % parts:
            raise InvalidInputError(
                f"steps_per_generation={self._passes_per_generation} is not a multiple of gradient_accumulation_steps={parts}.",
                "A step takes its forward passes from one generation of completions.",
                f"Use {parts}, {2 * parts}, ….",
            )
        if count % self._rollouts.num_generations:
            raise InvalidInputError(
                f"A generation of {count} completions is not divisible by num_generations={self._rollouts.num_generations}.",
                f"It has per_device_train_batch_size={self.args.per_device_train_batch_size} for each of {self._num_parts} shards, "
                f"{self._passes_per_generation} times (steps_per_generation), in whole groups of a prompt.",
                "Change one of them.",
            )
        return make_order(self.train_dataset, count // self._rollouts.num_generations, self.args)

    def _shape_of_run(self) -> dict[str, Any]:
        return {
            **super()._shape_of_run(),
            "rollouts": self._rollouts,
            "reward_funcs": [name_of(f) for f in self._functions],
        }

    def _steps(self, done: int) -> Iterator[tuple[int, int, Any]]:
        assert self._order is not None
        period, per_step = self._steps_per_generation, self._rows_per_step()
        first, within = divmod(done, period)
        if within and done < self._total:
            raise InvalidInputError(
                f"The run to resume ended after step {done}, within the {period} steps of a generation of completions.",
                "They were written by the model as it was before, and are gone.",
                f"Resume from a checkpoint at a multiple of {period} steps.",
            )
        keep_until(self._folder / COMPLETIONS_NAME, done)
        step = done
        for number, (epoch, rows) in enumerate(self._order.after(first, self._position), start=first):
            if step >= self._total:
                return
            learned = self._rows_to_learn(number, step, rows)
            for _ in range(self._rollouts.num_iterations):
                for start in range(0, len(learned), per_step):
                    step += 1
                    if step > self._total:
                        return
                    yield step, epoch, learned[start : start + per_step]

    def _metrics_of_data(self) -> dict[str, float]:
        names = {name: None for metrics in self._found for name in metrics}
        means = {n: float(np.mean([metrics[n] for metrics in self._found if n in metrics])) for n in names}
        self._found.clear()
        return means

    # Generations

    def _rows_to_learn(self, number: int, step: int, rows: Sequence[Any]) -> list[dict[str, Any]]:
        """Completions of some prompts as rows for the loss, shuffled."""
        config = self._rollouts
        completions, scored, better, is_equal = self._generate(rows, config.num_generations, (0, number))
        metrics = self._metrics_of(completions, scored, is_equal)
        is_masked = [config.mask_truncated_completions and each.is_truncated for each in completions]
        num_labels = sum(len(each.token_ids) for each, masked in zip(completions, is_masked, strict=True) if not masked)
        learned = [
            training_row(each, advantage, tokens_per_pass=num_labels / self._passes_per_generation, is_masked=masked)
            for each, advantage, masked in zip(completions, better.tolist(), is_masked, strict=True)
        ]
        if config.log_completions:
            self._log(step + 1, completions, scored, better)
        if self._steps_per_generation > 1:  # later steps have other weights than those that wrote the completions
            metrics |= self._add_old_log_probs(learned)
        self._found.append(metrics)
        order = np.random.default_rng([self.args.seed, number]).permutation(len(learned))
        return [learned[i] for i in order]

    def _generate(
        self, rows: Sequence[Any], count: int, numbers: tuple[int, int]
    ) -> tuple[list[Completion], Scored, np.ndarray, np.ndarray]:
        """Completions, their rewards and advantages, and whether the rewards of a group are all equal."""
        self._writer = self._writer or self._make_writer()
        if self.state is not None:
            self._step.update_model(self.state)
        loss, config = self._own_loss, self._rollouts
        completions = self._writer.write(
            rows,
            [
                config.sampling(
                    count,
                    max_tokens=loss.max_completion_length,
                    temperature=loss.temperature,
                    seed=seed_of(self.args.seed, *numbers, index),
                )
                for index in range(len(rows))
            ],
        )
        names = [name for name in rows[0] if name not in ("prompt", "prompt_ids", "completion", "completion_ids")]
        arguments = {
            "prompts": [each.row["prompt"] for each in completions],
            "completions": [self._writer.as_prompted(each) for each in completions],
            "completion_ids": [each.token_ids for each in completions],
            **{name: [each.row.get(name) for each in completions] for name in names},
            "trainer_state": self._callbacks.state,
        }
        scored = score(self._functions, arguments, len(completions))
        better, is_equal = advantages(
            scored.rewards,
            self._weights,
            count,
            scale_rewards=str(config.scale_rewards),
            aggregation=config.multi_objective_aggregation,
        )
        return completions, scored, better, is_equal

    def _metrics_of(self, completions: Sequence[Completion], scored: Scored, is_equal: np.ndarray) -> dict[str, float]:
        lengths = np.array([len(each.token_ids) for each in completions])
        is_cut = np.array([each.is_truncated for each in completions])
        ended = lengths[~is_cut] if not is_cut.all() else np.zeros(1)
        return {
            **reward_metrics(self._functions, scored, self._weights, is_equal),
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": float(is_cut.mean()),
            "completions/mean_terminated_length": float(ended.mean()),
        }

    def _add_old_log_probs(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Add `old_logps` to rows, under the weights that wrote them; returns metrics."""
        per_pass = self.args.per_device_train_batch_size * self._num_parts
        found: list[dict[str, float]] = []
        for start in range(0, len(rows), per_pass):
            some = rows[start : start + per_pass]
            logps, metrics = self._step.compute(self._log_probs, self._require_state().params, self._collate(some))
            for row, values in zip(some, np.asarray(logps), strict=True):
                row["old_logps"] = values[: len(row["input_ids"]) - 1]
            found.append({name: float(value) for name, value in metrics.items()})
        return {n: float((max if n.endswith("max") else np.mean)([each[n] for each in found])) for n in found[0]}

    def _log_probs(self, apply: Apply, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        logits = sequence_logits(apply, batch)
        return self._own_loss.log_probs(logits, batch["labels"]), sampling_difference(logits, batch)

    def _log(self, step: int, completions: Sequence[Completion], scored: Scored, better: np.ndarray) -> None:
        """Append a generation to completions.jsonl."""
        assert self._writer is not None
        total = total_rewards(scored.rewards, self._weights)
        with (self._folder / COMPLETIONS_NAME).open("a", encoding="utf-8") as file:
            for i, each in enumerate(completions):
                line = {
                    "step": step,
                    "prompt": each.row["prompt"],
                    "completion": self._writer.as_prompted(each),
                    **{name_of(f): _number(r) for f, r in zip(self._functions, scored.rewards[i], strict=True)},
                    "reward": _number(total[i]),
                    "advantage": float(better[i]),
                    **{name: values[i] for name, values in scored.columns.items()},
                }
                file.write(json.dumps(line, default=str) + "\n")

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _weights(rollouts: RolloutConfig, functions: Sequence[Any]) -> np.ndarray:
    if not functions:
        raise InvalidInputError("There are no reward functions.", "Nothing would be learned.", "Pass reward_funcs.")
    if (given := rollouts.reward_weights) is not None and len(given) != len(functions):
        raise InvalidInputError(
            f"reward_weights has {len(given)} numbers for {len(functions)} reward functions.",
            "Each function has a weight.",
            f"Give {len(functions)}.",
        )
    names = [name_of(function) for function in functions]
    if len(set(names)) < len(names):
        raise InvalidInputError(
            f"Two reward functions are named {next(n for n in names if names.count(n) > 1)}.",
            "Their rewards are logged by name.",
            "Give them different names.",
        )
    return np.ones(len(functions)) if given is None else np.array(given, float)


def _check_model(model: Any) -> None:
    if model.config.is_encoder_decoder:
        raise UnsupportedOptionError(
            f"GRPO does not train {type(model).__name__}.",
            "It has an encoder and a decoder; prompts and completions are one sequence here.",
            "Use a decoder-only model.",
        )
    check_processes("GRPO")


def _tokenizer_of(model: JaxModel) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model.folder)
