"""The folder that stands for a GGUF file's config and tokenizer: what transformers' `from_pretrained` reads, without weights.

It is written once, from the file's metadata, to hfax's cache, under a digest of the metadata; what loads a checkpoint's config,
tokenizer or chat template then needs no other way for GGUF.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import AutoConfig, PreTrainedTokenizerFast

from hfax import __version__
from hfax.errors import CheckpointCorruptError, HfaxError
from hfax.home import hfax_home
from hfax.load.gguf.config import read_config, read_generation_config
from hfax.load.gguf.model import GgufModel

logger = logging.getLogger(__name__)

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def companion_folder(model: GgufModel) -> Path:
    """A folder with the model's config.json, generation_config.json, and tokenizer files if transformers can build one.

    Raises:
        UnsupportedModelError: the architecture has no counterpart in transformers.
        CheckpointCorruptError: the metadata do not describe a model.
        HfaxError: the folder cannot be written.
    """
    folder = hfax_home() / "gguf" / _digest(model)
    if folder.is_dir():
        return folder
    config = _make_config(model)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
        try:
            config.save_pretrained(scratch)
            (scratch / "generation_config.json").write_text(json.dumps(read_generation_config(model), indent=2) + "\n")
            _write_tokenizer(model, scratch)
            if not folder.is_dir():  # another process may have been faster
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if folder.is_dir():
            return folder
        raise HfaxError(
            f"The config and tokenizer of {model.files[0].path} could not be written to {folder.parent}.",
            f"{type(error).__name__}: {error}",
            "Free some space, or point HFAX_HOME to a folder that can be written.",
        ) from error
    return folder


def _digest(model: GgufModel) -> str:
    """Of all headers, which decide the config and the tokenizer, and of the versions that derive them."""
    found = hashlib.sha256(f"{__version__} {transformers.__version__}".encode())
    for file in model.files:
        found.update(file.read_header())
    return found.hexdigest()[:32]


def _make_config(model: GgufModel) -> Any:
    fields = read_config(model)
    try:
        return AutoConfig.for_model(**fields)
    except Exception as error:  # transformers' validation raises its own kinds
        raise CheckpointCorruptError(
            f"{model.files[0].path} does not describe a model of type {fields['model_type']!r}.",
            f"{type(error).__name__}: {error}",
            "Download the file again, or make it again with llama.cpp's convert_hf_to_gguf.py.",
        ) from error


def _write_tokenizer(model: GgufModel, folder: Path) -> None:
    """Write the tokenizer as transformers builds it from the metadata; a file without one, or of an unknown kind, gets none."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    if "tokenizer.ggml.model" not in model.metadata:
        return
    try:
        stated, options = _tokenizer_metadata(model)
        backend, _ = convert_gguf_tokenizer(model.architecture, stated)
        PreTrainedTokenizerFast(tokenizer_object=backend, **options).save_pretrained(folder)
    except OSError:
        raise
    except (
        Exception
    ) as error:  # transformers raises ValueError, KeyError, IndexError, … for vocabularies that it does not know
        logger.warning(
            "%s: transformers cannot build its tokenizer: %s: %s", model.files[0].path, type(error).__name__, error
        )


def _tokenizer_metadata(model: GgufModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `transformers.integrations.gguf.get_gguf_tokenizer` returns, from metadata that are read already."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    given = {
        key.removeprefix("tokenizer."): value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in model.metadata.items()
        if key.startswith("tokenizer.")
    }
    stated, options = (
        {name: given[key] for key, name in GGUF_TOKENIZER_MAPPING[group].items() if key in given}
        for group in ("tokenizer", "tokenizer_config")
    )
    if stated["tokenizer_type"] == "llama":
        options.setdefault("add_bos_token", True)  # as llama.cpp does for files older than the flag
    elif stated["tokenizer_type"] == "gemma4":
        options["add_bos_token"] = False  # its chat template writes the token
    for name, key in _SPECIAL.items():
        index = given.get(f"ggml.{key}_token_id")
        options[name] = None if index is None else stated["tokens"][index]
    return stated, options
