"""Distillation on texts that the student, or the teacher, writes during training, as in trl 1.16's `GKDTrainer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hfax.backends.jax.model import JaxModel
from hfax.engine.sampling_params import SamplingParams
from hfax.errors import InvalidInputError
from hfax.train.arguments import TrainingArguments
from hfax.train.data import Row
from hfax.train.distillation import DistillationLoss
from hfax.train.ignored import IGNORED
from hfax.train.rollouts import Writer, check_processes, seed_of
from hfax.train.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationTexts:
    """Whose texts are learned from, with the names of trl 1.16's `GKDConfig`.

    Args:
        lmbda: probability of each step to take the student's own texts (on-policy distillation: https://arxiv.org/abs/2306.13649).
        seq_kd: the other steps take the teacher's texts, not those of the data (https://arxiv.org/abs/1606.07947).
        max_new_tokens: most tokens of such a text; they are sampled with the loss's temperature.
        max_num_seqs: most texts that are written at once, which bounds the memory of their KV cache.

    Raises:
        InvalidInputError: a value is out of range.
    """

    lmbda: float = 0.0
    seq_kd: bool = False
    max_new_tokens: int = 128
    max_num_seqs: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.lmbda <= 1:
            raise InvalidInputError(
                f"lmbda={self.lmbda} is out of range.", "It is a probability.", "Pass one from 0 to 1."
            )
        for name in ("max_new_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise InvalidInputError(
                    f"{name}={getattr(self, name)} is too small.", "It is a count.", f"Pass another {name}."
                )

    @property
    def are_written(self) -> bool:
        """Whether some texts are not those of the data."""
        return self.lmbda > 0 or self.seq_kd


class DistillationTrainer(Trainer):
    """Trains a student on the distributions of a teacher.

    Args:
        model: the student.
        args: training options.
        train_dataset: rows with `input_ids` and `labels`, -100 for the prompt. Texts that are written take the place of the last
            labels of a row, and what is before them is their prompt.
        eval_dataset: evaluation data, in the same format; it is evaluated as it is.
        teacher: the teacher.
        loss: the loss; its temperature samples texts, too.
        texts: whose texts are learned from.
        max_length: most tokens of prompt and text; longer prompts are cut. None: no maximum.
        **options: see `Trainer`.

    Raises:
        InvalidInputError: a row has no prompt before its labels, though texts are written.
        UnsupportedOptionError: texts are written in a run of several processes.
    """

    def __init__(
        self,
        model: JaxModel,
        args: TrainingArguments,
        train_dataset: Any,
        eval_dataset: Any = None,
        *,
        teacher: JaxModel,
        loss: DistillationLoss,
        texts: DistillationTexts,
        max_length: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, args, train_dataset, eval_dataset, loss=loss, ref_model=teacher, **options)
        self._texts, self._temperature = texts, loss.temperature
        self._writers: dict[str, Writer] = {}
        self._writing = {"student": model, "teacher": teacher}
        if not texts.are_written:
            return
        check_processes("Distillation with lmbda or seq_kd")
        longest = 0
        for number, row in enumerate(train_dataset, start=1):
            length = prompt_length(row)
            if not length:
                raise InvalidInputError(
                    f"Row {number} has no prompt.",
                    "lmbda and seq_kd write texts for prompts, and all of this row is to be learned.",
                    "Use rows with prompt and completion, or messages; or leave lmbda and seq_kd out.",
                )
            longest = max(longest, length)
        wanted = longest + texts.max_new_tokens
        self._longest = wanted if max_length is None else min(max_length, wanted)

    def train(self, **options: Any) -> dict[str, float]:
        """Train to the end, see `Trainer.train`."""
        try:
            return super().train(**options)
        finally:
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()

    def _shape_of_run(self) -> dict[str, Any]:
        return {**super()._shape_of_run(), "texts": self._texts}

    def _steps(self, done: int) -> Iterator[tuple[int, int, Any]]:
        for step, epoch, rows in super()._steps(done):
            is_own = np.random.default_rng([self.args.seed, step]).random() < self._texts.lmbda
            if is_own:
                self._step.update_model(self._require_state())
                yield step, epoch, self._written("student", step, rows)
            elif self._texts.seq_kd:
                yield step, epoch, self._written("teacher", step, rows)
            else:
                yield step, epoch, rows

    def _written(self, name: str, step: int, rows: Sequence[Row]) -> list[Mapping[str, Any]]:
        """Rows with other texts after the same prompts."""
        if name not in self._writers:
            self._writers[name] = Writer(
                self._writing[name], None, longest=self._longest, max_num_seqs=self._texts.max_num_seqs
            )
        prompts = [list(row["input_ids"])[: min(prompt_length(row), self._longest - 1)] for row in rows]
        params = [
            SamplingParams(
                max_tokens=min(self._texts.max_new_tokens, self._longest - len(prompt)),
                temperature=self._temperature,
                seed=seed_of(self.args.seed, step, index),
            )
            for index, prompt in enumerate(prompts)
        ]
        completions = self._writers[name].write([{"prompt_ids": prompt} for prompt in prompts], params)
        return [
            {
                "input_ids": [*prompt, *each.token_ids],
                "labels": [*[IGNORED] * len(prompt), *each.token_ids],
            }
            for prompt, each in zip(prompts, completions, strict=True)
        ]


def prompt_length(row: Row) -> int:
    """Number of tokens before the last run of labels of a row; 0: it begins with it. All tokens of a row without labels."""
    labels = np.asarray(row.get("labels", row["input_ids"]))
    is_learned = labels != IGNORED
    if not is_learned.any():
        return len(labels)
    end = int(np.flatnonzero(is_learned)[-1])
    before = np.flatnonzero(~is_learned[:end])
    return 0 if not len(before) else int(before[-1]) + 1
