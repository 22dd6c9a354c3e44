"""Extracts reasoning and tool calls from generated text, incrementally.

The chat template shows which markers the model puts around reasoning and tool calls. The parser takes text in chunks and returns
chunks of reasoning and content, and complete calls. Text that could be the start of a marker is held back, so streaming and
parsing the whole text give the same result.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

END_OF_REASONING = "</think>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the output.

    Args:
        kind: "content", "reasoning" or "call".
        text: the text of content or reasoning.
        name: the called function's name.
        arguments: the call's arguments as JSON.
    """

    kind: str
    text: str = ""
    name: str = ""
    arguments: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """A model's tool-call format.

    Args:
        name: the format's name.
        begin: the marker before a call.
        end: the marker after a call; None: the end of the text.
        arguments: the JSON key that holds the arguments.
        is_list: the markers enclose a list of calls.
    """

    name: str
    begin: str
    end: str | None
    arguments: str = "arguments"
    is_list: bool = False


TOOL_FORMATS = (
    ToolFormat(name="hermes", begin="<tool_call>", end="</tool_call>"),
    ToolFormat(name="mistral", begin="[TOOL_CALLS]", end=None, is_list=True),
    ToolFormat(name="llama3", begin="<|python_tag|>", end=None, arguments="parameters"),
)


def tool_format_of(template: str | None) -> ToolFormat | None:
    """The tool-call format of a chat template; None if it is unknown or the template has no tools."""
    if not template or "tools" not in template:
        return None
    return next((f for f in TOOL_FORMATS if f.begin in template), None)


def has_reasoning(template: str | None) -> bool:
    """Whether a chat template supports reasoning between <think> and </think>."""
    return bool(template) and END_OF_REASONING in (template or "")


class OutputParser:
    """Parses the output of one sequence.

    Args:
        tools: the tool-call format; None: tool calls are not parsed.
        splits_reasoning: text between <think> and </think> at the start of the output is reasoning.
        starts_in_reasoning: the prompt ended with <think>.
        max_calls: return at most this many tool calls, the first ones; None: all.
    """

    def __init__(
        self,
        tools: ToolFormat | None,
        *,
        splits_reasoning: bool = False,
        starts_in_reasoning: bool = False,
        max_calls: int | None = None,
    ) -> None:
        self._tools = tools
        self._max_calls = max_calls
        self._buffer = ""
        self._state = "reasoning" if starts_in_reasoning else "start" if splits_reasoning else "content"
        self.num_calls = 0
        self._drops_space = False

    def feed(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Parse the next chunk of text; returns the pieces that are complete."""
        self._buffer += text
        found: list[Piece] = []
        while True:
            before = self._state, self._buffer
            found += self._advance(is_last)
            if (self._state, self._buffer) == before:
                return _joined(found)

    def _advance(self, is_last: bool) -> list[Piece]:
        if self._drops_space:
            self._buffer = self._buffer.lstrip("\n")
            self._drops_space = not self._buffer
        if self._state == "start":
            return self._start(is_last)
        if self._state == "reasoning":
            return self._until(END_OF_REASONING, "content", "reasoning", is_last)
        if self._state == "content" and self._tools is not None:
            return self._until(self._tools.begin, "call", "content", is_last)
        if self._state == "content":
            text, self._buffer = self._buffer, ""
            return [Piece(kind="content", text=text)] if text else []
        return self._call(is_last)

    def _start(self, is_last: bool) -> list[Piece]:
        """Check whether the text starts with reasoning."""
        text = self._buffer.lstrip()
        if text.startswith("<think>"):
            self._buffer, self._state, self._drops_space = text[len("<think>") :], "reasoning", True
        elif is_last or not "<think>".startswith(text):
            self._state = "content"
        return []

    def _until(self, mark: str, next_state: str, kind: str, is_last: bool) -> list[Piece]:
        at = self._buffer.find(mark)
        if at >= 0:
            text, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            self._state, self._drops_space = next_state, next_state == "content"
            if next_state == "call":
                text = text.rstrip()
            return [Piece(kind=kind, text=text)] if text else []
        held = 0 if is_last else _possible_beginning(self._buffer, mark)
        if not is_last and kind == "content":  # white space before a call is not content
            held = max(held, len(self._buffer) - len(self._buffer[: len(self._buffer) - held].rstrip()))
        text = self._buffer[: len(self._buffer) - held]
        self._buffer = self._buffer[len(self._buffer) - held :]
        return [Piece(kind=kind, text=text)] if text else []

    def _call(self, is_last: bool) -> list[Piece]:
        assert self._tools is not None
        end = self._tools.end
        at = -1 if end is None else self._buffer.find(end)
        if at < 0 and not is_last:
            return []
        body = self._buffer if at < 0 else self._buffer[:at]
        self._buffer = "" if at < 0 or end is None else self._buffer[at + len(end) :]
        self._state, self._drops_space = "content", True
        calls = _calls(body, self._tools)
        if calls is None:  # malformed call: return it as content
            return [Piece(kind="content", text=self._tools.begin + body + (end or "" if at >= 0 else ""))]
        if self._max_calls is not None:
            calls = calls[: max(self._max_calls - self.num_calls, 0)]
        self.num_calls += len(calls)
        return calls


def _joined(pieces: list[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        if joined and piece.kind == joined[-1].kind and piece.kind != "call":
            joined[-1] = dataclasses.replace(piece, text=joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def _possible_beginning(text: str, mark: str) -> int:
    """How many characters at the end of `text` may begin `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def _calls(body: str, tools: ToolFormat) -> list[Piece] | None:
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return None
    calls = found if tools.is_list else [found]
    if not isinstance(calls, list) or not calls:
        return None
    pieces = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get(tools.arguments, call.get("arguments", {}))
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        pieces.append(Piece(kind="call", name=call["name"], arguments=text))
    return pieces
