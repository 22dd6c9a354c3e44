"""A model's folder as transformers writes it: weights in the checkpoint's layout, and the configs beside them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from hfax.load.save import save_safetensors


def write_folder(
    folder: Path,
    module: Any,
    tensors: Mapping[str, torch.Tensor],
    generation_config: GenerationConfig,
    max_shard_size: int | str,
) -> None:
    """Write a folder that plain transformers loads back bit for bit.

    Args:
        folder: made if it is not there.
        module: that the weights belong to.
        tensors: by the module's names, tied ones once, in host memory.
        generation_config: written if the model can generate.
        max_shard_size: of one file, bytes or as "5GB".

    Raises:
        HfaxError: the folder cannot be written, or the disk is full; what was there before stays.
    """
    save_safetensors(folder, revert_weight_conversion(module, dict(tensors)), max_shard_size=max_shard_size)
    write_configs(folder, module, copy.deepcopy(module.config), generation_config)


def write_configs(folder: Path, module: Any, config: PretrainedConfig, generation_config: GenerationConfig) -> None:
    """config.json, which names the module's class, and generation_config.json if the model can generate."""
    config.architectures = [type(module).__name__]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as scratch:
        config.save_pretrained(scratch)
        if module.can_generate():
            generation_config.save_pretrained(scratch)
        for file in Path(scratch).iterdir():
            file.replace(folder / file.name)
