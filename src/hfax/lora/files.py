"""Reads and writes adapter folders in PEFT format, as arrays by name. Knows nothing about models."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch

from hfax.errors import CheckpointCorruptError, CheckpointNotFoundError, HfaxError, InvalidInputError
from hfax.load.pytorch_bin import read_pytorch_bin
from hfax.lora.config import CONFIG_NAME, LoraConfig

_WEIGHTS, _OLD_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."


def find_adapter(name_or_path: str | Path, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """The adapter's local folder, downloaded from the Hub if the name is not a folder.

    Raises:
        CheckpointNotFoundError: no such adapter.
        InvalidInputError: not a name.
    """
    if not isinstance(name_or_path, (str, Path)):
        raise InvalidInputError(
            f"A {type(name_or_path).__name__} is not an adapter.",
            "Adapters are loaded one by one, from a folder or the Hub.",
            "Pass a folder or a Hub id; call load_adapter once for each of several adapters.",
        )
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    try:
        patterns = [CONFIG_NAME, _WEIGHTS, _OLD_WEIGHTS]
        found = huggingface_hub.snapshot_download(
            str(name_or_path), revision=revision, token=token, allow_patterns=patterns
        )
    except (OSError, HFValidationError, ValueError) as error:
        raise CheckpointNotFoundError(
            f"There is no adapter {name_or_path}.",
            f"It is not a folder, and the Hub returned {type(error).__name__}: {str(error).splitlines()[0]}",
            "Check the spelling; run `hf auth login` for private repositories.",
        ) from error
    return Path(found)


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The adapter's tensors, keyed by the model's layer names.

    Raises:
        CheckpointNotFoundError: no adapter weights.
        CheckpointCorruptError: the weights cannot be read.
    """
    path = folder / _WEIGHTS
    if path.is_file():
        try:
            stored = safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointCorruptError(
                f"{path} could not be read.", str(error), "Download or copy it again; it is incomplete."
            ) from error
    elif (folder / _OLD_WEIGHTS).is_file():
        stored = read_pytorch_bin([folder / _OLD_WEIGHTS])
    else:
        raise CheckpointNotFoundError(
            f"{folder} has no {_WEIGHTS}.",
            f"An adapter folder has {CONFIG_NAME} and weights.",
            "Pass an adapter folder saved by PEFT or hfax.",
        )
    named = {
        name.removeprefix(_PREFIX).replace(".base_layer.bias", ".bias"): tensor
        for name, tensor in stored.items()
        if ".original_module." not in name  # PEFT's copy of the base weight
    }
    return {f"{n}.weight" if n.endswith("lora_magnitude_vector") else n: t for n, t in named.items()}


def write_adapter(folder: Path, config: LoraConfig, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an adapter in PEFT format; the folder changes only after everything is on disk.

    Raises:
        HfaxError: the folder cannot be written, or the disk is full; its previous contents are kept.
    """
    tensors = {_PREFIX + name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    scratch = [folder / f".{uuid.uuid4().hex}.{name}" for name in (_WEIGHTS, CONFIG_NAME)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, scratch[0], metadata={"format": "pt"})
        scratch[1].write_text(json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        scratch[0].replace(folder / _WEIGHTS)
        scratch[1].replace(folder / CONFIG_NAME)
    except (OSError, safetensors.SafetensorError) as error:
        raise HfaxError(
            f"The adapter could not be saved to {folder}.",
            f"{type(error).__name__}: {error}",
            "Check the path, its permissions and the free space. The earlier save is unchanged.",
        ) from error
    finally:
        for path in scratch:
            path.unlink(missing_ok=True)
