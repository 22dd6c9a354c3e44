"""`hfax matrix`: compares scaled-down models of every transformers architecture with plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.errors import InvalidInputError, UnsupportedOptionError

EXAMPLES = """[bold]Examples[/bold]

  hfax matrix --mapping causal-lm --only llama,mamba
  hfax matrix --train --json-file build/support.json --markdown docs/support.md
  hfax matrix --draws 20 --seed 100 --mapping causal-lm --json-file draws.jsonl --corpus failures.json"""


def matrix(
    mapping: Annotated[
        list[str] | None, typer.Option(help="transformers auto mapping; may be repeated; default: all.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Model types, comma-separated.")] = None,
    jobs: Annotated[int, typer.Option(help="Number of architectures to run in parallel.")] = 2,
    tensor: Annotated[int, typer.Option(help="Tensor parallelism over this many virtual devices.", min=1)] = 1,
    train: Annotated[
        bool, typer.Option("--train", help="Also compare a training step: gradients, and the weights after it.")
    ] = False,
    timeout_s: Annotated[float, typer.Option(help="Timeout per architecture, in seconds.")] = 300.0,
    json_file: Annotated[
        Path | None,
        typer.Option(
            help="Write the results to this JSON file. With --draws: JSON Lines; an interrupted run resumes from it.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Run only what does not work yet in the results of --json-file, if there are any."
        ),
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the table to this Markdown file.", show_default=False)
    ] = None,
    draws: Annotated[
        int, typer.Option(help="Instead, run this many random variations of each architecture.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the first variation; requires --draws.", min=0)] = 0,
    corpus: Annotated[
        Path | None, typer.Option(help="Add minimized failures to this file; requires --draws.", show_default=False)
    ] = None,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Run a small random model of every architecture in hfax and in plain transformers, and compare the results."""
    with reporting(verbose):
        if draws and tensor > 1:
            raise UnsupportedOptionError(
                "--draws cannot be combined with --tensor.", "Random variations run on one device.", "Omit --tensor."
            )
        if draws and train:
            raise UnsupportedOptionError(
                "--draws cannot be combined with --train.", "Random variations are not trained.", "Omit --train."
            )
        if not draws and (seed or corpus is not None):
            raise InvalidInputError(
                "--seed and --corpus require --draws.",
                "They apply only to random variations.",
                "Add, for example, --draws 20.",
            )
        if resume and (draws or json_file is None):
            raise InvalidInputError(
                "--resume requires --json-file, and does not go with --draws.",
                "It reads the results of an earlier run; random variations always resume.",
                "Add --json-file build/support.json, or omit --resume.",
            )
        from hfax.matrix.case import HFAX_FAILS
        from hfax.matrix.command import run_matrix
        from hfax.matrix.sweep import run_sweep

        console = make_console()
        which = {"mappings": mapping, "model_types": only.split(",") if only else None}
        how = {"num_jobs": jobs, "timeout_s": timeout_s}

        def say(line: str) -> None:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

        if draws:
            counts = run_sweep(
                draws=draws,
                seed=seed,
                corpus=corpus,
                json_file=json_file,
                markdown=markdown,
                say=say,
                **which,
                **how,
            )
            failed = sum(counts[outcome] for outcome in HFAX_FAILS)
        else:
            failed = run_matrix(
                tensor=tensor,
                trains=train,
                json_file=json_file,
                resume=resume,
                markdown=markdown,
                say=say,
                **which,
                **how,
            )
        if failed:
            raise typer.Exit(1)
