"""Conversations: chat-template encoding, and saved conversation files.

Independent of the model and the terminal. A saved conversation is a JSON object
`{"format": "hfax-chat", "model": …, "messages": [{"role": …, "content": …}, …]}`; a bare list of messages is also
accepted.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfax.errors import InvalidInputError, UnsupportedModelError

Message = dict[str, str]

_FORMAT = "hfax-chat"
_ROLES = ("system", "user", "assistant")


def encode_messages(tokenizer: Any, messages: Sequence[Message], model_name: str) -> list[int]:
    """Encode the prompt for the next reply with the tokenizer's chat template.

    Raises:
        UnsupportedModelError: the tokenizer has no chat template.
        InvalidInputError: the template rejects these messages.
    """
    check_template(tokenizer, model_name)
    import jinja2

    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        has_system = bool(messages) and messages[0]["role"] == "system"
        raise InvalidInputError(
            f"The chat template of {model_name} rejected the conversation.",
            str(error) or type(error).__name__,
            "Remove the system message; some models do not support one." if has_system else "Start over with /reset.",
        ) from error
    return list(encoded["input_ids"])


def check_template(tokenizer: Any, model_name: str) -> None:
    """Raise `UnsupportedModelError` if the tokenizer has no chat template."""
    if getattr(tokenizer, "chat_template", None):
        return
    raise UnsupportedModelError(
        f"{model_name} has no chat template.",
        "It is probably a base model, trained for text completion, not chat.",
        f'Complete text with: hfax generate {model_name} "…"; or use the chat variant of the model '
        "(its name often ends in -Instruct, -Chat or -it).",
    )


def save_messages(path: Path, messages: Sequence[Message], model_name: str) -> None:
    """Save a conversation to a file, atomically.

    Raises:
        InvalidInputError: the file exists and is not a saved conversation, or it cannot be written.
    """
    record = {"format": _FORMAT, "model": model_name, "messages": list(messages)}
    try:
        if path.exists() and not _is_saved_chat(path):
            raise InvalidInputError(
                f"{path} exists and is not a saved conversation; it was not changed.",
                "Saving would overwrite an unrelated file.",
                "Choose another file name.",
            )
        _write_atomically(path, json.dumps(record, ensure_ascii=False, indent=2) + "\n")
    except OSError as error:
        raise InvalidInputError(
            f"The conversation could not be saved to {path}.",
            str(error),
            "Choose another file; the chat is still open.",
        ) from error


def load_messages(path: Path) -> list[Message]:
    """Load a conversation saved by `save_messages`, or a bare list of messages.

    Raises:
        InvalidInputError: the file does not exist or is not a conversation.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"The conversation {path} could not be read.", str(error), "Pass a file saved with /save."
        ) from error
    messages = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
        raise InvalidInputError(
            f"{path} is not a conversation.",
            'Expected {"messages": [{"role": "user", "content": "…"}, …]} with the roles system, user and assistant.',
            "Pass a file saved with /save.",
        )
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in _ROLES and isinstance(value.get("content"), str)


def _is_saved_chat(path: Path) -> bool:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("format") == _FORMAT


def _write_atomically(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
