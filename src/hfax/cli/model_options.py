"""Model options and model loading, shared by all commands with a MODEL argument.

Resolves the options to a local `Checkpoint`, then loads its tokenizer and model. Only `open_checkpoint` queries the Hub; everything
after it reads local files.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfax.cli.option_types import parallelism_of
from hfax.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hfax.backends.jax.model import JaxModel
    from hfax.load.source import CheckpointSource


class Dtype(StrEnum):
    """Values of `--dtype`."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


_PANEL = "Model"

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Hugging Face id, local folder, or demo.", show_default=False)
]
DtypeOption = Annotated[Dtype, typer.Option(help="Weight dtype; auto: the checkpoint's dtype.", rich_help_panel=_PANEL)]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        help="int8 or int4: quantize the linear layers' weights while loading.",
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
class ModelOptions:
    """Model options from the command line."""

    name: str
    dtype: Dtype = Dtype.AUTO
    revision: str | None = None
    token: str | None = None
    trust_remote_code: bool = False
    local_files_only: bool = False
    backend: str = "jax"
    quantization: str | None = None
    parallelism: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A local checkpoint; its weights are not loaded yet."""

    options: ModelOptions
    source: CheckpointSource
    config: PretrainedConfig

    def load_tokenizer(self) -> Any:
        """Load the checkpoint's tokenizer.

        Raises:
            CheckpointNotFoundError: the checkpoint has no tokenizer, or transformers cannot load it.
        """
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.source.folder, trust_remote_code=self.options.trust_remote_code, local_files_only=True
            )
        except Exception as error:  # transformers raises OSError, ValueError, KeyError, TypeError, ImportError, … here
            raise CheckpointNotFoundError(
                f"{self.options.name} has no tokenizer that transformers can load.",
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}",
                "Add tokenizer.json (or the model's own vocabulary files) and tokenizer_config.json to the folder "
                "with tokenizer.save_pretrained(folder).",
            ) from error

    def load_model(self, task: str | None = None) -> JaxModel:
        """Load the model, with its weights on the device.

        Args:
            task: pipeline task name that selects the model class; None: the checkpoint's class.
        """
        from hfax import AutoModelForTPU

        return AutoModelForTPU.from_pretrained(
            self.source.name,
            backend=self.options.backend,
            task=task,
            dtype=self.options.dtype.value,
            revision=self.source.revision,
            token=self.options.token,
            local_files_only=True,
            trust_remote_code=self.options.trust_remote_code,
            quantization=self.options.quantization,
            parallelism=parallelism_of("--parallelism", self.options.parallelism),
        )


def open_checkpoint(options: ModelOptions) -> Checkpoint:
    """Find a checkpoint, downloading it if needed, and read its config."""
    from hfax.load.source import resolve_checkpoint

    source = resolve_checkpoint(
        options.name,
        revision=options.revision,
        token=options.token,
        local_files_only=options.local_files_only,
        allow_code=options.trust_remote_code,
    )
    from hfax.load.config import read_config  # imports transformers, so misspelled names are reported first

    return Checkpoint(
        options=options,
        source=source,
        config=read_config(source, trust_remote_code=options.trust_remote_code),
    )


def context_length(config: PretrainedConfig) -> int | None:
    """A decoder-only model's context length; None if unlimited."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
