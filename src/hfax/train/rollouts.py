"""Completions that the model in training writes for prompts, with the engine, and the batches that are made of them."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hfax.engine.config import EngineConfig
from hfax.engine.engine import Engine
from hfax.engine.sampling_params import SamplingParams
from hfax.engine.sequence import FinishReason
from hfax.errors import InvalidInputError, UnsupportedOptionError
from hfax.train.data import Batch, Row, padded
from hfax.train.ignored import IGNORED
from hfax.train.preference_rows import prompt_ids_of
from hfax.train.rewards import AGGREGATIONS, SCALES
from hfax.train.row_formats import is_conversation, standard_row

logger = logging.getLogger(__name__)

_LENGTH_CLASS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How completions are generated and rewarded, with the names and defaults of trl 1.16's `GRPOConfig`.

    `temperature` and `max_completion_length` are those of `GRPOLoss`, which reads them, too.

    Args:
        num_generations: completions of a prompt, which are compared with each other; at least 2.
        num_generations_eval: the same in evaluations; None: `num_generations`.
        steps_per_generation: forward passes that the completions of one generation are divided into, a multiple of
            `gradient_accumulation_steps`; None: these, so that each step has its own completions.
        num_iterations: how often completions are learned from.
        top_p: sample from the smallest set of tokens with this probability.
        top_k: sample from so many tokens; 0: all.
        min_p: sample from tokens with at least this fraction of the best one's probability; None: all.
        repetition_penalty: as in transformers.
        reward_weights: a weight for each reward function; None: 1.
        scale_rewards: what advantages are divided by the standard deviation of: "group" (or True), the completions of a prompt;
            "batch", all that are generated together; "none" (or False), not divided.
        multi_objective_aggregation: "sum_then_normalize", or "normalize_then_sum" (GDPO: https://arxiv.org/abs/2601.05242).
        mask_truncated_completions: completions that reach `max_completion_length` have no loss.
        max_num_seqs: most completions that are written at once, which bounds the memory of their KV cache.
        log_completions: write prompts, completions, rewards and advantages to completions.jsonl in `output_dir`.

    Raises:
        InvalidInputError: a value is out of range.
    """

    num_generations: int = 8
    num_generations_eval: int | None = None
    steps_per_generation: int | None = None
    num_iterations: int = 1
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    reward_weights: tuple[float, ...] | None = None
    scale_rewards: str | bool = "group"
    multi_objective_aggregation: str = "sum_then_normalize"
    mask_truncated_completions: bool = False
    max_num_seqs: int = 64
    log_completions: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.scale_rewards, bool):
            object.__setattr__(self, "scale_rewards", "group" if self.scale_rewards else "none")
        for name, known in (("scale_rewards", SCALES), ("multi_objective_aggregation", AGGREGATIONS)):
            if getattr(self, name) not in known:
                raise InvalidInputError(
                    f"{name} {getattr(self, name)!r} is unknown.", "It has trl's names.", f"Use {' or '.join(known)}."
                )
        if self.multi_objective_aggregation == "normalize_then_sum" and self.scale_rewards != "group":
            raise InvalidInputError(
                f"scale_rewards={self.scale_rewards!r} has no effect with multi_objective_aggregation: normalize_then_sum.",
                "Each reward is divided by its deviation in the group, and their sum by that in the batch.",
                "Leave one of them out.",
            )
        least = {"num_generations": 2, "num_generations_eval": 1, "steps_per_generation": 1, "num_iterations": 1}
        least["max_num_seqs"] = 1
        for name, low in least.items():
            if (value := getattr(self, name)) is not None and value < low:
                raise InvalidInputError(
                    f"{name}={value} is too small.", f"It is at least {low}.", f"Pass another {name}."
                )
        self.sampling(1, max_tokens=1, temperature=1.0, seed=0)  # raises for what is out of range

    def sampling(self, n: int, *, max_tokens: int, temperature: float, seed: int) -> SamplingParams:
        """Sampling options for the completions of a prompt.

        Args:
            n: number of completions.
            max_tokens: most tokens of each.
            temperature: sampling temperature.
            seed: seed, from which each completion has random numbers of its own.
        """
        return SamplingParams(
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            logprobs=0,
        )


@dataclasses.dataclass(kw_only=True)
class Completion:
    """A completion of a prompt.

    Args:
        row: the prompt's row, from `prompt_rows`.
        token_ids: its ids, with the token that ended it.
        logps: what the sampler reports as their log-probabilities, at temperature 1, [tokens] float32.
        is_truncated: whether it reached its maximum length.
    """

    row: Row
    token_ids: list[int]
    logps: np.ndarray
    is_truncated: bool


