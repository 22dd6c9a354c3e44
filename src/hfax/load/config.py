"""Reads a checkpoint's config.json and generation_config.json into transformers objects. Reads no weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from hfax.demo import demo_folder
from hfax.errors import CheckpointCorruptError, InvalidInputError, UnsupportedModelError

if TYPE_CHECKING:
    from hfax.load.source import CheckpointSource

_UPDATE = "Update transformers (pip install -U transformers)"
_REGISTER = "For a class of your own, first import its module, which must call AutoConfig.register."


def read_config(source: CheckpointSource, *, trust_remote_code: bool) -> PretrainedConfig:
    """Read a checkpoint's configuration.

    Raises:
        CheckpointCorruptError: config.json is not valid.
        UnsupportedModelError: transformers does not know the model type, or it needs remote code that was not trusted.
    """
    path = source.folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointCorruptError(
            f"{path} could not be read.", f"{type(error).__name__}: {error}", "Download or save the checkpoint again."
        ) from error
    if raw.get("auto_map") and not trust_remote_code and not _is_known(raw):
        raise _untrusted(
            f"{source.name} requires its own code for model type {raw.get('model_type')!r}, which was not run."
        )
    try:
        return AutoConfig.from_pretrained(
            source.folder, trust_remote_code=trust_remote_code and bool(raw.get("auto_map"))
        )
    except Exception as error:
        if raw.get("model_type") and not _is_known(raw) and not raw.get("auto_map"):
            import transformers

            raise UnsupportedModelError(
                f"transformers {transformers.__version__} does not know model type {raw['model_type']!r} ({source.name}).",
                "The model is newer than the installed transformers, or its model_type is misspelled.",
                f"{_UPDATE}, or check model_type in config.json. {_REGISTER}",
            ) from error
        raise CheckpointCorruptError(
            f"The config of {source.name} is not valid.",
            f"{type(error).__name__}: {error}",
            "Check config.json: it needs a model_type and the fields of that type.",
        ) from error


def _untrusted(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        what,
        "Code from a checkpoint runs with all of your permissions.",
        "Review the repository's .py files; if you trust them, pass trust_remote_code=True (--trust-remote-code).",
    )


def _is_known(raw: dict[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return raw.get("model_type") in CONFIG_MAPPING


def read_generation_config(folder: Path | None, module: PreTrainedModel) -> GenerationConfig:
    """A checkpoint's generation_config.json, or the generation fields of the model's config if there is none."""
    if folder is not None and (folder / "generation_config.json").is_file():
        try:
            return GenerationConfig.from_pretrained(folder)
        except Exception as error:
            raise CheckpointCorruptError(
                f"{folder / 'generation_config.json'} is not valid.",
                f"{type(error).__name__}: {error}",
                "Fix the file, or delete it to use the defaults.",
            ) from error
    return getattr(module, "generation_config", None) or GenerationConfig.from_model_config(module.config)


def read_any_config(model: str | Path | PretrainedConfig, trust_remote_code: bool) -> PretrainedConfig:
    """A config from a Hub id, a folder, a config.json, a GGUF file, "demo", or a config object (copied).

    Raises:
        InvalidInputError: no config was found.
        UnsupportedModelError: transformers does not know the model type, or it needs code that was not trusted.
        HfaxError: a GGUF file was not found or is not readable, see `resolve_checkpoint`.
    """
    from hfax.load.source import names_gguf, resolve_checkpoint

    if isinstance(model, PretrainedConfig):
        return copy.deepcopy(model)
    path: Any = demo_folder() if model == "demo" else model
    if names_gguf(path):
        path = resolve_checkpoint(path).folder
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise _untrusted(f"{model} requires its own modelling code, which was not run.") from error
        if "does not recognize this architecture" in str(error):
            import transformers

            raise UnsupportedModelError(
                f"transformers {transformers.__version__} does not know the model type of {model}.",
                "The model is newer than the installed transformers, its model_type is misspelled, or its class is your own.",
                f"{_UPDATE}. {_REGISTER}",
            ) from error
        raise InvalidInputError(
            f"No config was found for {model!r}.",
            " ".join(str(error).split())[:300],
            "Pass a Hub id, a folder with a config.json, or a config.json; run `hf auth login` for gated repositories.",
        ) from error
