"""The `hfax` command: subcommands, errors and exit codes.

Dispatches a command line to one subcommand. Exit codes: 0 success, 1 failure, 2 usage error, 130 Ctrl-C. This module has no heavy
imports, so `--help` and completion are fast.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer

from hfax import progress
from hfax.cli.error_display import is_debugging, show_error
from hfax.errors import BackendNotAvailableError, HfaxError

_EXAMPLES = """[bold]Examples[/bold]

  hfax generate demo "Return a new"
  hfax chat Qwen/Qwen3-0.6B
  hfax serve Qwen/Qwen3-0.6B --port 8000
  hfax train sft.yaml
  hfax classify demo "What a lovely day" --labels POSITIVE,NEGATIVE
  hfax doctor Qwen/Qwen3-0.6B
  hfax verify Qwen/Qwen3-0.6B
  hfax plan Qwen/Qwen3-0.6B --machines v5e:2x4
  hfax export Qwen/Qwen3-0.6B --out bundle --topology v5e:1x1
  hfax bench demo
  hfax env

MODEL is a Hugging Face id, a folder, the URL of one in an object store, or demo: a tiny model that ships with hfax.
Exit codes: 0 success, 1 failure, 2 usage error, 130 Ctrl-C."""

_COMPLETION = "_HFAX_COMPLETE"
_GARBAGE_THRESHOLD = 50_000
"""New objects after which Python looks for garbage, in a command: importing makes many and no garbage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Command:
    """A subcommand.

    Args:
        module: defines `function`, and `EXAMPLES` for the end of its help.
        function: its name.
        settings: of typer's context.
    """

    module: str
    function: str
    settings: Mapping[str, Any] | None = None


_REST = {"allow_extra_args": True, "ignore_unknown_options": True}
_COMMANDS = {
    "generate": _Command(module="hfax.cli.generate", function="generate"),
    "chat": _Command(module="hfax.cli.chat", function="chat"),
    "serve": _Command(module="hfax.cli.serve", function="serve"),
    "train": _Command(module="hfax.cli.train", function="train"),
    "perplexity": _Command(module="hfax.cli.perplexity", function="perplexity"),
    "classify": _Command(module="hfax.cli.classify", function="classify"),
    "doctor": _Command(module="hfax.cli.doctor", function="doctor"),
    "verify": _Command(module="hfax.cli.verify", function="verify"),
    "plan": _Command(module="hfax.cli.plan", function="plan"),
    "export": _Command(module="hfax.cli.export", function="export"),
    "convert": _Command(module="hfax.cli.convert", function="convert"),
    "quantize": _Command(module="hfax.cli.quantize", function="quantize"),
    "warm": _Command(module="hfax.cli.warm", function="warm"),
    "bench": _Command(module="hfax.cli.bench", function="bench"),
    "matrix": _Command(module="hfax.cli.matrix", function="matrix"),
    "env": _Command(module="hfax.cli.env", function="env"),
    "bench serve": _Command(module="hfax.cli.bench_serve", function="bench_serve"),
    "bench attack": _Command(module="hfax.cli.bench_attack", function="bench_attack"),
    "lm-eval": _Command(module="hfax.cli.lm_eval", function="lm_eval", settings={**_REST, "help_option_names": []}),
    # arguments after the program are passed to it
    "launch": _Command(
        module="hfax.cli.launch", function="launch", settings={**_REST, "allow_interspersed_args": False}
    ),
}
"""By name, in the order of the help."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from hfax import __version__

        typer.echo(f"hfax {__version__}")
        raise typer.Exit


def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def make_app() -> typer.Typer:
    """The command with all subcommands."""
    return _app_of(_COMMANDS, lambda function: function)


def _app_for(given: Sequence[str]) -> typer.Typer:
    """The app for a command line: with the one command that it names, since importing and building all takes longer than running
    some, or with names and descriptions of all."""
    if _COMPLETION in os.environ:  # a shell asks for the options of the line that it is at
        return make_app()
    if given and given[0] in _COMMANDS:
        return _app_of({given[0]: _COMMANDS[given[0]]}, lambda function: function)
    return _app_of(_COMMANDS, _without_options)


def _app_of(commands: Mapping[str, _Command], made: Callable[[Any], Any]) -> typer.Typer:
    app = typer.Typer(
        name="hfax",
        help="Run any Hugging Face transformers model on TPUs, GPUs and CPUs through JAX and XLA.",
        epilog=_EXAMPLES,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_top)
    for name, command in commands.items():
        module = importlib.import_module(command.module)
        settings = None if command.settings is None else dict(command.settings)
        register = app.command(name=name, epilog=module.EXAMPLES, context_settings=settings)
        register(made(getattr(module, command.function)))
    return app


def _without_options(function: Any) -> Any:
    def described() -> None: ...

    described.__doc__ = function.__doc__
    return described


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: arguments without the program name; None: this process's arguments.

    Returns:
        The exit code. Unexpected exceptions propagate.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if (name := " ".join(given[:2])) in _COMMANDS:  # for a model folder named serve, pass ./serve
        given[:2] = [name]
    try:
        _app_for(given)(args=given, prog_name="hfax")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:  # before or after the part in which typer catches it
        return 130
    except HfaxError as error:
        if is_debugging():
            raise
        show_error(error)
        return 1
    except ModuleNotFoundError as error:
        if is_debugging() or error.name not in ("torch", "torchax", "transformers", "jax"):
            raise
        show_error(
            BackendNotAvailableError(
                f"This needs {error.name}, which is not installed.",
                "hfax alone, and hfax[run], have what bundles of `hfax export` need, not the models' code.",
                "Run: pip install 'hfax[cpu]', 'hfax[tpu]' or 'hfax[cuda]'",
            )
        )
        return 1
    return 0


def main() -> NoReturn:
    """The entry point of the `hfax` script."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    progress.turn_off()
    gc.set_threshold(_GARBAGE_THRESHOLD)
    code = run()
    # Under `python -m`, CPython ends with SIGINT's default action instead of this code if Ctrl-C once interrupted
    # `exec` of a string (how dataclasses are made), even when it was caught. Running another string resets that.
    exec("")
    sys.exit(code)
