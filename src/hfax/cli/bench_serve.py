"""`hfax bench serve`: load-tests a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting

EXAMPLES = """[bold]Examples[/bold]

  hfax bench serve --num-requests 200 --concurrency 32
  hfax bench serve --url http://other:8000 --rate 4 --prompt-tokens 16:512 --output-tokens 16:128
  hfax bench serve --shared-tokens 1024 --prompt-tokens 32 --json-file load.json --plot load.png"""

_PANEL = "Load"


def bench_serve(
    url: Annotated[
        list[str] | None,
        typer.Option(help="Server URL; may be repeated to measure several in turn.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name on the server; queried if omitted.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="API key to send.", envvar="HFAX_API_KEY", show_envvar=False, show_default=False)
    ] = None,
    num_requests: Annotated[int, typer.Option(help="Total number of requests.", min=1, rich_help_panel=_PANEL)] = 100,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests per second, as a Poisson process; if omitted, as fast as --concurrency allows.",
            min=0.001,
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Maximum concurrent requests.", min=1, rich_help_panel=_PANEL, show_default=False)
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="Prompt length in tokens: a number, or LOW:HIGH.", rich_help_panel=_PANEL)
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(help="Output length in tokens: a number, or LOW:HIGH.", rich_help_panel=_PANEL)
    ] = "64",
    shared_tokens: Annotated[
        int, typer.Option(help="Length of the shared prompt prefix, in tokens.", min=0, rich_help_panel=_PANEL)
    ] = 0,
    num_groups: Annotated[
        int, typer.Option(help="Number of prompt groups with a shared prefix.", min=1, rich_help_panel=_PANEL)
    ] = 1,
    vocabulary: Annotated[
        int, typer.Option(help="Sample prompt token ids from 100 up to this.", min=101, rich_help_panel=_PANEL)
    ] = 1000,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", min=0, rich_help_panel=_PANEL)] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed.", rich_help_panel=_PANEL)] = 0,
    timeout: Annotated[
        float, typer.Option(help="Timeout per request, in seconds.", min=0.1, rich_help_panel=_PANEL)
    ] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option(help="Write the results to this JSON file.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the results to this PNG file.", show_default=False)] = None,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Load-test an OpenAI-compatible server: hfax or another. Exit code 1 if every request to a server failed."""
    with reporting(verbose):
        from rich.console import Console

        from hfax.bench import serving

        console = make_console()
        reports = []
        for each in url or ["http://127.0.0.1:8000"]:
            load = serving.Load(
                url=each.rstrip("/").removesuffix("/v1"),
                model=model,
                api_key=api_key,
                num_requests=num_requests,
                rate=rate,
                concurrency=concurrency,
                prompt_tokens=serving.Range.read("--prompt-tokens", prompt_tokens),
                output_tokens=serving.Range.read("--output-tokens", output_tokens),
                shared_tokens=shared_tokens,
                num_groups=num_groups,
                vocabulary=vocabulary,
                temperature=temperature,
                seed=seed,
                timeout_s=timeout,
            )
            with console.status(f"{each}: 0 of {num_requests}") as status:

                def show(done: int, failed: int, each: str = each, status: object = status) -> None:
                    status.update(f"{each}: {done} of {num_requests}, {failed} failed")  # type: ignore[attr-defined]

                reports.append(serving.run_load(load, show))
        if json_file is not None:
            json_file.write_text(json.dumps(reports, indent=2) + "\n")
        if plot is not None:
            serving.plot(reports, plot)
        if json_output:
            typer.echo(json.dumps(reports))
        out = Console(quiet=json_output)
        for report in reports:
            for table in serving.table_of(report):
                out.print(table)
            for what, count in report["errors"].items():
                out.print(f"{count} failed: {what}")
        if any(report["failed"] == report["requests"] for report in reports):
            raise typer.Exit(1)
