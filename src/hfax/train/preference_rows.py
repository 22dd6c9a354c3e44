"""Tokenizes pairs of completions, and completions with a verdict, as trl 1.16 does. Knows nothing about models."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from hfax.errors import InvalidInputError
from hfax.train.examples import NothingToLearnError
from hfax.train.ignored import IGNORED
from hfax.train.row_formats import is_conversation, standard_row

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Truncation = Literal["keep_start", "keep_end"]
_SIDES = ("chosen", "rejected")


def pair_rows(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    max_length: int | None,
    truncation_mode: Truncation = "keep_start",
) -> list[Row]:
    """Rows for losses of pairs (DPO, ORPO).

    Args:
        rows: `chosen` and `rejected`, as texts or messages, with `prompt`, or beginning with the same prompt.
        tokenizer: adds the end of sequence to texts, and has a chat template for messages.
        max_length: tokens that are kept of prompt and completion; None: all.
        truncation_mode: whether their start or their end is kept.

    Returns:
        Rows with `chosen_ids`, `rejected_ids`, and labels of both, -100 for the prompt. With "keep_start", rows whose prompt alone
        has `max_length` tokens are dropped.

    Raises:
        InvalidInputError: a row in another format, or no row is left.
    """
    found: list[Row] = []
    for number, row in enumerate(map(standard_row, rows), start=1):
        prompt, *answers = _tokenized(_with_prompt(row, number), _SIDES, tokenizer)
        if max_length is not None and truncation_mode == "keep_start" and len(prompt) >= max_length:
            continue
        new: Row = {}
        for side, answer in zip(_SIDES, answers, strict=True):
            new[f"{side}_ids"] = _cut([*prompt, *answer], max_length, truncation_mode)
            new[f"{side}_labels"] = _cut([*[IGNORED] * len(prompt), *answer], max_length, truncation_mode)
        found.append(new)
    return _some(found, max_length)


def reward_rows(rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, max_length: int | None) -> list[Row]:
    """Rows for a reward model.

    Args:
        rows: `chosen` and `rejected`, as texts or messages, optionally after a `prompt`; and optionally `margin`.
        tokenizer: see `pair_rows`.
        max_length: rows with more tokens in one of the two are dropped; None: none.

    Returns:
        Rows with `chosen_ids`, `rejected_ids`, and `margin` if they have it.

    Raises:
        InvalidInputError: a row in another format, or no row is left.
    """
    found: list[Row] = []
    for number, row in enumerate(map(standard_row, rows), start=1):
        _require(row, _SIDES, number)
        before = row.get("prompt") or row["chosen"][:0]
        ids = {f"{side}_ids": _ids(before, row[side], tokenizer, row) for side in _SIDES}
        if max_length is None or max(map(len, ids.values())) <= max_length:
            found.append({**ids, **({"margin": float(row["margin"])} if "margin" in row else {})})
    return _some(found, max_length)


def verdict_rows(rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, max_length: int | None) -> list[Row]:
    """Rows for KTO.

    Args:
        rows: `prompt`, `completion` and `label` (true: desirable); or pairs, each of which gives two.
        tokenizer: see `pair_rows`.
        max_length: tokens that are kept of prompt and completion, from the start; None: all.

    Returns:
        Rows with `prompt_ids`, `completion_ids` and `label`. Rows whose prompt alone has `max_length` tokens are dropped.

    Raises:
        InvalidInputError: a row in another format, or no row is left.
    """
    found: list[Row] = []
    for number, row in enumerate(map(standard_row, rows), start=1):
        if "completion" not in row and all(side in row for side in _SIDES):
            prompt, *answers = _tokenized(_with_prompt(row, number), _SIDES, tokenizer)
            judged = list(zip(answers, (True, False), strict=True))
        else:
            _require(row, ("prompt", "completion", "label"), number)
            prompt, answer = _tokenized(row, ("completion",), tokenizer)
            judged = [(answer, bool(row["label"]))]
        if max_length is None or len(prompt) < max_length:
            found += [{"prompt_ids": prompt, "completion_ids": answer, "label": label} for answer, label in judged]
    return _some(found, max_length)


def prompt_ids_of(prompt: Any, tokenizer: Any, row: Mapping[str, Any]) -> list[int]:
    """Token ids of a prompt as generation starts with it.

    Args:
        prompt: text, or messages, which the chat template ends with the start of an answer.
        tokenizer: see `pair_rows`.
        row: its row, with `tools` and `chat_template_kwargs` for the template, if it has them.
    """
    return _ids(prompt, None, tokenizer, row)


def _tokenized(row: Mapping[str, Any], names: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Ids of the prompt, and of each completion: these begin where the ids with and without one differ."""
    prompt = prompt_ids_of(row["prompt"], tokenizer, row)
    whole = [_ids(row["prompt"], row[name], tokenizer, row) for name in names]
    length = min(_common(prompt, ids) for ids in whole)
    if length < len(prompt):
        logger.warning(
            "the end of a prompt is rendered differently before its completion, and is learned with it: %r",
            tokenizer.decode(prompt[length:]),
        )
    return [prompt[:length], *(ids[length:] for ids in whole)]


