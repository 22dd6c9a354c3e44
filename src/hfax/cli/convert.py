"""`hfax convert`: converts a checkpoint's weights to another format."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hfax.cli import model_options
from hfax.cli.error_display import reporting
from hfax.errors import InvalidInputError

EXAMPLES = """[bold]Examples[/bold]

  hfax convert owner/flax-model ./model
  hfax convert Qwen/Qwen3-0.6B ./qwen3-int4 --to compressed-tensors --quantization int4
  hfax convert ./model.gguf ./plain --dtype bfloat16
  hfax convert ./model ./for-flax --to flax
  hfax convert Qwen/Qwen3-0.6B ./parts --to orbax"""


class To(StrEnum):
    """Values of `--to`."""

    SAFETENSORS = "safetensors"
    COMPRESSED_TENSORS = "compressed-tensors"
    FLAX = "flax"
    ORBAX = "orbax"


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A Hub id, a folder, a GGUF file, or demo.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Output folder; created if missing.")],
    to: Annotated[
        To,
        typer.Option(
            help="Weight format: safetensors for transformers, compressed-tensors for quantized weights that transformers and vLLM"
            " load, flax for Flax, or orbax."
        ),
    ] = To.SAFETENSORS,
    dtype: model_options.DtypeOption = model_options.Dtype.AUTO,
    quantization: model_options.QuantizationOption = None,
    revision: model_options.RevisionOption = None,
    token: model_options.TokenOption = None,
    trust_remote_code: model_options.TrustOption = False,
    local_files_only: model_options.LocalOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Convert a checkpoint to another format, with its config and tokenizer; weights keep their dtypes unless you pass --dtype.

    Reads safetensors, Flax (flax_model.msgpack), PyTorch pickle and GGUF files, single or sharded, and other libraries' quantized
    checkpoints. To safetensors and flax, quantized weights become plain numbers; to compressed-tensors they keep their codes, where
    the format can express them. Holds one tensor in memory at a time, except to compressed-tensors and orbax, from GGUF, and with
    --dtype: these load the whole model.
    """
    with reporting(verbose):
        from hfax.load.source import resolve_checkpoint

        if quantization is not None and to not in (To.COMPRESSED_TENSORS, To.ORBAX):
            raise InvalidInputError(
                f"--quantization {quantization} does not go with --to {to}.",
                f"{to} is written as plain numbers.",
                "Pass --to compressed-tensors.",
            )
        found = resolve_checkpoint(
            source,
            revision=revision,
            token=token,
            local_files_only=local_files_only,
            allow_code=trust_remote_code,
        )
        is_loaded = to in (To.COMPRESSED_TENSORS, To.ORBAX) or found.format in ("orbax", "gguf") or dtype != "auto"
        if is_loaded:
            from hfax.auto import AutoModelForTPU
            from hfax.load.convert import check_other_folder, copy_companions

            check_other_folder(found, target)
            model = AutoModelForTPU.from_pretrained(
                source,
                revision=revision,
                token=token,
                local_files_only=local_files_only,
                dtype=str(dtype),
                quantization=None if quantization is None else str(quantization),
                trust_remote_code=trust_remote_code,
            )
            model.save_pretrained(target, format=str(to), dequantize=to in (To.SAFETENSORS, To.FLAX))
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
