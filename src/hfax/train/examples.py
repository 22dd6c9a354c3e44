"""Tokenizes text and conversations into rows of token ids with labels. Knows nothing about models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hfax.errors import InvalidInputError
from hfax.train.losses import IGNORED

_HAS_GENERATION = re.compile(r"\{%-?\s*generation\b")
_FORMS = '{"text": …}, {"prompt": …, "completion": …} or {"messages": [{"role": …, "content": …}, …]}'


def tokenize_rows(rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, max_length: int) -> list[dict[str, list[int]]]:
    """Rows for supervised fine-tuning.

    Args:
        rows: one of three formats: text (loss on all tokens), prompt and completion (loss on the completion), or messages (loss
            on assistant turns, including the chat template's end of turn). Rows with `input_ids` are kept unchanged.
        tokenizer: must have a chat template for messages.
        max_length: maximum row length, in tokens; longer rows are truncated.

    Returns:
        Rows with `input_ids` and `labels`, -100 where no loss is computed. Rows left without labels are dropped.

    Raises:
        InvalidInputError: an unknown format, no chat template, or a template where assistant turns cannot be located.
    """
    found = []
    for number, row in enumerate(rows, start=1):
        ids, labels = _tokenize(row, tokenizer, number)
        ids, labels = ids[:max_length], labels[:max_length]
        if any(label != IGNORED for label in labels[1:]):
            found.append({"input_ids": ids, "labels": labels})
    if not found:
        raise InvalidInputError(
            "No row has labels.",
            f"Rows are truncated to {max_length} tokens and assistant turns start later, or there are no rows.",
            "Raise max_length, or check the data.",
        )
    return found


def _tokenize(row: Mapping[str, Any], tokenizer: Any, number: int) -> tuple[list[int], list[int]]:
    if "input_ids" in row:
        ids = list(row["input_ids"])
        return ids, list(row.get("labels") or ids)
    if isinstance(messages := row.get("messages"), Sequence) and messages:
        return conversation(messages, tokenizer, row.get("tools"))
    if "prompt" in row and "completion" in row:
        if not isinstance(row["prompt"], str):
            return conversation([*row["prompt"], *row["completion"]], tokenizer, row.get("tools"))
        before = tokenizer(row["prompt"]).input_ids
        after = tokenizer(row["completion"], add_special_tokens=False).input_ids
        ids = [*_without_end(before, tokenizer), *after, *_end(tokenizer)]
        return ids, [*[IGNORED] * (len(ids) - len(after) - len(_end(tokenizer))), *after, *_end(tokenizer)]
    if isinstance(text := row.get("text"), str):
        ids = tokenizer(text).input_ids
        ids = [*_without_end(ids, tokenizer), *_end(tokenizer)]
        return ids, list(ids)
    raise InvalidInputError(
        f"Row {number} has an unknown format.",
        f"Its columns are {', '.join(map(str, row)) or 'none'}.",
        f"Use rows like {_FORMS}.",
    )


def conversation(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Any = None
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and labels for assistant turns only.

    If the template marks generated text ({% generation %}), that mask is used. Otherwise an assistant turn is what follows the
    rendered generation prompt.

    Raises:
        InvalidInputError: no chat template, messages that it rejects, no assistant turn, or turns that change the rendering of
            earlier ones.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            "The tokenizer has no chat template.",
            "Messages need one to be rendered as text.",
            "Use a model with a chat template, set tokenizer.chat_template, or use prompt/completion rows.",
        )
    template = tokenizer.get_chat_template(tools=tools)

    def render(part: Sequence[Mapping[str, Any]], *, asks: bool = False) -> list[int]:
        try:
            found = tokenizer.apply_chat_template(
                list(part), tools=tools, add_generation_prompt=asks, tokenize=True, return_dict=True
            )
        except Exception as error:  # jinja2's, and whatever templates raise
            raise InvalidInputError(
                "The chat template rejected a conversation.",
                f"{type(error).__name__}: {error}",
                f"Check the role order that the template expects; found {', '.join(str(m.get('role')) for m in messages)}.",
            ) from error
        return list(found["input_ids"])

    ids = render(messages)
    if _HAS_GENERATION.search(template):
        marked = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return ids, [i if m else IGNORED for i, m in zip(ids, marked["assistant_masks"], strict=True)]
    labels = [IGNORED] * len(ids)
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    for turn in turns:
        before, through = render(messages[:turn], asks=True), render(messages[: turn + 1])
        through = through if turn + 1 < len(messages) else ids
        if ids[: len(before)] != before or ids[: len(through)] != through:
            raise InvalidInputError(
                f"The chat template renders the first {turn + 1} messages differently when more follow.",
                "Assistant turns cannot be located in the tokens.",
                "Use conversations with one assistant turn, or a template with {% generation %} around assistant turns.",
            )
        labels[len(before) : len(through)] = ids[len(before) : len(through)]
    if not turns:
        raise InvalidInputError(
            "A conversation has no assistant turn.",
            f"Its roles are {', '.join(str(m.get('role')) for m in messages)}.",
            'Use messages like {"role": "user" | "assistant" | "system", "content": …}.',
        )
    return ids, labels


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _without_end(ids: list[int], tokenizer: Any) -> list[int]:
    """Strip the end-of-sequence token that some tokenizers append."""
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id and len(ids) > 1 else ids
