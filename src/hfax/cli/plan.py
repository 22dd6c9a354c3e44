"""`hfax plan`: estimates which devices a model fits on, and its speed there."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hfax.cli import model_options
from hfax.cli.error_display import reporting
from hfax.cli.generation_options import kv_cache_dtype_option
from hfax.cli.option_types import mesh_sizes, pixels, positive_numbers
from hfax.cli.plan_report import FILE_WIDTH, print_plans
from hfax.errors import InvalidInputError, UnsupportedOptionError

EXAMPLES = """[bold]Examples[/bold]

  hfax plan meta-llama/Meta-Llama-3-8B --machines v5e:2x4,v6e:2x2 --batch 1,8,64
  hfax plan ./config.json --machines v5p:2x2x2 --context 32768 --quantization int8
  hfax plan Qwen/Qwen3-0.6B --devices cpu:8 --no-compile
  hfax plan meta-llama/Meta-Llama-3-8B --train full,lora --batch 8 --context 2048
  hfax plan Qwen/Qwen3-30B-A3B --machines v6e:2x4,h100:8 --json-file plan.json --plot plan.png"""


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id, a folder, a config.json, or demo.")],
    machines: Annotated[
        str,
        typer.Option(
            "--machines",
            "--topology",
            "--devices",
            help="TPU topologies such as v5e:2x4, GPUs as kind:count or kind:hostsxcount, or cpu:count; comma-separated.",
        ),
    ] = "v5e:2x4,v6e:2x4",
    batch: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    context: Annotated[int, typer.Option(help="Final length of each sequence, in tokens.", min=2)] = 8192,
    prompt: Annotated[
        int, typer.Option(help="Prompt length in tokens; 0: 512, or half of a short context.", min=0)
    ] = 0,
    image_size: Annotated[
        str | None,
        typer.Option(
            metavar="HEIGHTxWIDTH", help="Plan prompts with an image of this size in pixels, such as 1024x768."
        ),
    ] = None,
    quantization: model_options.QuantizationOption = None,
    kv_cache_dtype: Annotated[str, kv_cache_dtype_option(None)] = "auto",
    mesh: Annotated[
        str | None, typer.Option(help="Axis sizes such as data=2,tensor=4; default: the best mesh.")
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="Plan fine-tuning with --batch rows of --context tokens: full, lora, or full,lora."),
    ] = None,
    optim: Annotated[
        str | None,
        typer.Option(help="Optimizer of --train, such as adamw_torch (the default), adamw_8bit, lion or muon."),
    ] = None,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Estimate without the machines' compilers.")] = False,
    json_file: Annotated[
        Path | None, typer.Option(help="Write the plans to this JSON file, for from_pretrained(plan=…).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot tokens/s over batch size to this PNG file.")] = None,
    trust_remote_code: model_options.TrustOption = False,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Estimate memory, mesh and speed; for TPUs and GPUs with the real compilers. Loads no weights."""
    with reporting(verbose):
        from hfax.load.source import reject_missing_path
        from hfax.planning.chips import chip_of, sizes_of

        batches, sizes = positive_numbers("--batch", batch), mesh_sizes("--mesh", mesh)
        image = pixels("--image-size", image_size)
        for name in _names(machines):
            chip_of(name)
            sizes_of(name)
        reject_missing_path(model)
        import jax
        from rich.console import Console

        if jax.config.jax_platforms is None:  # type: ignore[attr-defined]
            jax.config.update("jax_platforms", "cpu")  # no device is needed: plugins do not search for theirs
        from hfax.load.config import read_any_config
        from hfax.load.stored_weights import stored_weights
        from hfax.planning import program_time
        from hfax.planning.plan import ASSUMPTIONS, make_plans

        if optim is not None and train is None:
            raise UnsupportedOptionError(
                f"--optim {optim} has no effect without --train.",
                "Serving has no optimizer.",
                "Add --train full or --train lora, or leave it out.",
            )
        config = read_any_config(model, trust_remote_code)
        stored = stored_weights(model, config) if quantization is None else None
        console = Console(stderr=True)
        if train is not None:
            if image is not None:
                raise UnsupportedOptionError(
                    "Fine-tuning cannot be planned with images.",
                    "Plans of training have rows of tokens alone.",
                    "Leave out --image-size or --train.",
                )
            _plan_training(
                console,
                model,
                config,
                machines,
                train,
                batches,
                context,
                sizes,
                optim or "adamw_torch",
                None if quantization is None else quantization.value,
                stored,
                not no_compile,
                json_file,
                json_output,
            )
            return
        plans = []
        with console.status("planning"):
            for each in make_plans(
                model,
                config,
                _names(machines),
                batches=batches,
                context=context,
                prompt=prompt or None,
                image_size=image,
                quantization=None if quantization is None else quantization.value,  # pyright: ignore[reportArgumentType]
                stored=stored,
                kv_cache_dtype=kv_cache_dtype,
                mesh=sizes,
                compiles=not no_compile,
            ):
                plans.append(each)
        used = {program_time.ASSUMPTIONS if each.times else ASSUMPTIONS: None for each in plans}
        text = _as_json(plans, assumptions := " ".join(used), json_file)
        if plot is not None:
            _draw(plans, plot)
        if json_output:
            typer.echo(text)
        else:
            print_plans(plans, assumptions)


