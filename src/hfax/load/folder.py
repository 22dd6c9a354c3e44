"""Writes a model folder in transformers' format: weights in the checkpoint's layout, plus the configs."""

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
    """Write a folder that plain transformers loads bit for bit.

    Args:
        folder: created if it does not exist.
        module: the module that the weights belong to.
        tensors: weights by the module's names, in host memory, tied weights once.
        generation_config: written if the model can generate.
        max_shard_size: maximum size of one file, in bytes or as a string such as "5GB".

    Raises:
        HfaxError: the folder cannot be written, or the disk is full; its previous contents are kept.
    """
    save_safetensors(folder, revert_weight_conversion(module, dict(tensors)), max_shard_size=max_shard_size)
    write_configs(folder, module, copy.deepcopy(module.config), generation_config)


def write_configs(folder: Path, module: Any, config: PretrainedConfig, generation_config: GenerationConfig) -> None:
    """Write config.json, with the module's class, and generation_config.json if the model can generate."""
    config.architectures = [type(module).__name__]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as scratch:
        config.save_pretrained(scratch)
        if module.can_generate():
            generation_config.save_pretrained(scratch)
        for file in Path(scratch).iterdir():
            file.replace(folder / file.name)
