"""What callers pass as `stopping_criteria`, and `max_time`: what of it becomes an option, and what the host asks between chunks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from hfax.errors import InvalidInputError
from hfax.generation.host_processors import TextSoFar, name_of, warn_of_cost
from hfax.generation.processor_set import check_callables

if TYPE_CHECKING:
    from transformers import GenerationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopping:
    """When to stop, besides end-of-sequence tokens, stop strings and lengths.

    Args:
        criteria: functions of torch tensors, (input_ids [batch, length] int64, scores or None) -> [batch] bool or bool.
        deadline: `time.time()` after which no token is begun; None: never.
    """

    criteria: tuple[Callable[..., Any], ...] = ()
    deadline: float | None = None

    @property
    def is_past_deadline(self) -> bool:
        """Whether the time is over."""
        return self.deadline is not None and time.time() > self.deadline

    @property
    def chunk(self) -> int | None:
        """Tokens between two looks that criteria allow; None: any number. Stop strings can be found afterwards."""
        if not self.criteria:
            return None
        from transformers.generation import stopping_criteria as theirs

        return 8 if all(type(c) is theirs.StopStringCriteria for c in self.criteria) else 1


def read_stopping(given: Any, config: GenerationConfig, prompt_length: int, started: float) -> Stopping:
    """Sort the criteria of a call; those that an option describes are set in `config`, in place of the option, as in transformers.

    Args:
        given: `stopping_criteria` of `generate`.
        config: the options; changed in place.
        prompt_length: length of the prompts as passed, in tokens.
        started: `time.time()` when the call began.

    Raises:
        InvalidInputError: a criterion is not callable, or `max_time` is no number.
    """
    deadline, criteria = None, []
    if config.max_time is not None:
        if isinstance(config.max_time, bool) or not isinstance(config.max_time, (int, float)):
            raise InvalidInputError(
                f"max_time={config.max_time!r}.", "max_time is a number of seconds.", "Pass a number, or None."
            )
        deadline = started + config.max_time
    if not (given := check_callables("stopping_criteria", given)):
        return Stopping(deadline=deadline)
    from transformers.generation import stopping_criteria as theirs

    criterion: Any
    for criterion in given:
        if type(criterion) is theirs.MaxLengthCriteria:
            config.max_new_tokens = max(criterion.max_length - prompt_length, 1)
        elif type(criterion) is theirs.MaxTimeCriteria:
            deadline = criterion.initial_timestamp + criterion.max_time
        elif type(criterion) is not theirs.EosTokenCriteria:
            criteria.append(criterion)
    return Stopping(criteria=tuple(criteria), deadline=deadline)


def end_tokens(given: Any) -> tuple[int, ...] | None:
    """The ids of an `EosTokenCriteria` among the criteria, which take the place of `eos_token_id`; None without one."""
    if not given:
        return None
    from transformers.generation import stopping_criteria as theirs

    found = [c for c in given if type(c) is theirs.EosTokenCriteria]
    return tuple(found[0].eos_token_id.reshape(-1).tolist()) if found else None


class CriteriaCheck:
    """Asks the caller's criteria.

    Args:
        stopping: the criteria.
        text: the ids of every sequence.
    """

    def __init__(self, stopping: Stopping, text: TextSoFar) -> None:
        self._criteria, self._text = stopping.criteria, text
        if stopping.chunk == 1:
            warn_of_cost(f"The stopping criterion {name_of(stopping.criteria[0])}")

    def ended(
        self, tokens: np.ndarray, seen: int, steps: int, lengths: np.ndarray, scores: np.ndarray | None
    ) -> np.ndarray:
        """The length of each sequence up to where it ends, or -1; `lengths` where a criterion does not end it earlier.

        Args:
            tokens: [rows, capacity], the buffer of a program.
            seen: tokens already checked.
            steps: tokens generated so far.
            lengths: [sequences], as found so far.
            scores: [steps or more, rows, vocab] float32, if they are kept.
        """
        import torch

        lengths = lengths.copy()
        for step in range(seen + 1, steps + 1):
            ids = self._text.ids(tokens, step)
            kept = None if scores is None else tuple(torch.from_numpy(np.array(s[: len(ids)])) for s in scores[:step])
            done = torch.zeros(len(ids), dtype=torch.bool)
            for criterion in self._criteria:
                done = done | criterion(ids, kept)
            lengths[done.numpy() & ((lengths < 0) | (lengths > step))] = step
        return lengths
