"""`hfax chat`: chat with a model, in a terminal or through a pipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import generation_options as writing_options
from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.cli.generation_options import WritingOptions
from hfax.cli.interrupts import CtrlC
from hfax.cli.model_options import Dtype, ModelOptions, open_checkpoint
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


def chat(
    model: model_options.ModelArgument,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    history: Annotated[
        Path | None, typer.Option(help="Continue a conversation saved with /save.", show_default=False)
    ] = None,
    max_new_tokens: writing_options.MaxNewTokensOption = None,
    temperature: writing_options.TemperatureOption = None,
    top_k: writing_options.TopKOption = None,
    top_p: writing_options.TopPOption = None,
    min_p: writing_options.MinPOption = None,
    seed: writing_options.SeedOption = None,
    stop: writing_options.StopOption = [],  # noqa: B006 (typer copies it)
    dtype: model_options.DtypeOption = Dtype.AUTO,
    quantization: model_options.QuantizationOption = None,
    parallelism: model_options.ParallelismOption = None,
    revision: model_options.RevisionOption = None,
    token: model_options.TokenOption = None,
    trust_remote_code: model_options.TrustOption = False,
    local_files_only: model_options.LocalOption = False,
    backend: model_options.BackendOption = "jax",
    verbose: model_options.VerboseOption = False,
) -> None:
    """Chat with a model, using its chat template.

    Replies go to stdout, everything else to stderr.
    Replies have at most 1024 tokens, unless --max-new-tokens is set.
    With piped input, each line is a message, and the exit code is 1 if any failed.
    """
    which = ModelOptions(
        name=model,
        dtype=dtype,
        revision=revision,
        token=token,
        trust_remote_code=trust_remote_code,
        local_files_only=local_files_only,
        backend=backend,
        quantization=quantization,
        parallelism=parallelism,
    )
    how = WritingOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop),
    )
    with reporting(verbose):
        _chat(which, how, system, history)


def _chat(which: ModelOptions, how: WritingOptions, system: str | None, history: Path | None) -> None:
    from hfax.cli.conversation import check_template, load_messages

    messages = load_messages(history) if history is not None else []
    console = make_console()
    phases = PhaseDisplay(console)
    with phases.following("starting"), CtrlC() as ctrl_c, ctrl_c.raising():
        checkpoint = open_checkpoint(which)
        tokenizer = checkpoint.load_tokenizer()
        check_template(tokenizer, which.name)
        model = checkpoint.load_model()

    from hfax.cli.chat_input import is_interactive, make_line_reader, read_entries
    from hfax.cli.chat_session import ChatSession

    with CtrlC() as ctrl_c:
        session = ChatSession(
            model, tokenizer, which.name, how, phases, console, ctrl_c, messages=messages, saved_to=history
        )
        if system is not None:
            session.set_system(system)
        if is_interactive():
            session.greet()
        for entry in read_entries(make_line_reader(console, ctrl_c)):
            if not session.take(entry):
                break
    if session.num_failures and not is_interactive():
        raise typer.Exit(1)
