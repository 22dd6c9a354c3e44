"""`hfax bench`: benchmarks loading, compilation and generation on this machine."""

from __future__ import annotations

import importlib.util
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
        typer.Argument(metavar="MODEL", help="A Hub id, a folder, demo, or a config.json for random weights."),
    ],
    dtype: model_options.DtypeOption = model_options.Dtype.AUTO,
    quantization: Annotated[
        list[str] | None, typer.Option(help="Also measure with quantized weights: int8, int4. May be repeated.")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    contexts: Annotated[str, typer.Option(help="Context lengths for decoding, in tokens, comma-separated.")] = "128",
    prompt_lengths: Annotated[
        str, typer.Option(help="Prompt lengths for prefill, in tokens, comma-separated.")
    ] = "256",
    capacity: Annotated[int, typer.Option(help="KV-cache capacity in tokens; 0: as generate chooses.")] = 0,
    tokens: Annotated[int, typer.Option(help="Number of timed decoding steps.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Runs per case; results are medians.", min=1)] = 3,
    compare: Annotated[bool, typer.Option("--compare", help="Also measure transformers and plain torchax.")] = False,
    json_file: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot the results to this PNG file.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write a trace of the first case to this folder, for xprof or Perfetto.")
    ] = None,
    limit_s: Annotated[float, typer.Option(help="Timeout per load, compilation or run, in seconds.")] = 900,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Benchmark loading, compilation, prefill and decoding, relative to the machine's measured limits."""
    with reporting(verbose):
        from rich.console import Console

        from hfax.bench import report as reports
        from hfax.bench.run import Plan, run
        from hfax.bench.spec import Case, SubjectSpec

        name, model = model, _existing(model)
        decode = [
            Case(kind="decode", batch_size=batch, context=context, capacity=capacity, tokens=tokens)
            for batch in positive_numbers("--batch-sizes", batch_sizes)
            for context in positive_numbers("--contexts", contexts)
        ]
        cases = (
            *decode,
            *(Case(kind="prefill", context=n) for n in positive_numbers("--prompt-lengths", prompt_lengths)),
        )
        _require_models()
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
            # an empty cache, so first calls are cold
            found = run(
                plans,
                rounds=rounds,
                limit_s=limit_s,
                environment={"HFAX_HOME": home},
                profile=profile,
                tell=lambda message: status.update(message),
            )
        found = {"model": name, **found}
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


def _require_models() -> None:
    """Raise `ModuleNotFoundError`, of which the command makes an error: subjects load and compile from an empty cache."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _existing(model: str) -> str:
    """Resolve the model to a path for the subjects."""
    from hfax.load.source import resolve_checkpoint

    if model.endswith(".json"):
        if not Path(model).is_file():
            raise InvalidInputError(
                f"File not found: {model}.", "MODEL ends in .json, so it must be a config file.", "Correct the path."
            )
        return str(Path(model).resolve())
    source = resolve_checkpoint(model)
    return source.name if source.remote_files else str(source.folder)
