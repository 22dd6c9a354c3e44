"""Calls the callbacks of a run: transformers' `TrainerCallback`s, with its `TrainerState` and `TrainerControl`.

transformers' module is imported where there are callbacks only: it imports torch_xla, if that is installed.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import jax

from hfax.errors import InvalidInputError, UnsupportedOptionError

_WITHIN_STEP = ("on_pre_optimizer_step", "on_substep_end")
"""Events between parts of a step, which is one program here."""


class Callbacks:
    """The callbacks of a run.

    Args:
        callbacks: `TrainerCallback`s, or classes of them.
        args: the run's `TrainingArguments`, passed to each.
        model: the trained model, passed to each.

    Attributes:
        state: where the run is.
        control: what callbacks asked for.

    Raises:
        InvalidInputError: something that is no `TrainerCallback`.
        UnsupportedOptionError: one that listens to events within a step.
    """

    def __init__(self, callbacks: Sequence[Any], args: Any, model: Any) -> None:
        self._args, self._model = args, model
        self._callbacks: list[Any] = []
        self.state, self.control = _nothing(), _nothing()
        for callback in callbacks:
            self.add(callback)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, callback: Any) -> None:
        """Add a callback, or a class of one."""
        from transformers import TrainerCallback, TrainerControl, TrainerState

        made = callback() if isinstance(callback, type) else callback
        if not isinstance(made, TrainerCallback):
            raise InvalidInputError(
                f"{made!r} is not a callback.",
                "Callbacks are called at the events of transformers' TrainerCallback.",
                "Derive its class from transformers.TrainerCallback.",
            )
        for event in _WITHIN_STEP:
            if getattr(type(made), event) is not getattr(TrainerCallback, event):
                raise UnsupportedOptionError(
                    f"{type(made).__name__} has {event}, which is never called.",
                    "A step with all its parts is one compiled program.",
                    "Use on_step_begin or on_step_end; or change gradients with an optax optimizer.",
                )
        if not self._callbacks:
            self.state, self.control = TrainerState(), TrainerControl()
        self._callbacks.append(made)

    def start(self, done: int, total: int, best: float | None) -> None:
        """Begin a run of `total` steps after step `done`."""
        if not self._callbacks:
            return
        from transformers import TrainerControl, TrainerState

        self.state = TrainerState(
            global_step=done,
            max_steps=total,
            logging_steps=self._args.logging_steps,
            num_train_epochs=self._args.num_train_epochs,
            best_metric=best,
            is_local_process_zero=jax.process_index() == 0,
            is_world_process_zero=jax.process_index() == 0,
        )
        self.control = TrainerControl()
        self.call("on_train_begin")

    def begin_step(self) -> None:
        """Forget what was asked for after the step before."""
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self.call("on_step_begin")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Add metrics to the history."""
        if not self._callbacks:
            return
        self.state.log_history.append({**metrics, "step": step})
        self.call("on_log", logs=dict(metrics))

    def call(self, event: str, **more: Any) -> None:
        """Call all for an event.

        Raises:
            UnsupportedOptionError: one asked to leave the epoch.
        """
        for callback in self._callbacks:
            answer = getattr(callback, event)(self._args, self.state, self.control, model=self._model, **more)
            self.control = self.control if answer is None else answer
        if self.control.should_epoch_stop:
            raise UnsupportedOptionError(
                "A callback set should_epoch_stop.",
                "The rows of a step are a function of its number, so that runs can be resumed.",
                "Set should_training_stop.",
            )


def _nothing() -> Any:
    """Stands for the state and the control of a run without callbacks."""
    names = ("log", "evaluate", "save", "training_stop", "epoch_stop")
    return types.SimpleNamespace(**{f"should_{name}": False for name in names})
