"""`hfax matrix`: every architecture of transformers, shrunken, beside plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.errors import InvalidInputError, UnsupportedOptionError

EXAMPLES = """[bold]Examples[/bold]

  hfax matrix --mapping causal-lm --only llama,mamba
  hfax matrix --json-file docs/support.json --markdown docs/support.md
  hfax matrix --draws 20 --seed 100 --mapping causal-lm --corpus failures.json"""


def matrix(
    mapping: Annotated[
        list[str] | None, typer.Option(help="Which of transformers' auto mappings; may be repeated; all if left out.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Model types, separated by commas.")] = None,
    jobs: Annotated[int, typer.Option(help="Architectures at a time.")] = 2,
    tensor: Annotated[int, typer.Option(help="Split the weights over so many virtual devices.", min=1)] = 1,
    timeout_s: Annotated[float, typer.Option(help="Seconds for one architecture.")] = 300.0,
    json_file: Annotated[Path | None, typer.Option(help="Write every result here.", show_default=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here.", show_default=False)] = None,
    draws: Annotated[
        int, typer.Option(help="Run so many variations drawn at random of each architecture instead.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the first variation; with --draws.", min=0)] = 0,
    corpus: Annotated[
        Path | None, typer.Option(help="Add the failures, minimised, to this file; with --draws.", show_default=False)
    ] = None,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Run a small random copy of every architecture in hfax and in plain transformers, and compare them."""
    with reporting(verbose):
        if draws and (tensor > 1 or json_file is not None or markdown is not None):
            raise UnsupportedOptionError(
                "--draws goes with --mapping, --only, --jobs, --timeout-s, --seed and --corpus.",
                "Variations run on one device, and are no rows of the support table.",
                "Leave --tensor, --json-file and --markdown out.",
            )
        if not draws and (seed or corpus is not None):
            raise InvalidInputError(
                "--seed and --corpus need --draws.", "The matrix itself draws nothing.", "Add --draws 20."
            )
        from hfax.matrix.command import HFAX_FAILS, run_matrix
        from hfax.matrix.sweep import run_sweep

        console = make_console()
        which = {"mappings": mapping, "model_types": only.split(",") if only else None}
        how = {"num_jobs": jobs, "timeout_s": timeout_s}

        def say(line: str) -> None:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

        if draws:
            counts = run_sweep(draws=draws, seed=seed, corpus=corpus, say=say, **which, **how)
            failed = sum(counts[outcome] for outcome in HFAX_FAILS)
        else:
            failed = run_matrix(tensor=tensor, json_file=json_file, markdown=markdown, say=say, **which, **how)
        if failed:
            raise typer.Exit(1)
