"""`hfax bench attack`: attacks a server with hostile requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting

EXAMPLES = """[bold]Examples[/bold]

  hfax bench attack http://127.0.0.1:8000
  hfax bench attack http://127.0.0.1:8000 --api-key first --attack-key second --pid 4321 --json-file attack.json
  hfax bench attack http://127.0.0.1:8000 --classes schemas,regexes --each 20

Attack only servers that are yours."""

_PANEL = "Attack"


def bench_attack(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's URL.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="Model name on the server; queried if omitted.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="API key of the valid traffic.", envvar="HFAX_API_KEY", show_envvar=False, show_default=False
        ),
    ] = None,
    attack_key: Annotated[
        str | None, typer.Option(help="API key of the attackers; the other one if omitted.", show_default=False)
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Classes of cases, comma-separated: json, numbers, schemas, regexes, prompts, images, headers, slow, floods; "
            "all if omitted.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    each: Annotated[
        int | None,
        typer.Option(
            help="Cases of each class, sampled; all if omitted.", min=1, rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the cases.", rich_help_panel=_PANEL)] = 0,
    concurrency: Annotated[
        int, typer.Option(help="Hostile cases at a time; floods run one by one.", min=1, rich_help_panel=_PANEL)
    ] = 8,
    timeout_s: Annotated[
        float, typer.Option(help="Timeout per request, in seconds.", min=0.1, rich_help_panel=_PANEL)
    ] = 60.0,
    slow_s: Annotated[
        float, typer.Option(help="How long slow clients dawdle, in seconds.", min=0.1, rich_help_panel=_PANEL)
    ] = 30.0,
    flood: Annotated[int, typer.Option(help="Connections of a flood.", min=1, rich_help_panel=_PANEL)] = 500,
    health_url: Annotated[
        str | None,
        typer.Option(
            help="URL to ask for /health, if the server has a port for it.", rich_help_panel=_PANEL, show_default=False
        ),
    ] = None,
    max_health_s: Annotated[
        float, typer.Option(help="Longest allowed answer of /health, in seconds.", min=0, rich_help_panel=_PANEL)
    ] = 1.0,
    pid: Annotated[
        int | None,
        typer.Option(
            help="Process id of the server, if it runs on this machine, to measure its memory with its children's.",
            rich_help_panel=_PANEL,
            show_default=False,
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option(help="Write the results to this JSON file.", show_default=False)
    ] = None,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Send hostile requests to your own OpenAI-compatible server, and check that valid ones are answered as before.

    Exits with 1 if a valid request failed or took over 5 s longer than without attackers, /health was slow, a response had a
    status of 500 or more but 503, a well-formed request got none, or memory was not given back.
    """
    with reporting(verbose):
        from rich.console import Console

        from hfax.bench.attacks import report, runner
        from hfax.bench.attacks.cases import CLASSES

        attack = runner.Attack(
            url=url,
            model=model,
            api_key=api_key,
            attack_key=attack_key,
            classes=CLASSES if classes is None else tuple(name.strip() for name in classes.split(",") if name.strip()),
            seed=seed,
            each=each,
            timeout_s=timeout_s,
            concurrency=concurrency,
            health_url=health_url,
            max_health_s=max_health_s,
            pid=pid,
            slow_s=slow_s,
            flood=flood,
        )
        with make_console().status("valid traffic alone") as status:
            found = runner.run_attack(
                attack, lambda name, done, total: status.update(f"{name}: {done} of {total}")
            )  # fmt: skip
        violated = report.violations(found)
        if json_file is not None:
            json_file.write_text(json.dumps(found | {"violations": violated}, indent=2) + "\n")
        out = Console(highlight=False)
        out.print(report.table_of(found))
        for line in violated:
            out.print(f"Violated: {line}", soft_wrap=True, markup=False)
        if violated:
            raise typer.Exit(1)
