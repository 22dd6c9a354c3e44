"""`hfax bench`: how fast a model loads, compiles and writes on this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import reporting
from hfax.cli.option_types import positive_numbers
from hfax.errors import InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax bench demo
  hfax bench Qwen/Qwen3-0.6B --batch-sizes 1,4,8 --contexts 128,1024 --plot speed.png
  hfax bench ./shape/config.json --dtype bfloat16 --compare --json-file speed.json"""


def bench(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A Hub id, a folder, demo; or a config.json, for random weights."),
    ],
    dtype: model_options.DtypeOption = model_options.Dtype.AUTO,
    quantization: Annotated[
        list[str] | None, typer.Option(help="Also measure with weights of this kind: int8, int4. May be repeated.")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Sequences side by side, comma-separated.")] = "1",
    contexts: Annotated[str, typer.Option(help="Tokens before decoding is measured, comma-separated.")] = "128",
    prompt_lengths: Annotated[str, typer.Option(help="Prompts whose reading is measured, comma-separated.")] = "512",
    capacity: Annotated[int, typer.Option(help="Of the cache, tokens; 0 as generate would choose it.")] = 0,
    tokens: Annotated[int, typer.Option(help="Decoding steps that are timed.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="How often each case runs; figures are medians.", min=1)] = 3,
    compare: Annotated[bool, typer.Option("--compare", help="Also measure transformers and the plain recipe.")] = False,
    json_file: Annotated[Path | None, typer.Option(help="Write the figures there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them there, a PNG.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write a trace of the first case there, for xprof or Perfetto.")
    ] = None,
    limit_s: Annotated[float, typer.Option(help="Longest that one load, compilation or run may take, s.")] = 900,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Measure loading, compiling, reading prompts and decoding, beside the machine's own limits."""
    with reporting(verbose):
        from rich.console import Console

        from hfax.bench import report as reports
        from hfax.bench.run import Plan, run
        from hfax.bench.spec import Case, SubjectSpec

        model = _existing(model)
        decode = [
            Case(kind="decode", batch_size=batch, context=context, capacity=capacity, tokens=tokens)
            for batch in positive_numbers("--batch-sizes", batch_sizes)
            for context in positive_numbers("--contexts", contexts)
        ]
        cases = (
            *decode,
            *(Case(kind="prefill", context=n) for n in positive_numbers("--prompt-lengths", prompt_lengths)),
        )
        plans = [Plan(subject=SubjectSpec(name="hfax", kind="hfax", model=model, dtype=dtype.value), cases=cases)]
        for kind in quantization or []:
            spec = SubjectSpec(name=f"hfax {kind}", kind="hfax", model=model, dtype=dtype.value, quantization=kind)
            plans.append(Plan(subject=spec, cases=cases))
        if compare:
            plans += [
                Plan(subject=SubjectSpec(name=kind, kind=kind, model=model, dtype=dtype.value), cases=cases)
                for kind in ("eager", "static", "recipe")
            ]
        console = Console(stderr=True)
        with tempfile.TemporaryDirectory(prefix="hfax-bench-") as home, console.status("") as status:
            # first calls are those of a machine that has never seen the model
            found = run(
                plans,
                rounds=rounds,
                limit_s=limit_s,
                environment={"HFAX_HOME": home},
                profile=profile,
                tell=lambda message: status.update(message),
            )
        text = json.dumps(found, indent=2)
        if json_file is not None:
            json_file.write_text(text + "\n")
        if plot is not None:
            reports.plot(found, plot)
        if json_output:
            typer.echo(text)
        else:
            for table in reports.tables(found):
                Console().print(table)
        failures = reports.failures(found)
        for line in failures:
            console.print(line, markup=False)
        if failures:
            raise typer.Exit(1)


def _existing(model: str) -> str:
    """The model as its subjects find it: a demo and files become paths."""
    from hfax.load.source import resolve_checkpoint

    if model.endswith(".json"):
        if not Path(model).is_file():
            raise InvalidInputError(
                f"There is no file {model}.", "MODEL ends in .json, so it names a config.", "Correct the path."
            )
        return str(Path(model).resolve())
    return str(resolve_checkpoint(model).folder)
