"""A chat session: keeps the history, generates replies, and handles commands.

Turns entries from `chat_input` into replies on stdout and notes on stderr. A failed reply leaves the history unchanged.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
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
from hfax.cli.phase_display import PhaseDisplay
from hfax.cli.writing import Answer, make_call, write_answer
from hfax.errors import HfaxError, InvalidInputError, OutOfMemoryError

if TYPE_CHECKING:
    from hfax.backends.jax.model import JaxModel
    from hfax.generation.kept_cache import KeptCache

logger = logging.getLogger(__name__)

_DEFAULT_LENGTH = 1024
_HELP = """\
/reset         clear the conversation; keep the system message
/system TEXT   set the system message; without TEXT, remove it
/save FILE     save the conversation to FILE; continue it with hfax chat MODEL --history FILE
/exit          exit (or Ctrl-D)
Multi-line message: enclose it in lines of \"\"\", or end each line except the last with a backslash.
Ctrl-C stops a reply; the partial reply stays in the conversation."""


class ChatSession:
    """One conversation.

    Args:
        model, tokenizer: the loaded model and tokenizer; the tokenizer must have a chat template.
        model_name: the model name as given by the user.
        options: generation options for every reply.
        phases: displays compilations.
        console: console for notes, on stderr.
        ctrl_c: Ctrl-C handler that stops a reply.
        messages: initial history.
        saved_to: default file of `/save`.

    Attributes:
        num_failures: number of failed messages and commands.
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
        self._cache: KeptCache | None = None
        self._compiling: threading.Thread | None = None

    @property
    def is_compiling(self) -> bool:
        """Whether programs of the next reply are being compiled."""
        return self._compiling is not None and self._compiling.is_alive()

    def greet(self) -> None:
        """Show the model name and basic help."""
        self._note(f"Chatting with {self._name}. Type /help for commands, press Ctrl-D to exit.")
        if self._messages:
            self._note(f"Continuing after {_count(len(self._messages), 'message')}.")

    def set_system(self, text: str) -> None:
        """Set the system message; an empty text removes it."""
        rest = [m for m in self._messages if m["role"] != "system"]
        self._messages = [{"role": "system", "content": text}, *rest] if text else rest

    def take(self, entry: Said | Command) -> bool:
        """Reply to a message or execute a command; errors are displayed, not raised.

        Returns:
            False if the chat should end.
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
                self._note("Conversation cleared.")
            case "system":
                self.set_system(command.argument)
                self._note("System message set." if command.argument else "System message removed.")
            case "save":
                self._save(command.argument)
            case _:
                raise InvalidInputError(
                    f"Unknown command /{command.name}.",
                    "Lines that start with a slash are commands.",
                    'Type /help for the commands; to send a message that starts with a slash, enclose it in lines of """.',
                )
        return True

    def _save(self, name: str) -> None:
        path = Path(name).expanduser() if name else self._saved_to
        if path is None:
            raise InvalidInputError(
                "/save requires a file name.", "No file name was given before.", "Type, for example, /save talk.json."
            )
        save_messages(path, self._messages, self._name)
        self._saved_to = path
        self._note(f"Saved {_count(len(self._messages), 'message')} to {path}.")

    def _reply(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        ids = encode_messages(self._tokenizer, messages, self._name)
        options = self._within_context(len(ids))
        output = AnswerOutput(self._phases, wraps_words=True)
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
                cache=self._cache,
            )
            self._cache = answer.cache
            if answer.num_tokens:
                output.finish()
        if answer.finish_reason != "interrupted" or answer.text:
            self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._note(self._summary(answer))
        if answer.finish_reason == "interrupted" and not is_interactive():
            raise typer.Exit(130)
        if is_interactive():
            self._compile_next(text)
            if sys.stdout.isatty():
                self._console.print()

    def _compile_next(self, text: str) -> None:
        """Compile what a message like the last one would need, while the person reads."""
        if self.is_compiling or not hasattr(self._model, "compile_call"):  # on torch_xla the first steps compile
            return
        try:
            messages = [*self._messages, {"role": "user", "content": text}]
            ids = encode_messages(self._tokenizer, messages, self._name)
            options = self._within_context(len(ids))
        except InvalidInputError:
            return  # the next message will say it
        sizes = {"default_length": _DEFAULT_LENGTH, "cache": self._cache}
        call = make_call(self._model, self._tokenizer, ids, options, **sizes)

        def compile_call() -> None:
            try:
                self._model.compile_call(**call)
            except (InvalidInputError, OutOfMemoryError) as error:
                logger.info("not compiled ahead: %s", error)

        self._compiling = threading.Thread(target=compile_call, name="hfax-chat-compile", daemon=True)
        self._compiling.start()

    def _within_context(self, prompt_length: int) -> WritingOptions:
        """Return the options with max_new_tokens limited to the remaining context.

        Raises:
            InvalidInputError: the context has no room for a reply.
        """
        context = self._model.context_length
        if context is None:
            return self._options
        if prompt_length >= context:
            raise InvalidInputError(
                f"The conversation has {prompt_length} tokens with this message; the model's context holds {context}.",
                "There is no room for a reply. The message was not added to the conversation.",
                "Send a shorter message, or start over with /reset; /save FILE saves the conversation first.",
            )
        wanted = self._options.max_new_tokens
        length = None if wanted is None else min(wanted, context - prompt_length)
        return dataclasses.replace(self._options, max_new_tokens=length)

    def _summary(self, answer: Answer) -> str:
        if answer.finish_reason == "interrupted" and not answer.text:
            return "Stopped before the first token; your message was removed."
        line = f"{_count(answer.num_tokens, 'token')}, {answer.tokens_per_second:.1f} tokens/s"
        if answer.finish_reason == "interrupted":
            return f"{line}, stopped"
        if answer.finish_reason != "length":
            return line
        context = self._model.context_length
        if context is not None and answer.num_prompt_tokens + answer.num_tokens >= context:
            full = f"the context of {context} tokens is full"
            return f"{line}; {full}. /save FILE saves the conversation, /reset clears it."
        return f"{line}, truncated at max_new_tokens"

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
