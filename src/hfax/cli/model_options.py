"""The options that say which model to load and how, and the loading itself: the same for every verb that has a MODEL.

Turns them into a `Checkpoint` on this machine, then into its tokenizer and its model. The Hub is asked once: everything
after `open_checkpoint` reads the files that it found.
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
DtypeOption = Annotated[
    Dtype, typer.Option(help="Of the weights; auto is the checkpoint's own.", rich_help_panel=_PANEL)
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(
        help="int8 or int4: pack the linear layers' weights while loading.", rich_help_panel=_PANEL, show_default=False
    ),
]
ParallelismOption = Annotated[
    str | None,
    typer.Option(
        help="Devices to spread the model over: auto, or sizes by axis such as data=2,tensor=4.",
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
        help="Hub token. Better: hf auth login, or HF_TOKEN, which no process list shows.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that the checkpoint carries.", rich_help_panel=_PANEL),
]
LocalOption = Annotated[
    bool, typer.Option("--local-files-only", help="Use what is on this machine; no network.", rich_help_panel=_PANEL)
]
BackendOption = Annotated[str, typer.Option(help="What runs the model.", rich_help_panel=_PANEL)]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show logs, and tracebacks of errors.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON object to stdout, and nothing else.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options of a command line that concern the model."""

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
    """A checkpoint on this machine, before its weights are read."""

    options: ModelOptions
    source: CheckpointSource
    config: PretrainedConfig

    def load_tokenizer(self) -> Any:
        """The checkpoint's own tokenizer.

        Raises:
            CheckpointNotFoundError: it has none, or transformers cannot build it.
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
                "The folder needs tokenizer.json (or the model's own vocabulary files) and tokenizer_config.json; "
                "save them there with tokenizer.save_pretrained(folder).",
            ) from error

    def load_model(self, task: str | None = None) -> JaxModel:
        """The model, its weights on the device.

        Args:
            task: a pipeline task name, to choose the class; None for the checkpoint's own.
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
    """Find a checkpoint, downloading it if need be, and read its configuration."""
    from hfax.load.source import resolve_checkpoint

    source = resolve_checkpoint(
        options.name,
        revision=options.revision,
        token=options.token,
        local_files_only=options.local_files_only,
        allow_code=options.trust_remote_code,
    )
    from hfax.load.config import read_config  # imports transformers; a misspelt name is found before

    return Checkpoint(
        options=options,
        source=source,
        config=read_config(source, trust_remote_code=options.trust_remote_code),
    )


def context_length(config: PretrainedConfig) -> int | None:
    """The most tokens a decoder-only model attends to; None where that is not bound."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
