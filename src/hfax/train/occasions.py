"""At which steps of a run evaluations and checkpoints are due, and which evaluation is the best one so far."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hfax.errors import InvalidInputError

_STRATEGIES = ("no", "steps", "epoch")
_SAVE_STEPS = 500
"""Steps between checkpoints of save_strategy="steps", as in transformers."""


def check_strategies(arguments: Any) -> None:
    """Raise for strategies of `TrainingArguments` that are unknown or contradict other options.

    Raises:
        InvalidInputError: names the option.
    """
    for name in ("eval", "save"):
        strategy, every = getattr(arguments, f"{name}_strategy"), getattr(arguments, f"{name}_steps")
        if strategy is not None and strategy not in _STRATEGIES:
            raise InvalidInputError(
                f"{name}_strategy={strategy!r} is unknown.",
                "Strategies have the names of transformers.",
                f"Use one of {', '.join(_STRATEGIES)}; load_best_model_at_end=True writes a checkpoint of the best model.",
            )
        if strategy in ("no", "epoch") and every is not None:
            raise InvalidInputError(
                f'{name}_strategy="{strategy}" does not use {name}_steps={every}.',
                "An argument is honoured or refused, never ignored.",
                f'Leave {name}_steps out, or pass {name}_strategy="steps".',
            )
    for name in ("eval", "save"):
        if arguments.load_best_model_at_end and getattr(arguments, f"{name}_strategy") == "no":
            raise InvalidInputError(
                f'load_best_model_at_end=True does not go with {name}_strategy="no".',
                "The best model is the one of the best evaluation, and is loaded from its checkpoint.",
                f'Pass {name}_strategy="steps" or "epoch".',
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Occasions:
    """Steps at which something is due.

    Args:
        every: steps between them; None: none but the end.
        at_end: whether the last step is one, too.
    """

    every: int | None
    at_end: bool

    def is_due(self, step: int, *, ends: bool) -> bool:
        """Whether it is due after a step, counted from 1.

        Args:
            step: the step.
            ends: whether the run ends with it.
        """
        return (ends and self.at_end) or (self.every is not None and step % self.every == 0)


def evaluations(arguments: Any, steps_per_epoch: int | None) -> Occasions:
    """When a run with `TrainingArguments` is evaluated; a data set without length has no epochs."""
    match arguments.eval_strategy:
        case "no":
            return Occasions(every=None, at_end=False)
        case "steps":
            return Occasions(every=arguments.eval_steps or arguments.logging_steps, at_end=True)
        case _:
            return Occasions(every=arguments.eval_steps or steps_per_epoch, at_end=True)


def saves(arguments: Any, steps_per_epoch: int | None) -> Occasions:
    """When checkpoints of a run with `TrainingArguments` are written."""
    match arguments.save_strategy:
        case "no":
            return Occasions(every=None, at_end=False)
        case "steps":
            return Occasions(every=arguments.save_steps or _SAVE_STEPS, at_end=True)
        case "epoch":
            return Occasions(every=steps_per_epoch, at_end=True)
        case _:
            return Occasions(every=arguments.save_steps, at_end=True)


class BestEvaluation:
    """The best evaluation so far.

    Args:
        metric: its name, with or without "eval_".
        greater_is_better: None: unless it is a loss or the perplexity.

    Attributes:
        value: its value; None: there was no evaluation.
        step: its step.
        worse: number of evaluations since.
    """

    def __init__(self, metric: str, greater_is_better: bool | None) -> None:
        self.metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        is_greater = not self.metric.endswith(("loss", "perplexity"))
        self._sign = 1 if (is_greater if greater_is_better is None else greater_is_better) else -1
        self.value: float | None = None
        self.step: int | None = None
        self.worse = 0

    def note(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is better than all before.

        Raises:
            InvalidInputError: it has no such metric.
        """
        if self.metric not in metrics:
            raise InvalidInputError(
                f"Evaluations have no metric {self.metric!r}.",
                "metric_for_best_model names it.",
                f"Use one of {', '.join(metrics)}.",
            )
        value = metrics[self.metric]
        is_better = not math.isnan(value) and (self.value is None or self._sign * value > self._sign * self.value)
        if is_better:
            self.value, self.step, self.worse = value, step, 0
        else:
            self.worse += 1
        return is_better

    def state(self) -> dict[str, Any]:
        """The state as JSON."""
        return {"value": self.value, "step": self.step, "worse": self.worse}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.value, self.step, self.worse = state["value"], state["step"], state["worse"]
