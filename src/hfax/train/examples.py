"""Tokenizes text and conversations into rows of token ids with labels. Knows nothing about models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hfax.errors import InvalidInputError
from hfax.train.data import PackingStrategy, pack
from hfax.train.ignored import IGNORED
from hfax.train.row_formats import standard_row

Example = tuple[list[int], list[int]]
"""Token ids and labels of a text."""
_HAS_GENERATION = re.compile(r"\{%-?\s*generation\b")
_FORMS = (
    '{"text": …}, {"prompt": …, "completion": …}, {"messages": [{"role": …, "content": …}, …]}, {"conversations": [{"from": …, '
    '"value": …}, …]} or {"instruction": …, "output": …}'
)


class NothingToLearnError(InvalidInputError):
    """No row has labels within `max_length`."""


def tokenize_rows(
    rows: Iterable[Mapping[str, Any]], tokenizer: Any, *, max_length: int | None
) -> list[dict[str, list[int]]]:
    """Rows for supervised fine-tuning.

    Args:
        rows: text (loss on all tokens), prompt and completion (loss on the completion), or messages (loss on assistant turns,
            including the chat template's end of turn); also those of ShareGPT and Alpaca, see `standard_row`. Rows with
            `input_ids` are kept unchanged.
        tokenizer: must have a chat template for messages.
        max_length: maximum row length, in tokens; longer rows are truncated; None: no maximum.

    Returns:
        Rows with `input_ids` and `labels`, -100 where no loss is computed. Rows left without labels are dropped. A conversation
        gives several rows if its chat template rewrites earlier turns, see `conversation`.

    Raises:
        InvalidInputError: an unknown format, no chat template, or a template where assistant turns cannot be located.
        NothingToLearnError: no row is left.
    """
    found = []
    for number, row in enumerate(rows, start=1):
        for ids, labels in _tokenize(row, tokenizer, number):
            ids, labels = ids[:max_length], labels[:max_length]
            if any(label != IGNORED for label in labels[1:]):
                found.append({"input_ids": ids, "labels": labels})
    if not found:
        raise NothingToLearnError(
            "No row has labels.",
            f"Rows are truncated to {max_length} tokens and assistant turns start later, or there are no rows.",
            "Raise max_length, or check the data.",
        )
    return found


def tokenize_examples(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    max_length: int | None,
    packing_strategy: PackingStrategy | None,
) -> list[dict[str, list[int]]]:
    """Rows for supervised fine-tuning, with one sequence each or packed.

    Args:
        rows: as for `tokenize_rows`.
        tokenizer: as for `tokenize_rows`.
        max_length: maximum row length, in tokens; of packed rows, their length. None: no maximum.
        packing_strategy: as for `hfax.train.data.pack`; None: rows are not packed.

    Returns:
        As of `tokenize_rows`, or of `hfax.train.data.pack`.

    Raises:
        InvalidInputError: as of `tokenize_rows`.
        NothingToLearnError: no row is left.
    """
    if packing_strategy is None:
        return tokenize_rows(rows, tokenizer, max_length=max_length)
    assert max_length is not None
    found = tokenize_rows(rows, tokenizer, max_length=max_length if packing_strategy == "bfd" else None)
    return pack(found, max_length, packing_strategy=packing_strategy)


def _tokenize(row: Mapping[str, Any], tokenizer: Any, number: int) -> list[Example]:
    row = standard_row(row)
    if "input_ids" in row:
        ids = list(row["input_ids"])
        return [(ids, list(row.get("labels") or ids))]
    if isinstance(messages := row.get("messages"), Sequence) and messages:
        return conversation(messages, tokenizer, row.get("tools"))
    if "prompt" in row and "completion" in row:
        if not isinstance(row["prompt"], str):
            return conversation([*row["prompt"], *row["completion"]], tokenizer, row.get("tools"))
        before = tokenizer(row["prompt"]).input_ids
        after = tokenizer(row["completion"], add_special_tokens=False).input_ids
        ids = [*_without_end(before, tokenizer), *after, *_end(tokenizer)]
        return [(ids, [*[IGNORED] * (len(ids) - len(after) - len(_end(tokenizer))), *after, *_end(tokenizer)])]
    if isinstance(text := row.get("text"), str):
        ids = tokenizer(text).input_ids
        ids = [*_without_end(ids, tokenizer), *_end(tokenizer)]
        return [(ids, list(ids))]
    raise InvalidInputError(
        f"Row {number} has an unknown format.",
        f"Its columns are {', '.join(map(str, row)) or 'none'}.",
        "A recipe for rows of chosen and rejected completions says so: recipe: dpo."
        if "chosen" in row
        else f"Use rows like {_FORMS}.",
    )


def conversation(messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Any = None) -> list[Example]:
    """Token ids of a conversation, and labels for assistant turns only.

    An assistant turn is what the template marks as generated ({% generation %}), or else what follows the rendered generation
    prompt. Each turn is trained after the past that the template renders for it, as in generation. Templates such as Qwen3's
    rewrite earlier turns once later ones follow (they drop <think> blocks); the turns then need several texts.

    Args:
        messages: the conversation.
        tokenizer: has the chat template.
        tools: tools for the template.

    Returns:
        Ids and labels of each text: one for all turns, or one more for each turn before which the past was rewritten.

    Raises:
        InvalidInputError: no chat template, messages that it rejects, no assistant turn, or a turn that does not begin with the
            template's generation prompt.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            "The tokenizer has no chat template.",
            "Messages need one to be rendered as text.",
            "Use a model with a chat template, set tokenizer.chat_template, or use prompt/completion rows.",
        )
    marks = _HAS_GENERATION.search(tokenizer.get_chat_template(tools=tools)) is not None
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns and marks:  # the template knows the assistant by another name
        return [_rendered(messages, tokenizer, tools, marks=True)]
    if not turns:
        raise InvalidInputError(
            "A conversation has no assistant turn.",
            f"Its roles are {', '.join(str(m.get('role')) for m in messages)}.",
            'Use messages like {"role": "user" | "assistant" | "system", "content": …}.',
        )
    found: list[Example] = []
    for turn in turns:
        example = _turn(messages, turn, tokenizer, tools, marks)
        if example is None and marks:  # what is generated is known all the same
            return [_rendered(messages, tokenizer, tools, marks=True)]
        if example is None:
            raise InvalidInputError(
                f"The chat template renders message {turn + 1} not after its generation prompt.",
                "The assistant turn cannot be located in the tokens.",
                "Use a template whose assistant turns begin with its generation prompt, or mark them with {% generation %}.",
            )
        ids, labels = example
        if found and ids[: len(found[-1][0])] == found[-1][0]:  # the past is as it was trained: one text for both
            earlier = found.pop()[1]
            labels = [*earlier, *labels[len(earlier) :]]
        found.append((ids, labels))
    return found