def _ids(prompt: Any, completion: Any, tokenizer: Any, row: Mapping[str, Any]) -> list[int]:
    if not is_conversation(prompt):
        text = prompt if completion is None else _ended(prompt + completion, tokenizer)
        return list(tokenizer(text).input_ids)
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            "The tokenizer has no chat template.",
            "Messages need one to be rendered as text.",
            "Use a model with a chat template, set tokenizer.chat_template, or use rows of texts.",
        )
    tools = row.get("tools")
    try:
        found = tokenizer.apply_chat_template(
            [*prompt, *(completion or ())],
            tools=json.loads(tools) if isinstance(tools, str) else tools,
            add_generation_prompt=completion is None,
            tokenize=True,
            return_dict=True,
            **row.get("chat_template_kwargs") or {},
        )
    except Exception as error:  # jinja2's, and whatever templates raise
        raise InvalidInputError(
            "The chat template rejected a conversation.",
            f"{type(error).__name__}: {error}",
            "Check the roles that the template expects.",
        ) from error
    return list(found["input_ids"])


def _ended(text: str, tokenizer: Any) -> str:
    end = tokenizer.eos_token
    return text if end is None or text.endswith(end) else text + end


def _with_prompt(row: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """The row with the prompt that both completions begin with, if it has none."""
    _require(row, _SIDES, number)
    if "prompt" in row:
        return row
    chosen, rejected = row["chosen"], row["rejected"]
    length = _common(chosen, rejected)
    if not is_conversation(chosen) and length and chosen[length - 1] == " ":
        length -= 1  # the space belongs to the completion's first word
    if not length:
        raise InvalidInputError(
            f"Row {number} has no prompt.",
            "Its chosen and rejected columns begin differently.",
            "Add a column prompt.",
        )
    return {**row, "prompt": chosen[:length], "chosen": chosen[length:], "rejected": rejected[length:]}


def _require(row: Mapping[str, Any], names: Sequence[str], number: int) -> None:
    kinds = {is_conversation(row[name]) for name in ("prompt", "completion", *_SIDES) if row.get(name) is not None}
    if any(row.get(name) is None for name in names) or len(kinds) > 1:
        raise InvalidInputError(
            f"Row {number} has no {', '.join(names)}, all as texts or all as messages.",
            f"Its columns are {', '.join(map(str, row)) or 'none'}.",
            "See docs/training.md for the formats of each recipe.",
        )


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of what both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _cut(ids: list[int], length: int | None, mode: Truncation) -> list[int]:
    if length is None:
        return ids
    return ids[:length] if mode == "keep_start" else ids[-length:]


def _some(rows: list[Row], max_length: int | None) -> list[Row]:
    if not rows:
        raise NothingToLearnError(
            "No row is left.",
            f"There are none, or their prompts have max_length={max_length} tokens or more.",
            "Raise max_length, or check the data.",
        )
    return rows
