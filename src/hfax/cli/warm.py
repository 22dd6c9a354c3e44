"""`hfax warm`: makes a model's programs ahead, so that later commands and servers find them on the disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.cli.generation_options import WritingOptions
from hfax.cli.model_options import ModelOptions
from hfax.cli.option_groups import expand
from hfax.cli.option_types import positive_numbers
from hfax.cli.phase_display import PhaseDisplay
from hfax.cli.serve import EngineOptions, require_server
from hfax.errors import CheckpointNotFoundError, InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from hfax.checkpoint import Checkpoint
    from hfax.phases import PhaseEvent
    from hfax.programs.shared import SharedFolder

EXAMPLES = """[bold]Examples[/bold]

  hfax warm demo --prompt-lengths 16,64
  hfax warm Qwen/Qwen3-0.6B --batch-sizes 1,8 --prompt-lengths 128,1024 --max-new-tokens 256 --temperature 0.7
  hfax warm Qwen/Qwen3-0.6B --for-server --max-model-len 4096"""

_DEFAULT_LENGTH = 128
"""That of `hfax generate`."""


@expand
def warm(
    model: model_options.ModelArgument,
    *,
    batch_sizes: Annotated[str, typer.Option(help="Numbers of prompts in a call, comma-separated.")] = "1",
    prompt_lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, comma-separated.")] = "64",
    how: WritingOptions,
    for_server: Annotated[
        bool, typer.Option("--for-server", help="The programs of hfax serve with the same model and engine options.")
    ] = False,
    engine: EngineOptions,
    share: Annotated[
        str | None,
        typer.Option(
            help="Also copy all that such a run reads to this folder or URL (gs://, s3://), for other machines with the same "
            "software and device. To add to what it has, append its #sha256=…",
            metavar="WHERE",
        ),
    ] = None,
    which: ModelOptions,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Compile a model's programs and keep them on disk, so that later runs with the same options compile nothing.

    Programs depend on sizes rounded up to powers of two, and on which options are used (sampling, beams, stop strings), not on
    their values. Nothing is generated. Where all that a later run needs is stored, it imports neither torch nor transformers.
    """
    with reporting(verbose):
        _check(for_server, how, engine)
        sizes = positive_numbers("--batch-sizes", batch_sizes), positive_numbers("--prompt-lengths", prompt_lengths)
        started, phases, seen = time.perf_counter(), PhaseDisplay(make_console()), dict[str, float]()

        def note(event: PhaseEvent) -> None:
            if event.name == "compile" and event.seconds is not None:
                seen[event.detail] = event.seconds

        with phases.following("warming up"):
            checkpoint = which.open(model)
            from hfax.phases import listen
            from hfax.programs.program_files import noting_uses

            with listen(note), noting_uses() as used:
                if for_server:
                    _warm_server(checkpoint, engine)
                else:
                    with contextlib.suppress(CheckpointNotFoundError):  # models without one are warmed up, too
                        checkpoint.open_tokenizer()
                    loaded = checkpoint.load_model()
                    length = how.max_new_tokens or _DEFAULT_LENGTH
                    loaded.compile(*sizes, max_new_tokens=length, progress=False, **how.as_arguments())
        shared = None if share is None else str(_share(used, share))
        seconds = time.perf_counter() - started
        if json_output:
            rounded = {name: round(s, 3) for name, s in seen.items()}
            found = {"model": model, "compiled": rounded, "seconds": round(seconds, 3), "shared": shared}
            typer.echo(json.dumps(found))
            return
        if seen:
            typer.echo(f"{len(seen)} programs compiled and stored, {seconds:.1f} s in all.")
        else:
            typer.echo("All of these programs were on the disk already.")
        if shared is not None:
            typer.echo(f"For other machines: export HFAX_PROGRAMS='{shared}'")


def _share(used: set[Path], where: str) -> SharedFolder:
    from hfax.home import hfax_home
    from hfax.programs.shared import names_in, share

    return share(names_in(hfax_home(), sorted(used)), where)


def _check(for_server: bool, how: WritingOptions, engine: EngineOptions) -> None:
    """Raise if options of `hfax generate` and of `hfax serve` are mixed."""
    given, without = (how, WritingOptions()) if for_server else (engine, EngineOptions())
    shared = {field.name for field in dataclasses.fields(WritingOptions if given is engine else EngineOptions)}
    fields = (field.name for field in dataclasses.fields(given) if field.name not in shared)
    if different := [name for name in fields if getattr(given, name) != getattr(without, name)]:
        name = "--" + different[0].replace("_", "-")
        raise InvalidInputError(
            f"{name} {'does not go with' if for_server else 'needs'} --for-server.",
            "A server's programs serve all sampling options; those of generate have no engine.",
            f"{'Omit' if for_server else 'Add'} {name if for_server else '--for-server'}.",
        )


def _warm_server(checkpoint: Checkpoint, engine: EngineOptions) -> None:
    require_server()
    from hfax.server.loading import load_checkpoint

    loaded = load_checkpoint(checkpoint, engine.config(), chat_template=None, on_step=lambda seconds, tokens: None)
    if loaded.engine is not None:
        loaded.engine.close()
