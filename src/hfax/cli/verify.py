"""`hfax verify`: compares a checkpoint with plain transformers on this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.cli.model_options import CheckpointOptions
from hfax.cli.option_groups import expand
from hfax.cli.phase_display import PhaseDisplay
from hfax.errors import InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax verify demo
  hfax verify Qwen/Qwen3-0.6B --dtype float32
  hfax verify ./my-model --prompts prompts.txt --max-new-tokens 200 --json"""

_PROMPTS = (
    "The",
    "Return a new list with the elements of the first",
    "In the beginning there was one processor, and it was slow. Then there were two, and people learned that waiting",
    "def median(values):\n    values = sorted(values)\n    middle = len(values) // 2\n    if len(values) % 2:\n        return",
)
"""Prompts of four lengths, so a batch of all needs padding."""


@expand
def verify(
    model: model_options.ModelArgument,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 file with one prompt per line, for models that take text; default: four built-in prompts.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="New tokens per prompt, greedy; 0: forward passes only.", min=0)
    ] = 32,
    which: CheckpointOptions,
    json_output: model_options.JsonOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Compare a checkpoint's outputs and text with plain transformers. Exit code 1 if they differ.

    Images, audio and other inputs besides text are random. Needs memory for three copies of the weights: hfax's, transformers',
    and, if they differ, one in a wider dtype.
    """
    with reporting(verbose):
        texts = None if prompts is None else _read(prompts)
        with PhaseDisplay(make_console()).following("comparing"):
            checkpoint = which.open(model)
            from hfax.evaluation.verification import takes_prompts
            from hfax.evaluation.verification import verify as compare
            from hfax.load.skeleton import resolve_model_class

            code_folder = checkpoint.options.code_folder(checkpoint.source)
            takes_text = takes_prompts(resolve_model_class(checkpoint.config, None, code_folder=code_folder))
            if texts is None and takes_text:
                texts = _PROMPTS
            tokenizer = checkpoint.load_tokenizer() if takes_text else None
            loaded = checkpoint.load_model()
            found = compare(loaded, tokenizer, texts or (), max_new_tokens=max_new_tokens)
        typer.echo(json.dumps(dataclasses.asdict(found)) if json_output else _as_text(found))
        if not found.agrees:
            raise typer.Exit(1)


def _read(file: Path) -> tuple[str, ...]:
    try:
        texts = tuple(line for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{file} could not be read.", str(error), "Pass a text file in UTF-8.") from error
    if not texts:
        raise InvalidInputError(f"{file} has no prompts.", "All its lines are empty.", "Write one prompt per line.")
    return texts


def _as_text(found) -> str:  # noqa: ANN001 (its class would import jax)
    verdict = "agrees with transformers" if found.agrees else "differs from transformers"
    lines = [f"{found.class_name} in {found.dtype} {verdict}"]
    for one in found.prompts:
        given = f"{one.prompt_tokens} tokens" if not one.prompt.startswith("random ") else one.prompt
        written = f", {one.new_tokens} new tokens" if one.new_tokens else ""
        lines.append(
            f"  {given}{written}: {one.outcome}, outputs within {one.forward_error:.1e} relative to their scale"
        )
        if one.rounding is not None:
            lines.append(f"    transformers' own rounding: {one.rounding:.1e}")
        if one.parted_at is not None:
            margin = f"; its top two logits differ by {one.margin:.1e}" if one.margin is not None else ""
            lines.append(f"    the outputs diverge at new token {one.parted_at}{margin}")
    if found.padded_error is not None:
        lines.append(f"  all in one left-padded batch: logits within {found.padded_error:.1e}")
    if found.not_verified is not None:
        lines.append(f"  images and audio were not verified: {found.not_verified}")
    if (where := found.difference) is not None:
        lines.append(
            f"  first module that differs: {where.part or 'the model itself'} ({where.part_class}), by {where.error:.1e}"
        )
        how = (
            f"{where.operation}, by {where.operation_error:.1e}"
            if where.operation
            else "hfax runs different operations there"
        )
        lines.append(f"  first operation in it: {how}")
    if found.patches:
        lines.append(f"  patches: {', '.join(found.patches)}")
    lines.append("  " + ", ".join(f"{name} {version}" for name, version in found.versions.items()))
    return "\n".join(lines)
