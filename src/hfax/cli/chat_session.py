"""What a chat does with each message and command: keeps the history, asks the model, tells how it went.

Turns entries of `chat_input` into replies on stdout and notes on stderr. A reply that fails changes nothing in the
history.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from hfax.cli.answer_output import AnswerOutput
from hfax.cli.chat_input import Command, Said, is_interactive
from hfax.cli.conversation import Message, encode_messages, save_messages
from hfax.cli.error_display import is_debugging, show_error
from hfax.cli.generation_options import WritingOptions
from hfax.cli.interrupts import CtrlC
from hfax.cli.model_options import context_length
from hfax.cli.phase_display import PhaseDisplay
from hfax.cli.writing import Answer, write_answer
from hfax.errors import HfaxError, InvalidInputError

if TYPE_CHECKING:
    from hfax.backends.jax.model import JaxModel

_DEFAULT_LENGTH = 1024
_HELP = """\
/reset         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT, remove it
/save FILE     write the conversation to FILE; hfax chat MODEL --history FILE goes on with it
/exit          leave (or Ctrl-D)
Several lines: between two lines of \"\"\", or with a backslash at the end of each line but the last.
Ctrl-C stops a reply; what was written of it stays in the conversation."""


class ChatSession:
    """One conversation.

    Args:
        model, tokenizer: loaded; the tokenizer has a chat template.
        model_name: as the user wrote it.
        options: for every reply.
        phases: shows compilations.
        console: for notes, on stderr.
        ctrl_c: stops a reply.
        messages: to go on with.
        saved_to: where `/save` without a name writes.

    Attributes:
        num_failures: messages without a reply and commands that failed.
    """

    def __init__(
        self,
        model: JaxModel,
        tokenizer: Any,
        model_name: str,
        options: WritingOptions,
        phases: PhaseDisplay,
        console: Console,
        ctrl_c: CtrlC,
        *,
        messages: Sequence[Message] = (),
        saved_to: Path | None = None,
    ) -> None:
        self.num_failures = 0
        self._model, self._tokenizer, self._name = model, tokenizer, model_name
        self._options, self._phases, self._console, self._ctrl_c = options, phases, console, ctrl_c
        self._messages = list(messages)
        self._saved_to = saved_to

    def greet(self) -> None:
        """Say who is there, and how to leave."""
        self._note(f"Chatting with {self._name}. /help lists the commands, Ctrl-D leaves.")
        if self._messages:
            self._note(f"Going on after {_count(len(self._messages), 'message')}.")

    def set_system(self, text: str) -> None:
        """Put a system message at the head of the conversation; an empty text removes it."""
        rest = [m for m in self._messages if m["role"] != "system"]
        self._messages = [{"role": "system", "content": text}, *rest] if text else rest

    def take(self, entry: Said | Command) -> bool:
        """Answer a message or obey a command; errors are shown, and the chat goes on.

        Returns:
            False when the chat should end.
        """
        try:
            if isinstance(entry, Command):
                return self._obey(entry)
            self._reply(entry.text)
        except HfaxError as error:
            self.num_failures += 1
            if is_debugging():
                self._console.print_exception()
            show_error(error)
        return True

    def _obey(self, command: Command) -> bool:
        match command.name:
            case "exit" | "quit":
                return False
            case "help":
                self._note(_HELP)
            case "reset":
                self._messages = [m for m in self._messages if m["role"] == "system"]
                self._note("The conversation starts anew.")
            case "system":
                self.set_system(command.argument)
                self._note("System message set." if command.argument else "System message removed.")
            case "save":
                self._save(command.argument)
            case _:
                raise InvalidInputError(
                    f"There is no command /{command.name}.",
                    "A line that begins with a slash is a command.",
                    '/help lists the commands; a message that begins with a slash goes between two lines of """.',
                )
        return True

    def _save(self, name: str) -> None:
        path = Path(name).expanduser() if name else self._saved_to
        if path is None:
            raise InvalidInputError("/save needs a file's name.", "None was given before.", "Write /save talk.json.")
        save_messages(path, self._messages, self._name)
        self._saved_to = path
        self._note(f"Saved {_count(len(self._messages), 'message')} to {path}.")

    def _reply(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        ids = encode_messages(self._tokenizer, messages, self._name)
        options = self._within_context(len(ids))
        output = AnswerOutput(self._phases)
        with self._phases.following("reading the conversation"):
            answer = write_answer(
                self._model,
                self._tokenizer,
                ids,
                options,
                self._phases,
                self._ctrl_c,
                default_length=_DEFAULT_LENGTH,
                output=output,
            )
            if answer.num_tokens:
                output.finish()
        if answer.finish_reason != "interrupted" or answer.text:
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._note(self._summary(answer))
        if answer.finish_reason == "interrupted" and not is_interactive():
            raise typer.Exit(130)
        if is_interactive() and sys.stdout.isatty():
            self._console.print()

    def _within_context(self, prompt_length: int) -> WritingOptions:
        """The options, with a length that fits.

        Raises:
            InvalidInputError: there is no room for a reply.
        """
        context = context_length(self._model.config)
        if context is None:
            return self._options
        if prompt_length >= context:
            raise InvalidInputError(
                f"The conversation has {prompt_length} tokens with this message; the model's context holds {context}.",
                "There is no room for a reply. The message was not added; the conversation is as it was before.",
                "/save FILE keeps the conversation, /reset starts anew; or send a shorter message.",
            )
        wanted = self._options.max_new_tokens
        length = None if wanted is None else min(wanted, context - prompt_length)
        return dataclasses.replace(self._options, max_new_tokens=length)

    def _summary(self, answer: Answer) -> str:
        if answer.finish_reason == "interrupted" and not answer.text:
            return "Stopped before the first word; your message was taken back."
        line = f"{_count(answer.num_tokens, 'token')}, {answer.tokens_per_second:.1f} tokens/s"
        if answer.finish_reason == "interrupted":
            return f"{line}, stopped"
        if answer.finish_reason != "length":
            return line
        context = context_length(self._model.config)
        if context is not None and answer.num_prompt_tokens + answer.num_tokens >= context:
            full = f"the context of {context} tokens is full"
            return f"{line}; {full}. /save FILE keeps the conversation, /reset starts anew."
        return f"{line}, cut at the length asked for"

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