def _turn(messages: Sequence[Mapping[str, Any]], turn: int, tokenizer: Any, tools: Any, marks: bool) -> Example | None:
    """The conversation up to an assistant turn, with labels for that turn only; None: it does not begin with its past."""
    ids, labels = _rendered(messages[: turn + 1], tokenizer, tools, marks=marks)
    past = _rendered(messages[:turn], tokenizer, tools, asks=not marks)[0] if turn or not marks else []
    if ids[: len(past)] != past:
        return None
    return ids, [*[IGNORED] * len(past), *(labels if marks else ids)[len(past) :]]


def _rendered(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Any, *, asks: bool = False, marks: bool = False
) -> Example:
    """Ids of messages, and labels where the template marks generated text."""
    try:
        found = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=asks,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=marks,
        )
    except Exception as error:  # jinja2's, and whatever templates raise
        raise InvalidInputError(
            "The chat template rejected a conversation.",
            f"{type(error).__name__}: {error}",
            f"Check the role order that the template expects; found {', '.join(str(m.get('role')) for m in messages)}.",
        ) from error
    ids = list(found["input_ids"])
    mask = found["assistant_masks"] if marks else [0] * len(ids)
    return ids, [i if m else IGNORED for i, m in zip(ids, mask, strict=True)]


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _without_end(ids: list[int], tokenizer: Any) -> list[int]:
    """Strip the end-of-sequence token that some tokenizers append."""
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id and len(ids) > 1 else ids
