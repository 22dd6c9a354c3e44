"""`hfax chat`: chat with a model, in a terminal or through a pipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.cli.generation_options import WritingOptions
from hfax.cli.interrupts import CtrlC
from hfax.cli.model_options import BackendOptions
from hfax.cli.option_groups import expand
from hfax.cli.phase_display import PhaseDisplay

EXAMPLES = """[bold]Examples[/bold]

  hfax chat demo
  hfax chat Qwen/Qwen3-0.6B --system "Answer in French." --temperature 0.7
  hfax chat Qwen/Qwen3-0.6B --history talk.json
  printf 'Hello\\n/save talk.json\\n' | hfax chat demo

Commands: /reset, /system TEXT, /save FILE, /help, /exit.
For a multi-line message, enclose it in lines of three double quotes,
or end each line except the last with a backslash.
Ctrl-C stops a reply, Ctrl-D exits."""


@expand
def chat(
    model: model_options.ModelArgument,
    *,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    history: Annotated[
        Path | None, typer.Option(help="Continue a conversation saved with /save.", show_default=False)
    ] = None,
    how: WritingOptions,
    which: BackendOptions,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Chat with a model, using its chat template.

    Replies go to stdout, everything else to stderr.
    Replies have at most 1024 tokens, unless --max-new-tokens is set.
    With piped input, each line is a message, and the exit code is 1 if any failed.
    """
    with reporting(verbose):
        _chat(model, which, how, system, history)


def _chat(name: str, which: BackendOptions, how: WritingOptions, system: str | None, history: Path | None) -> None:
    from hfax.cli.conversation import check_template, load_messages

    messages = load_messages(history) if history is not None else []
    console = make_console()
    phases = PhaseDisplay(console, is_transient=True)
    with phases.following("starting"), CtrlC() as ctrl_c, ctrl_c.raising():
        checkpoint = which.open(name)
        tokenizer = checkpoint.open_tokenizer()
        check_template(tokenizer, name)
        model = checkpoint.load_model()

    from hfax.cli.chat_input import is_interactive, make_line_reader, read_entries
    from hfax.cli.chat_session import ChatSession

    with CtrlC() as ctrl_c:
        session = ChatSession(model, tokenizer, name, how, phases, console, ctrl_c, messages=messages, saved_to=history)
        if system is not None:
            session.set_system(system)
        if is_interactive():
            session.greet()
        for entry in read_entries(make_line_reader(console, ctrl_c)):
            if not session.take(entry):
                break
    if session.is_compiling:  # which cannot be interrupted, and nobody waits for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if session.num_failures and not is_interactive():
        raise typer.Exit(1)
