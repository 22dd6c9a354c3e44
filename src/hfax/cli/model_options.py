"""Model options, shared by all commands with a MODEL argument, and the checkpoint that they select."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from hfax.cli.option_types import parallelism_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hfax.backends.protocol import LoadOptions
    from hfax.checkpoint import Checkpoint


class Dtype(StrEnum):
    """Values of `--dtype`."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Quantization(StrEnum):
    """Values of `--quantization`: those of `hfax.load.quantize.Quantization`, which imports a framework."""

    INT8 = "int8"
    INT4 = "int4"


_PANEL = "Model"

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Hugging Face id, folder, its URL (gs://, s3://), or demo.", show_default=False
    ),
]
DtypeOption = Annotated[Dtype, typer.Option(help="Weight dtype; auto: the checkpoint's dtype.", rich_help_panel=_PANEL)]
QuantizationOption = Annotated[
    Quantization | None,
    typer.Option(
        help="Quantize the linear layers' weights while loading.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
ParallelismOption = Annotated[
    str | None,
    typer.Option(
        help="Device mesh for the model: auto, or axis sizes such as data=2,tensor=4.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
RevisionOption = Annotated[
    str | None, typer.Option(help="Branch, tag or commit on the Hub.", rich_help_panel=_PANEL, show_default=False)
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        help="Hub token. Prefer hf auth login or HF_TOKEN, which do not appear in process lists.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Allow custom Python code from the checkpoint.", rich_help_panel=_PANEL),
]
LocalOption = Annotated[
    bool, typer.Option("--local-files-only", help="Use only local files; no network access.", rich_help_panel=_PANEL)
]
BackendOption = Annotated[str, typer.Option(help="Backend: jax or torch_xla.", rich_help_panel=_PANEL)]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show logs and error tracebacks.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write a single JSON object to stdout.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options of commands that load a checkpoint unchanged, on one device."""

    dtype: DtypeOption = Dtype.AUTO
    revision: RevisionOption = None
    token: TokenOption = None
    trust_remote_code: TrustOption = False
    local_files_only: LocalOption = False

    def open(self, name: str) -> Checkpoint:
        """Find a checkpoint, downloading it if needed."""
        from hfax.checkpoint import open_checkpoint

        return open_checkpoint(
            name,
            self._load_options(),
            revision=self.revision,
            token=self.token,
            local_files_only=self.local_files_only,
            backend=self._backend(),
        )

    def _load_options(self) -> LoadOptions:
        from hfax.backends.protocol import LoadOptions

        return LoadOptions(dtype=self.dtype.value, trust_remote_code=self.trust_remote_code)

    def _backend(self) -> str:
        return "jax"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(CheckpointOptions):
    """Options of commands that run a model."""

    quantization: QuantizationOption = None
    parallelism: ParallelismOption = None

    def _load_options(self) -> LoadOptions:
        parallelism = parallelism_of("--parallelism", self.parallelism)
        quantization = None if self.quantization is None else self.quantization.value
        return super()._load_options().changed(quantization=quantization, parallelism=parallelism)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendOptions(ModelOptions):
    """Options of commands that run a model on either backend."""

    backend: BackendOption = "jax"

    def _backend(self) -> str:
        return self.backend


def context_length(config: PretrainedConfig) -> int | None:
    """A decoder-only model's context length; None if unlimited."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
