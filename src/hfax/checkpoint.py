"""A checkpoint on this machine: its config, tokenizer and processor, and the model that they belong to.

`open_checkpoint` finds or downloads it; everything after that reads local files. The command and the server load models here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from typing import TYPE_CHECKING, Any

from hfax.backends.protocol import LoadOptions
from hfax.errors import CheckpointNotFoundError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hfax.backends.jax.model import JaxModel
    from hfax.load.source import CheckpointSource

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A local checkpoint; its weights are not loaded yet.

    Args:
        source: where it is.
        options: how the model will be loaded.
        backend: the backend that will load it.
    """

    source: CheckpointSource
    options: LoadOptions
    backend: str

    @functools.cached_property
    def config(self) -> PretrainedConfig:
        """Its config.

        Raises:
            CheckpointCorruptError: config.json is not valid.
            UnsupportedModelError: transformers does not know the model type, or it needs code that was not trusted.
        """
        from hfax.load.config import read_config

        return read_config(self.source, trust_remote_code=self.options.trust_remote_code)

    @property
    def architectures(self) -> list[str]:
        """The classes that the checkpoint's config.json names; that of its config if it names none.

        Raises:
            CheckpointCorruptError: see `config`.
            UnsupportedModelError: see `config`.
        """
        found = self._written.get("architectures")
        if isinstance(found, list) and found and all(isinstance(name, str) for name in found):
            return found
        return list(self.config.architectures or ())

    @functools.cached_property
    def _written(self) -> dict[str, Any]:
        """What config.json says; empty if it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            found: Any = json.loads((self.source.folder / "config.json").read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
        return {}

    @property
    def labels(self) -> dict[int, str]:
        """The labels of a classification head by index, as config.json has them; empty if it names none."""
        found = self._written.get("id2label")
        return {int(i): str(label) for i, label in found.items()} if isinstance(found, dict) else {}

    @property
    def problem_type(self) -> str | None:
        """What a classification head predicts, as config.json says: "multi_label_classification", say; None if it does not."""
        return self._written.get("problem_type")

    def open_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, for texts and conversations: transformers', or a `StoredTokenizer` with its results.

        Raises:
            CheckpointNotFoundError: see `load_tokenizer`.
        """
        from hfax.stored.records import is_useful
        from hfax.stored.tokenizer import find_tokenizer, store_tokenizer

        if self.options.trust_remote_code:
            return self.load_tokenizer()
        if is_useful() and (found := find_tokenizer(self.source.folder)) is not None:
            return found
        tokenizer = self.load_tokenizer()
        store_tokenizer(self.source.folder, tokenizer)
        return tokenizer

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
                f"{self.source.name} has no tokenizer that transformers can load.",
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}",
                "Add tokenizer.json (or the model's own vocabulary files) and tokenizer_config.json to the folder "
                "with tokenizer.save_pretrained(folder).",
            ) from error

    def load_processor(self) -> Any:
        """Load the processor of a model with image or audio input; None for others."""
        if not any((self.source.folder / name).is_file() for name in _PROCESSOR_FILES):
            return None
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(
            self.source.folder, trust_remote_code=self.options.trust_remote_code, local_files_only=True
        )

    def load_model(self, task: str | None = None) -> JaxModel:
        """Load the model, with its weights on the device.

        Args:
            task: pipeline task name that selects the model class; None: the checkpoint's class.
        """
        from hfax.auto import AutoModelForTPU

        return AutoModelForTPU.from_pretrained(
            self.source.name,
            backend=self.backend,
            task=task,
            dtype=self.options.dtype,
            revision=self.source.revision,
            local_files_only=not self.source.remote_files,
            trust_remote_code=self.options.trust_remote_code,
            quantization=self.options.quantization,
            parallelism=self.options.parallelism,
        )


def open_checkpoint(
    name: str,
    options: LoadOptions | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
    backend: str = "jax",
) -> Checkpoint:
    """Find a checkpoint, downloading it if needed.

    Args:
        name: Hub id, local folder or "demo".
        options: how the model will be loaded; None: the defaults.
        revision: branch, tag or commit on the Hub.
        token: Hub token.
        local_files_only: do not use the network.
        backend: the backend that will load the model.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
    """
    from hfax.load.source import resolve_checkpoint

    options = options or LoadOptions()
    source = resolve_checkpoint(
        name,
        revision=revision,
        token=token,
        local_files_only=local_files_only,
        allow_code=options.trust_remote_code,
    )
    return Checkpoint(source=source, options=options, backend=backend)