def _names(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _as_json(plans: list[Any], assumptions: str, json_file: Path | None) -> str:
    """Convert the plans to JSON, and write them to the file, if given."""
    text = json.dumps({"plans": [dataclasses.asdict(p) for p in plans], "assumptions": assumptions}, indent=2)
    if json_file is not None:
        json_file.write_text(text + "\n")
    return text


def _plan_training(
    console: Any,
    model: str,
    config: Any,
    machines: str,
    kinds: str,
    rows: list[int],
    length: int,
    mesh: Any,
    optim: str,
    quantization: Any,
    stored: Any,
    compiles: bool,
    json_file: Path | None,
    json_output: bool,
) -> None:
    """Print or write the plans for fine-tuning."""
    from hfax.planning import program_time
    from hfax.train.memory_plan import ASSUMPTIONS, make_train_plans

    plans = []
    with console.status("planning"):
        for count in rows:
            plans += make_train_plans(
                model,
                config,
                _names(machines),
                kinds=[part.strip() for part in kinds.split(",")],  # pyright: ignore[reportArgumentType]
                rows=count,
                length=length,
                mesh=mesh,
                optim=optim,
                quantization=quantization,
                stored=stored,
                compiles=compiles,
            )
    used = [ASSUMPTIONS, *([program_time.ASSUMPTIONS] if any(each.times for each in plans) else [])]
    text = _as_json(plans, assumptions := " ".join(used), json_file)
    if json_output:
        typer.echo(text)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    table = Table(title=f"{model}: fine-tuning on rows of {length:,} tokens, GB per device", box=box.SIMPLE_HEAD)
    for column in (
        "machine",
        "training",
        "mesh",
        "rows",
        "fits",
        "state+frozen+temp.",
        "of",
        "step s",
        "of peak",
        "compile s",
    ):
        table.add_column(column, justify="left" if column in ("machine", "training", "mesh", "fits") else "right")
    for p in plans:
        table.add_row(
            p.machine,
            p.kind,
            " ".join(f"{name} {size}" for name, size in p.mesh.items()),
            str(p.rows),
            "yes" if p.fits else "no",
            f"{p.state_bytes / 1e9:.2f}+{p.frozen_bytes / 1e9:.2f}+{p.temporary_bytes / 1e9:.2f}",
            f"{p.memory_bytes / 1e9:.1f}",
            "?" if p.step_s is None else f"{p.step_s:.2f}",
            "?" if p.peak_share is None else f"{p.peak_share:.0%}",
            "-" if p.compile_s is None else f"{p.compile_s:.0f}",
        )
    out.print(table)
    for problem in dict.fromkeys(f"{p.machine} {p.kind}: {p.problem}" for p in plans if p.problem):
        out.print(problem, markup=False)
    out.print(assumptions, markup=False)


def _draw(plans: list[Any], path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInputError(
            "--plot requires matplotlib.", str(error), "Run pip install 'hfax[bench]', or omit --plot."
        ) from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for machine in dict.fromkeys(p.machine for p in plans):
        own = sorted((p for p in plans if p.machine == machine and p.tokens_per_s), key=lambda p: p.batch)
        axes.plot([p.batch for p in own], [p.tokens_per_s for p in own], "o-", label=machine)
        off = [p for p in own if not p.fits]
        axes.plot([p.batch for p in off], [p.tokens_per_s for p in off], "x", color="black")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="tokens/s")
    axes.set_title(f"{plans[0].model}, {plans[0].context:,} tokens (x: does not fit)")
    axes.legend()
    figure.savefig(path, dpi=150)
