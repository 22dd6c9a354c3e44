"""`hfax convert`: converts a checkpoint's weights to another format."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import reporting

EXAMPLES = """[bold]Examples[/bold]

  hfax convert owner/flax-model ./model
  hfax convert ./model ./for-flax --to flax
  hfax convert Qwen/Qwen3-0.6B ./parts --to orbax"""


class To(StrEnum):
    """Values of `--to`."""

    SAFETENSORS = "safetensors"
    FLAX = "flax"
    ORBAX = "orbax"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A Hub id, a folder, or demo.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Output folder; created if missing.")],
    to: Annotated[
        To, typer.Option(help="Weight format: safetensors for transformers, flax for Flax, or orbax.")
    ] = To.SAFETENSORS,
    revision: model_options.RevisionOption = None,
    token: model_options.TokenOption = None,
    trust_remote_code: model_options.TrustOption = False,
    local_files_only: model_options.LocalOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Convert a checkpoint to another format, with its config and tokenizer; weights keep their dtypes, bit for bit.

    Reads safetensors, Flax (flax_model.msgpack) and PyTorch pickle files, single or sharded. Weights that another library quantized
    become plain numbers, except in orbax. Holds one tensor in memory at a time, except for orbax, which loads the whole model.
    """
    with reporting(verbose):
        from hfax.load.source import resolve_checkpoint

        found = resolve_checkpoint(
            source,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            allow_code=trust_remote_code,
        )
        if to is To.ORBAX or found.format == "orbax":
            from hfax.auto import AutoModelForTPU
            from hfax.load.convert import copy_companions

            model = AutoModelForTPU.from_pretrained(found.folder, trust_remote_code=trust_remote_code)
            model.save_pretrained(target, format=str(to))
            copy_companions(found.folder, target, without=("config.json", "generation_config.json"))
        else:
            from hfax.load.config import read_config
            from hfax.load.convert import convert_weights
            from hfax.load.formats import find_weights
            from hfax.load.store import open_store
            from hfax.tracing.abstract import open_skeleton

            config = read_config(found, trust_remote_code=trust_remote_code)
            code = str(found.folder) if trust_remote_code else None
            store = find_weights(config, open_store(found))
            skeleton = open_skeleton(config, dtype="float32", code_folder=code)
            convert_weights(found, store, skeleton, target, str(to))
        typer.echo(f"{target}: {to}")
