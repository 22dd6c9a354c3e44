"""Reads legacy PyTorch checkpoints (`pytorch_model*.bin`) as torch tensors.

These files are pickles, and unpickling can run arbitrary code. Only torch's restricted unpickler is used, which accepts
tensors and a few plain types. This module knows nothing about names or models.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import torch

from hfax.errors import CheckpointCorruptError


def read_pytorch_bin(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """All tensors of the files, memory-mapped where the format supports it.

    Raises:
        CheckpointCorruptError: a file is truncated, is not a dict of tensors, or would run code when unpickled.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        content = _load(path)
        if isinstance(content, dict) and set(content) == {"state_dict"}:
            content = content["state_dict"]
        if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
            raise CheckpointCorruptError(
                f"{path} is not a state dict.",
                f"It holds a {type(content).__name__}; training checkpoints and pickled modules are not supported.",
                "Save the model with `save_pretrained`, or its `state_dict()` with `torch.save`.",
            )
        tensors.update(content)
    return tensors


def _load(path: Path) -> object:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format before torch 1.6
    except pickle.UnpicklingError as error:
        reason = _reason(error)
        if "GLOBAL" in reason or "blocked" in reason or "Can only" in reason:
            raise _needs_code(path, reason) from error
        raise _unreadable(path, reason) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise _unreadable(path, _reason(error)) from error


def _reason(error: BaseException) -> str:
    """The line of torch's message that describes the problem."""
    lines = [line.strip() for line in str(error).splitlines()]
    advice = ("Weights only load failed", "Please file an issue", "Check the documentation")
    return next((line for line in lines if line and not line.startswith(advice)), type(error).__name__)


def _needs_code(path: Path, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{path} was not loaded because unpickling it could run code.",
        f"A .bin checkpoint is a pickle, which can contain arbitrary code; torch reported: {reason}",
        "Use the repository's safetensors files. If you trust the file's author, convert it with transformers "
        "(`save_pretrained` writes safetensors).",
    )


def _unreadable(path: Path, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{path} ({path.stat().st_size if path.exists() else 0} bytes) cannot be read.",
        f"It is truncated or not a PyTorch checkpoint; torch reported: {reason}",
        f"Delete {path.name} and download or save it again.",
    )
