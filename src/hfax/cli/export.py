"""`hfax export`: exports a model to a folder that loads elsewhere without tracing or compiling."""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfax.cli import model_options
from hfax.cli.error_display import reporting
from hfax.cli.model_options import ModelOptions
from hfax.cli.option_groups import expand
from hfax.cli.option_types import parallelism_of, positive_numbers
from hfax.cli.serve import EngineOptions
from hfax.errors import InvalidInputError, UnsupportedOptionError

if TYPE_CHECKING:
    from hfax.backends.jax.model import JaxModel

EXAMPLES = """[bold]Examples[/bold]

  hfax export demo --out bundle && hfax generate bundle "Return a new list"
  hfax export Qwen/Qwen3-0.6B --out bundle --topology v5e:1x1 --batch-sizes 1,8 --prompt-lengths 128,1024
  hfax export demo --out bundle --for-server --max-model-len 512
  hfax serve bundle --max-model-len 512
  hfax export demo --out portable --format stablehlo"""


class Format(StrEnum):
    """Values of `--format`."""

    BUNDLE = "bundle"
    STABLEHLO = "stablehlo"


@expand
def export(
    model: model_options.ModelArgument,
    out: Annotated[Path, typer.Option(help="Output folder; an earlier export is replaced.")],
    *,
    format: Annotated[
        Format, typer.Option(help="bundle: compiled, for one runtime. stablehlo: portable, requires only jax.")
    ] = Format.BUNDLE,
    topology: Annotated[
        str | None, typer.Option(help="TPU topology to compile for, such as v5e:2x4; default: this machine's devices.")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1",
    prompt_lengths: Annotated[str, typer.Option(help="Maximum prompt lengths in tokens, comma-separated.")] = "64",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum new tokens per call.", min=1)] = 64,
    for_server: Annotated[
        bool,
        typer.Option(
            "--for-server", help="Also the programs of hfax serve with the same engine options; runs the model."
        ),
    ] = False,
    engine: EngineOptions,
    which: ModelOptions,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Compile a model ahead of time and save its programs and weights; load the folder with from_pretrained."""
    with reporting(verbose):
        if format is Format.STABLEHLO and topology is not None:
            raise InvalidInputError(
                "--topology cannot be combined with --format stablehlo.",
                "StableHLO is compiled where it runs.",
                "Omit one of the two options.",
            )
        if engine != EngineOptions() and not for_server:
            raise InvalidInputError(
                "Options of the engine need --for-server.",
                "Without it, the programs of generate() are exported, which have no engine.",
                "Add --for-server, or omit them.",
            )
        if for_server and format is Format.STABLEHLO:
            raise InvalidInputError(
                "--for-server cannot be combined with --format stablehlo.",
                "A server's programs depend on hfax's own code.",
                "Omit one of the two options.",
            )
        on_host = dataclasses.replace(which, parallelism=None) if topology else which
        loaded = on_host.open(model).load_model()
        sizes = positive_numbers("--batch-sizes", batch_sizes), positive_numbers("--prompt-lengths", prompt_lengths)
        given: dict[str, Any] = {"batch_sizes": sizes[0], "prompt_lengths": sizes[1], "max_new_tokens": max_new_tokens}
        if not loaded.can_generate():
            given["calls"] = _calls(loaded, *sizes)
        if format is Format.STABLEHLO:
            from hfax.exporting.stablehlo import export_stablehlo

            export_stablehlo(loaded, out, **given)
            programs = sorted(path.stem for path in out.glob("*.stablehlo"))
        else:
            from hfax.exporting.bundle import export as export_bundle

            mesh = parallelism_of("--parallelism", which.parallelism) if topology else None
            config = engine.config() if for_server else None
            bundle = export_bundle(loaded, out, topology=topology, parallelism=mesh or "auto", engine=config, **given)
            programs = sorted(bundle.programs.values())
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        if json_output:
            typer.echo(json.dumps({"folder": str(out), "format": format.value, "programs": programs, "bytes": size}))
        else:
            typer.echo(f"{out}: {len(programs)} programs ({', '.join(programs)}), {size / 1e6:.1f} MB")


def _calls(model: JaxModel, batch_sizes: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    """Example forward passes of a text model that does not generate."""
    import numpy as np

    if model.main_input_name != "input_ids":
        raise UnsupportedOptionError(
            f"hfax export does not support {type(model).__name__}, which takes {model.main_input_name}.",
            "Programs need fixed input shapes, and the command has no options for them.",
            "Export it in Python: hfax.export(model, folder, calls=[inputs]).",
        )
    shapes = [(rows, length) for rows in batch_sizes for length in lengths]
    return [{"input_ids": np.ones(s, np.int32), "attention_mask": np.ones(s, np.int32)} for s in shapes]
