"""Texts and conversations into rows of token ids with labels. Knows tokenizers and chat templates, and no models."""

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
        rows: of one of three forms: a text, all of which is learned; a prompt and a completion, of which the completion is;
            messages, of which the assistant's turns are, each to the end that the chat template gives it. Rows with `input_ids`
            stay.
        tokenizer: with a chat template, for messages.
        max_length: longer rows are cut.

    Returns:
        Rows with `input_ids` and `labels`, -100 where nothing is learned. Rows of which nothing would be left to learn are left
        out.

    Raises:
        InvalidInputError: another form, no chat template, or one whose turns cannot be told apart.
    """
    found = []
    for number, row in enumerate(rows, start=1):
        ids, labels = _tokenize(row, tokenizer, number)
        ids, labels = ids[:max_length], labels[:max_length]
        if any(label != IGNORED for label in labels[1:]):
            found.append({"input_ids": ids, "labels": labels})
    if not found:
        raise InvalidInputError(
            "No row has anything to learn.",
            f"Behind {max_length} tokens rows are cut, and what the assistant says begins later; or there are no rows.",
            "Raise max_length, or look at the data.",
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
        f"Row {number} is of no form that can be trained on.",
        f"Its columns are {', '.join(map(str, row)) or 'none'}.",
        f"Rows are {_FORMS}.",
    )


def conversation(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Any = None
) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and labels that are the ids in the assistant's turns alone.

    Where the template marks what the model generates ({% generation %}), that counts; elsewhere each of the assistant's turns
    is what comes behind the text that would ask for it.

    Raises:
        InvalidInputError: no chat template, messages that it refuses, no turn of the assistant, or turns that change what is before
            them.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            "The tokenizer has no chat template.",
            "Messages become text by it.",
            "Use a model with one, set tokenizer.chat_template, or give rows of prompt and completion.",
        )
    template = tokenizer.get_chat_template(tools=tools)

    def render(part: Sequence[Mapping[str, Any]], *, asks: bool = False) -> list[int]:
        try:
            found = tokenizer.apply_chat_template(
                list(part), tools=tools, add_generation_prompt=asks, tokenize=True, return_dict=True
            )
        except Exception as error:  # jinja2's, and whatever templates raise
            raise InvalidInputError(
                "The chat template refuses a conversation.",
                f"{type(error).__name__}: {error}",
                f"Its roles are {', '.join(str(m.get('role')) for m in messages)}; look at the order that the template wants.",
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
                f"The chat template writes the first {turn + 1} messages otherwise once there are more.",
                "So what belongs to the assistant's turns cannot be told from the tokens.",
                "Give conversations with one turn of the assistant, or a template with {% generation %} around its turns.",
            )
        labels[len(before) : len(through)] = ids[len(before) : len(through)]
    if not turns:
        raise InvalidInputError(
            "A conversation has no turn of the assistant.",
            f"Its roles are {', '.join(str(m.get('role')) for m in messages)}.",
            'Messages are {"role": "user" | "assistant" | "system", "content": …}.',
        )
    return ids, labels


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _without_end(ids: list[int], tokenizer: Any) -> list[int]:
    """Some tokenizers put an end behind every text."""
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id and len(ids) > 1 else ids
