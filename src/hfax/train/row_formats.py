"""Rows of data sets in the formats of ShareGPT and Alpaca as those of trl: messages, or prompt, completion, chosen and rejected.

Knows nothing about tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hfax.errors import InvalidInputError

_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
"""Roles of ShareGPT by another name than in chat templates."""
_KNOWN = {"system", "user", "assistant", "tool", "developer"}
_SIDES = ("chosen", "rejected")


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON Lines file.

    Raises:
        InvalidInputError: a line is not a JSON object; names the line.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield json_row(line, path, lambda number=number: number)


def json_row(line: bytes, path: Path, number: Callable[[], int]) -> dict[str, Any]:
    """A row of a JSON Lines file.

    Args:
        line: the line.
        path: its file, for errors.
        number: its number, for errors.

    Raises:
        InvalidInputError: the line is not a JSON object; names the line.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InvalidInputError(
            f"{path}, line {number()}, is not valid JSON.", str(error), "Write one JSON object per line."
        ) from error
    if not isinstance(row, dict):
        raise InvalidInputError(
            f"{path}, line {number()}, is not an object.",
            f"It is {type(row).__name__}.",
            "Write one JSON object per line.",
        )
    return row


def standard_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row in trl's format.

    Args:
        row: of ShareGPT (`conversations` with `from` and `value`, optionally `system`, `tools`, `chosen` and `rejected`), of Alpaca
            (`instruction`, optionally `input`, `system` and `history`, and `output`, or `chosen` and `rejected`), or any other,
            which is returned as it is but for messages with `from` and `value`.

    Raises:
        InvalidInputError: an unknown role, or messages that are none.
    """
    if isinstance(turns := row.get("conversations"), Sequence) and not isinstance(turns, str):
        return _of_share_gpt(row, _messages(turns))
    if isinstance(row.get("instruction"), str):
        return _of_alpaca(row)
    names = [name for name in ("messages", "prompt", "completion", *_SIDES) if _has_turns(row.get(name))]
    return {**row, **{name: _messages(row[name]) for name in names}} if names else row


def is_conversation(value: Any) -> bool:
    """Whether a column holds messages rather than text."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def _of_share_gpt(row: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any]:
    if isinstance(system := row.get("system"), str) and system:
        messages = [{"role": "system", "content": system}, *messages]
    others = {name: row[name] for name in ("tools", "label", "margin") if name in row}
    if all(side in row for side in _SIDES):
        return {"prompt": messages, **{side: _answer(row[side]) for side in _SIDES}, **others}
    return {"messages": messages, **others}


def _of_alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    """The instruction and its input are the last question, as in LLaMA-Factory."""
    prompt: list[dict[str, Any]] = []
    if row.get("system"):
        prompt.append({"role": "system", "content": row["system"]})
    for question, answer in row.get("history") or ():
        prompt += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question = "\n".join(text for text in (row["instruction"], row.get("input")) if text)
    prompt.append({"role": "user", "content": question})
    others = {name: row[name] for name in ("label", "margin") if name in row}
    if all(side in row for side in _SIDES):
        return {"prompt": prompt, **{side: _answer(row[side]) for side in _SIDES}, **others}
    return {"prompt": prompt, "completion": _answer(row.get("output")), **others}


def _answer(value: Any) -> list[dict[str, Any]]:
    """An answer's messages, from text, one message, or several."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return _messages([value] if isinstance(value, Mapping) else value)


def _has_turns(value: Any) -> bool:
    return is_conversation(value) and len(value) > 0 and isinstance(value[0], Mapping) and "from" in value[0]


def _messages(turns: Any) -> list[dict[str, Any]]:
    if not is_conversation(turns) or not all(isinstance(turn, Mapping) for turn in turns):
        raise InvalidInputError(
            f"{turns!r} are no messages.", "A conversation is a list of objects.", 'Use [{"from": …, "value": …}, …].'
        )
    return [_message(turn) for turn in turns]


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    if "from" not in turn:
        return dict(turn)
    role = _ROLES.get(turn["from"], turn["from"])
    if role not in _KNOWN:
        raise InvalidInputError(
            f"A message is from {turn['from']!r}.",
            "Chat templates have no such role.",
            f"Use {', '.join(sorted(_KNOWN | set(_ROLES)))}.",
        )
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {"role": role, "content": turn.get("value"), **others}
