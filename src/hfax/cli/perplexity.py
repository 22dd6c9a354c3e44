"""`hfax perplexity`: measures a model's perplexity on a text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.cli.model_options import ModelOptions
from hfax.cli.option_groups import expand
from hfax.cli.phase_display import PhaseDisplay
from hfax.errors import InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax perplexity demo README.md
  hfax perplexity Qwen/Qwen3-0.6B wiki.txt --max-length 2048 --stride 512
  hfax perplexity Qwen/Qwen3-0.6B wiki.txt --quantization int8 --json"""


@expand
def perplexity(
    model: model_options.ModelArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="UTF-8 text file; - reads stdin.", allow_dash=True)],
    *,
    max_length: Annotated[
        int | None, typer.Option(help="Window length in tokens; default: the model's context, at most 1024.", min=2)
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between window starts; default: the window length.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Windows per batch.", min=1)] = 4,
    which: ModelOptions,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Measure a text's perplexity, in nats per token and bits per byte."""
    with reporting(verbose):
        try:
            text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"{file} could not be read.", str(error), "Pass a text file in UTF-8.") from error
        with PhaseDisplay(make_console()).following("reading the text"):
            checkpoint = which.open(model)
            tokenizer = checkpoint.load_tokenizer()
            loaded = checkpoint.load_model()
            from hfax.evaluation.perplexity import perplexity as measure

            found = measure(loaded, tokenizer, text, max_length=max_length, stride=stride, batch_size=batch_size)
        if json_output:
            typer.echo(json.dumps(dataclasses.asdict(found)))
            return
        typer.echo(
            f"perplexity {found.perplexity:.4f}  ({found.nats_per_token:.4f} nats/token, "
            f"{found.bits_per_byte:.4f} bits/byte, {found.tokens:,} tokens)"
        )