def prompt_rows(rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, max_length: int | None) -> list[dict[str, Any]]:
    """Rows with prompts to complete.

    Args:
        rows: `prompt`, as text or messages (or ShareGPT's or Alpaca's questions), and any other columns, for reward functions.
        tokenizer: has a chat template for messages.
        max_length: most tokens of a prompt; rows with longer ones are dropped. None: no maximum.

    Returns:
        Rows with `prompt_ids`, `prompt` and the other columns.

    Raises:
        InvalidInputError: a row has no prompt, or no row is left.
    """
    found: list[dict[str, Any]] = []
    dropped = 0
    for number, row in enumerate(map(standard_row, rows), start=1):
        if (prompt := row.get("prompt")) is None and (turns := row.get("messages")):
            prompt = turns[:-1] if turns[-1].get("role") == "assistant" else turns
        if not prompt:
            raise InvalidInputError(
                f"Row {number} has no prompt.",
                f"Its columns are {', '.join(map(str, row)) or 'none'}.",
                "See docs/training.md for the formats of each recipe.",
            )
        ids = prompt_ids_of(prompt, tokenizer, row)
        if max_length is None or len(ids) <= max_length:
            found.append({**row, "prompt": prompt, "prompt_ids": ids})
        else:
            dropped += 1
    if not found:
        raise InvalidInputError(
            "No row is left.",
            f"There are none, or their prompts have more than {max_length} tokens, which leaves no room for completions.",
            "Raise max_length, lower max_completion_length, or check the data.",
        )
    if dropped:
        logger.warning("%d prompts of more than %d tokens are left out", dropped, max_length)
    return found


class Writer:
    """Writes completions with the present weights of a model.

    Args:
        model: the model in training.
        tokenizer: its tokenizer.
        longest: most tokens of prompt and completion.
        max_num_seqs: most completions that are written at once.
    """

    def __init__(self, model: Any, tokenizer: Any, *, longest: int, max_num_seqs: int) -> None:
        self._tokenizer = tokenizer
        context = model.parts.context
        if context is not None and longest > context:
            raise InvalidInputError(
                f"Prompts and completions of up to {longest} tokens exceed the model's context length of {context}.",
                "The model has no positions beyond that.",
                "Lower max_completion_length or max_new_tokens, or max_length, which counts prompt and completion.",
            )
        config = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=longest)
        self._engine = Engine(model, config=config)

    def write(self, rows: Sequence[Row], params: Sequence[SamplingParams]) -> list[Completion]:
        """Completions of each row, one after another, with the weights that the model has now.

        Args:
            rows: from `prompt_rows`.
            params: sampling options for each.
        """
        self._engine.update_weights()
        outputs = self._engine.generate([row["prompt_ids"] for row in rows], params)
        return [
            Completion(
                row=row,
                token_ids=list(each.token_ids),
                logps=np.array([token.logprob for token in each.logprobs or ()], np.float32),
                is_truncated=each.finish_reason != FinishReason.STOP,
            )
            for row, output in zip(rows, outputs, strict=True)
            for each in output.outputs
        ]

    def as_prompted(self, completion: Completion) -> Any:
        """A completion as text, or as messages if the prompt has messages."""
        text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return [{"role": "assistant", "content": text}] if is_conversation(completion.row["prompt"]) else text

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def check_processes(what: str) -> None:
    """Raise in a run of several processes.

    Args:
        what: writes completions, for the error.

    Raises:
        UnsupportedOptionError: there are several.
    """
    if jax.process_count() > 1:
        raise UnsupportedOptionError(
            f"{what} is not supported in a run of {jax.process_count()} processes.",
            "The engine that writes texts runs in one.",
            "Train in one process, over all of its devices.",
        )


def seed_of(*numbers: int) -> int:
    """A seed of 32 bits that differs with each number."""
    digest = hashlib.blake2b(np.array(numbers, np.int64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def training_row(
    completion: Completion, advantage: float, *, tokens_per_pass: float, is_masked: bool
) -> dict[str, Any]:
    """A completion as a row for `RolloutCollator`.

    Args:
        completion: the completion.
        advantage: its advantage.
        tokens_per_pass: see `GRPOLoss`.
        is_masked: it has no loss.
    """
    prompt = list(completion.row["prompt_ids"])
    labels = (
        [IGNORED] * (len(prompt) + len(completion.token_ids))
        if is_masked
        else [IGNORED] * len(prompt) + completion.token_ids
    )
    return {
        "input_ids": [*prompt, *completion.token_ids],
        "labels": labels,
        "sampling_logps": np.concatenate([np.zeros(len(prompt) - 1, np.float32), completion.logps]),
        "advantages": advantage,
        "tokens_per_pass": tokens_per_pass,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutCollator:
    """Collates rows of `training_row` into a batch for `GRPOLoss`, right-padded to 64, 128, 256, … tokens.

    Args:
        pad_token_id: token id for padding.
        max_length: most tokens of a row; None: none.
    """

    pad_token_id: int = 0
    max_length: int | None = None

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """The columns that `GRPOLoss` reads: int32 ids, masks and labels [rows, length], float32 others."""
        longest, length = max(len(row["input_ids"]) for row in rows), _LENGTH_CLASS
        while length < longest:
            length *= 2
        length = length if self.max_length is None else max(min(length, self.max_length), longest)
        ids = [row["input_ids"] for row in rows]
        batch = {
            "input_ids": padded(ids, length, self.pad_token_id),
            "attention_mask": padded([[1] * len(each) for each in ids], length, 0),
            "labels": padded([row["labels"] for row in rows], length, IGNORED),
        }
        for name in ("sampling_logps", "old_logps"):
            if name in rows[0]:
                batch[name] = padded([row[name] for row in rows], length - 1, 0, np.float32)
        for name in ("advantages", "tokens_per_pass"):
            batch[name] = np.array([row[name] for row in rows], np.float32)
        return batch
