"""The `hfax` command: subcommands, errors and exit codes.

Dispatches a command line to one subcommand. Exit codes: 0 success, 1 failure, 2 usage error, 130 Ctrl-C. This module has no heavy
imports, so `--help` and completion are fast.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from hfax import progress
from hfax.cli.bench import bench
from hfax.cli.bench_attack import bench_attack
from hfax.cli.bench_serve import bench_serve
from hfax.cli.chat import chat
from hfax.cli.classify import classify
from hfax.cli.convert import convert
from hfax.cli.doctor import doctor
from hfax.cli.env import env
from hfax.cli.error_display import is_debugging, show_error
from hfax.cli.export import export
from hfax.cli.generate import generate
from hfax.cli.launch import launch
from hfax.cli.lm_eval import lm_eval
from hfax.cli.matrix import matrix
from hfax.cli.perplexity import perplexity
from hfax.cli.plan import plan
from hfax.cli.serve import serve
from hfax.cli.train import train
from hfax.cli.verify import verify
from hfax.cli.warm import warm
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

_GARBAGE_THRESHOLD = 50_000
"""New objects after which Python looks for garbage, in a command: importing makes many and no garbage."""

app = typer.Typer(
    name="hfax",
    help="Run any Hugging Face transformers model on TPUs, GPUs and CPUs through JAX and XLA.",
    epilog=_EXAMPLES,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from hfax import __version__

        typer.echo(f"hfax {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _verb in (
    generate,
    chat,
    serve,
    train,
    perplexity,
    classify,
    doctor,
    verify,
    plan,
    export,
    convert,
    warm,
    bench,
    matrix,
    env,
):
    app.command(epilog=sys.modules[_verb.__module__].EXAMPLES)(_verb)
_TWO_WORDS = {"bench serve": bench_serve, "bench attack": bench_attack}
for _name, _verb in _TWO_WORDS.items():
    app.command(name=_name, epilog=sys.modules[_verb.__module__].EXAMPLES)(_verb)
app.command(
    name="lm-eval",
    epilog=sys.modules[lm_eval.__module__].EXAMPLES,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(lm_eval)
# arguments after the program are passed to it
app.command(
    epilog=sys.modules[launch.__module__].EXAMPLES,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)(launch)


def _app_for(given: Sequence[str]) -> typer.Typer:
    """The app with the one command that a line names: making all of them takes longer than running some."""
    named = [command for command in app.registered_commands if given and _name_of(command) == given[0]]
    if not named:
        return app
    one = copy.copy(app)
    one.registered_commands = named
    return one


def _name_of(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.name or get_command_name(command.callback.__name__)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: arguments without the program name; None: this process's arguments.

    Returns:
        The exit code. Unexpected exceptions propagate.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if (name := " ".join(given[:2])) in _TWO_WORDS:  # for a model folder named serve, pass ./serve
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
