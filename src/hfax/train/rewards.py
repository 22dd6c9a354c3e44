"""Rewards of completions: functions with trl's signature, and the advantages that GRPO computes from what they return."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import inspect
import logging
import math
import numbers
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from hfax.errors import InvalidInputError

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
"""Takes `prompts`, `completions`, `completion_ids`, the data's other columns, `trainer_state`, `log_metric` and `log_extra` by
name, and returns a number, or None, for each completion; may be a coroutine function."""
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
SCALES = ("group", "batch", "none")
_EPSILON = 1e-4


def load_reward_functions(names: str | Sequence[str]) -> list[RewardFunction]:
    """Functions by name.

    Args:
        names: one or several of "file.py:function" and "package.module.function".

    Raises:
        InvalidInputError: there is no such file, module or function, or importing it failed.
    """
    return [_load(name) for name in ([names] if isinstance(names, str) else names)]


def _load(name: str) -> RewardFunction:
    where, colon, attribute = name.rpartition(":") if ".py:" in name else name.rpartition(".")
    if not where or not attribute.isidentifier():
        raise _not_found(name, "It names no function.")
    try:
        module = _module_of_file(Path(where)) if colon == ":" else importlib.import_module(where)
    except Exception as error:  # whatever the user's module raises
        raise _not_found(name, f"{type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = [
            n
            for n, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        raise _not_found(name, f"{where} has no function {attribute}; it has {', '.join(found) or 'none'}.")
    return function


def _module_of_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"hfax_rewards_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for dataclasses and pickles in it
    spec.loader.exec_module(module)
    return module


def _not_found(name: str, why: str) -> InvalidInputError:
    return InvalidInputError(
        f"reward_funcs: {name!r} could not be loaded.",
        why,
        "Name a function as rewards.py:function, or package.module.function.",
    )


@dataclasses.dataclass(kw_only=True)
class Scored:
    """What the reward functions say of completions.

    Args:
        rewards: [completions, functions] float64; NaN where a function returned None.
        metrics: means of what the functions logged, by name.
        columns: what they logged of each completion, by name.
    """

    rewards: np.ndarray
    metrics: dict[str, float]
    columns: dict[str, list[Any]]


def score(functions: Sequence[RewardFunction], arguments: Mapping[str, Any], count: int) -> Scored:
    """Call the reward functions; coroutine functions run concurrently.

    Args:
        functions: the functions.
        arguments: theirs, by name, but for `log_metric` and `log_extra`.
        count: number of completions.

    Raises:
        InvalidInputError: a function returned something else than a number or None for each completion.
    """
    logged: dict[str, list[float]] = {}
    columns: dict[str, list[Any]] = {}

    def log_metric(name: str, value: float) -> None:
        logged.setdefault(name, []).append(float(value))

    def log_extra(column: str, values: Sequence[Any]) -> None:
        columns.setdefault(column, []).extend(values)

    given = {**arguments, "log_metric": log_metric, "log_extra": log_extra}
    answers = [_called(function, given) for function in functions]
    waiting = {i: answer for i, answer in enumerate(answers) if inspect.isawaitable(answer)}
    if waiting:
        with ThreadPoolExecutor(1) as threads:  # this one may run an event loop already, as notebooks do
            found = threads.submit(asyncio.run, _all(list(waiting.values()))).result()
        for i, answer in zip(waiting, found, strict=True):
            answers[i] = answer
    rewards = np.stack([_checked(f, answer, count) for f, answer in zip(functions, answers, strict=True)], axis=1)
    if len(unscored := np.flatnonzero(np.isnan(rewards).all(axis=1))):
        row = int(unscored[0])
        warnings.warn(
            f"No reward function has a reward for the completion {arguments['completions'][row]!r:.200} of the prompt "
            f"{arguments['prompts'][row]!r:.200}: nothing is learned from it.",
            stacklevel=2,
        )
    if wrong := [name for name, values in columns.items() if len(values) != count]:
        raise InvalidInputError(
            f"log_extra({wrong[0]!r}, …) got {len(columns[wrong[0]])} values for {count} completions.",
            "A column has a value for each completion.",
            "Pass as many values as completions.",
        )
    return Scored(rewards=rewards, metrics={n: float(np.mean(v)) for n, v in logged.items()}, columns=columns)


def name_of(function: Any) -> str:
    """The name under which a function's rewards are logged."""
    return getattr(function, "__name__", type(function).__name__)


