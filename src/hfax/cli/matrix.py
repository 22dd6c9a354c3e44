"""`hfax matrix`: every architecture of transformers, shrunken, beside plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting

EXAMPLES = """[bold]Examples[/bold]

  hfax matrix --mapping causal-lm --only llama,mamba
  hfax matrix --json-file docs/support.json --markdown docs/support.md"""


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
    verbose: model_options.VerboseOption = False,
) -> None:
    """Run a small random copy of every architecture in hfax and in plain transformers, and compare them."""
    with reporting(verbose):
        from hfax.matrix.command import run_matrix

        console = make_console()
        failed = run_matrix(
            mappings=mapping,
            model_types=only.split(",") if only else None,
            num_jobs=jobs,
            timeout_s=timeout_s,
            tensor=tensor,
            json_file=json_file,
            markdown=markdown,
            say=lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True),
        )
        if failed:
            raise typer.Exit(1)
