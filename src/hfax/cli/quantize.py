"""`hfax quantize`: a checkpoint with calibrated 4- or 8-bit weights."""

from __future__ import annotations

import dataclasses
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting

EXAMPLES = """[bold]Examples[/bold]

  hfax quantize demo --data README.md --out demo-gptq --num-samples 8 --max-length 128
  hfax quantize Qwen/Qwen3-0.6B --data chats.jsonl --out qwen3-awq --method awq
  hfax quantize Qwen/Qwen3-30B-A3B --data wiki.txt --out qwen3-int8 --bits 8 --ignore '*.o_proj' --max-length 512"""


class Method(StrEnum):
    """Values of `--method`."""

    GPTQ = "gptq"
    AWQ = "awq"
    RTN = "rtn"


def quantize(
    model: model_options.ModelArgument,
    *,
    data: Annotated[
        Path,
        typer.Option(
            help="Calibration data: a text file, or .jsonl with rows of text, messages, or prompt and completion."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output folder; created if missing.")],
    method: Annotated[
        Method, typer.Option(help="Algorithm; rtn rounds to nearest, without calibration.")
    ] = Method.GPTQ,
    bits: Annotated[int, typer.Option(help="Bits of a weight: 4 or 8.")] = 4,
    group_size: Annotated[int, typer.Option(help="Columns that share a scale: 128, 64 or 32.")] = 128,
    num_samples: Annotated[
        int, typer.Option(help="Rows of calibration data, at most; one in eight is held out.")
    ] = 128,
    max_length: Annotated[int, typer.Option(help="Tokens of a row; at most the model's context.")] = 2048,
    damping: Annotated[
        float, typer.Option(help="GPTQ: share of the mean of the moments that is added to each.")
    ] = 0.01,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of modules that are not quantized, such as '*.down_proj'; may be repeated."),
    ] = None,
    dtype: model_options.DtypeOption = model_options.Dtype.AUTO,
    revision: model_options.RevisionOption = None,
    token: model_options.TokenOption = None,
    trust_remote_code: model_options.TrustOption = False,
    local_files_only: model_options.LocalOption = False,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Quantize a model's linear layers with calibration data; hfax, transformers and vLLM load the result.

    One layer is in memory at a time, besides the embedding table and the output head. Repeat an interrupted command to go on where
    it was. At the end, the perplexity of held-out data is shown, before and after.
    """
    with reporting(verbose):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("quantizing"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("layers"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=make_console(), transient=True) as bar:
            task = bar.add_task("", total=None)
            from hfax.quantization.checkpoint import quantize as run

            report = run(
                model,
                out,
                data=data,
                method=str(method),  # pyright: ignore[reportArgumentType]
                bits=bits,
                group_size=group_size,
                num_samples=num_samples,
                max_length=max_length,
                damping=damping,
                ignore=ignore or (),
                dtype=str(dtype),
                revision=revision,
                token=token,
                local_files_only=local_files_only,
                trust_remote_code=trust_remote_code,
                progress=lambda name, done, total: bar.update(task, completed=done, total=total),
            )
        if json_output:
            typer.echo(json.dumps(dataclasses.asdict(report) | {"folder": str(report.folder)}))
            return
        typer.echo(
            f"{report.folder}: {report.num_quantized} matrices quantized"
            + (f", {report.num_uncalibrated} of them by rounding alone" if report.num_uncalibrated else "")
        )
        typer.echo(f"perplexity {report.perplexity_before:.4f} -> {report.perplexity:.4f}  ({report.tokens:,} tokens)")