def _called(function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the call itself, not what it ran
            raise InvalidInputError(
                f"The reward function {name_of(function)} cannot be called: {error}.",
                f"It is called with {', '.join(arguments)} by name.",
                "Give it **kwargs for those that it does not read.",
            ) from error
        raise


async def _all(answers: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*answers))


def _checked(function: RewardFunction, answer: Any, count: int) -> np.ndarray:
    values = list(answer) if isinstance(answer, (Sequence, np.ndarray)) and not isinstance(answer, str) else None
    is_right = values is not None and all(v is None or isinstance(v, (numbers.Real, np.generic)) for v in values)
    if values is None or not is_right or len(values) != count:
        raise InvalidInputError(
            f"The reward function {name_of(function)} returned {answer!r:.200} for {count} completions.",
            "It returns a list with a number, or None, for each completion.",
            "Return one number per completion.",
        )
    found = np.array([math.nan if value is None else float(value) for value in values])
    if np.isinf(found).any():
        raise InvalidInputError(
            f"The reward function {name_of(function)} returned an infinite reward.",
            "Advantages are differences of rewards.",
            "Return finite numbers, or None for no reward.",
        )
    return found


def total_rewards(rewards: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The weighted sum of the functions' rewards for each completion; NaN where none has one.

    Args:
        rewards: [completions, functions].
        weights: [functions].
    """
    total = np.nansum(rewards * weights, axis=1)
    total[np.isnan(rewards).all(axis=1)] = np.nan
    return total


def advantages(
    rewards: np.ndarray, weights: np.ndarray, num_generations: int, *, scale_rewards: str, aggregation: str
) -> tuple[np.ndarray, np.ndarray]:
    """How much better than the others of its group each completion is, with trl's formulas.

    Args:
        rewards: [completions, functions], NaN for none; the completions of a prompt stand together.
        weights: [functions].
        num_generations: completions of a prompt.
        scale_rewards: "group", "batch" or "none": what is divided by the standard deviation of.
        aggregation: "sum_then_normalize" or "normalize_then_sum".

    Returns:
        Advantages, 0 without a reward, and whether the rewards they come from are all equal; [completions] each.
    """
    if aggregation == "normalize_then_sum":
        groups = rewards.reshape(-1, num_generations, rewards.shape[1])
        each = (groups - _mean(groups, axis=1)) / (_std(groups, axis=1) + _EPSILON)
        total = total_rewards(each.reshape(rewards.shape), weights)
        std = np.broadcast_to(_std(total, axis=0), total.shape)
        return np.nan_to_num((total - _mean(total, axis=0)) / (std + _EPSILON)), np.isclose(std, 0)
    total = total_rewards(rewards, weights)
    groups = total.reshape(-1, num_generations)
    centred = (groups - _mean(groups, axis=1)).reshape(-1)
    std = np.broadcast_to(
        _std(total, axis=0) if scale_rewards == "batch" else _std(groups, axis=1), groups.shape
    ).reshape(-1)
    scaled = centred if scale_rewards == "none" else centred / (std + _EPSILON)
    return np.nan_to_num(scaled), np.isclose(std, 0)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of what is not NaN; NaN of nothing."""
    counts = np.maximum((~np.isnan(values)).sum(axis=axis, keepdims=True), 1)
    return np.nansum(values, axis=axis, keepdims=True) / counts


def _std(values: np.ndarray, axis: int) -> np.ndarray:
    """The standard deviation of a sample of what is not NaN; 0 of less than two."""
    counts = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    squares = np.nansum((values - _mean(values, axis)) ** 2, axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(counts - 1, 1))


def reward_metrics(
    functions: Sequence[RewardFunction], scored: Scored, weights: np.ndarray, is_equal: np.ndarray
) -> dict[str, float]:
    """Metrics of rewards by trl's names.

    Args:
        functions: the reward functions.
        scored: what they say.
        weights: [functions].
        is_equal: from `advantages`.
    """
    found = dict(scored.metrics)
    for name, own in zip(map(name_of, functions), scored.rewards.T, strict=True):
        found[f"rewards/{name}/mean"] = float(_mean(own, axis=0)[0])
        found[f"rewards/{name}/std"] = float(_std(own, axis=0)[0])
    total = total_rewards(scored.rewards, weights)
    return {
        **found,
        "reward": float(_mean(total, axis=0)[0]),
        "reward_std": float(_std(total, axis=0)[0]),
        "frac_reward_zero_std": float(is_equal.mean()),
    }
