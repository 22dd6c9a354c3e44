"""The layers of an unfinished quantization, on the disk, so that an interrupted one goes on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hfax.errors import HfaxError, InvalidInputError
from hfax.load.save import save_safetensors
from hfax.load.save_compressed import Scheme
from hfax.load.source import CheckpointSource
from hfax.load.store import TensorStore, open_store

_FOLDER = ".quantizing"
_SETTINGS = "settings.json"
_SCHEMES = "schemes.json"


class Parts:
    """The finished layers of a quantization, each a folder of its own.

    Args:
        folder: that the whole checkpoint will be written to.
        settings: everything that the numbers depend on.

    Raises:
        InvalidInputError: the folder has parts of a quantization with other settings.
        HfaxError: it cannot be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder / _FOLDER
        written = self._folder / _SETTINGS
        try:
            if written.is_file():
                before = json.loads(written.read_text(encoding="utf-8"))
                if before != settings:
                    raise _other_settings(self._folder, before, settings)
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch = self._folder / f".{_SETTINGS}"
            scratch.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            scratch.replace(written)
        except (OSError, ValueError) as error:
            raise HfaxError(
                f"{self._folder} cannot be used.",
                f"{type(error).__name__}: {error}",
                "Check the path and its permissions, or remove the folder.",
            ) from error

    def has(self, number: int) -> bool:
        """Whether a part is finished: its schemes are written last."""
        return (self._of(number) / _SCHEMES).is_file()

    def write(self, number: int, tensors: Mapping[str, torch.Tensor], schemes: Mapping[str, Scheme]) -> None:
        """Write a part.

        Raises:
            HfaxError: the disk is full, or the folder cannot be written.
        """
        folder = self._of(number)
        save_safetensors(folder, tensors)
        content = json.dumps({name: dataclasses.asdict(scheme) for name, scheme in schemes.items()})
        try:
            scratch = folder / f".{_SCHEMES}"
            scratch.write_text(content, encoding="utf-8")
            scratch.replace(folder / _SCHEMES)
        except OSError as error:
            raise HfaxError(f"{folder} cannot be written.", str(error), "Free some space, and start again.") from error

    def schemes(self, number: int) -> dict[str, Scheme]:
        """The schemes of a finished part, by the name of the linear layer."""
        found = json.loads((self._of(number) / _SCHEMES).read_text(encoding="utf-8"))
        return {name: Scheme(**fields) for name, fields in found.items()}

    def store(self, number: int) -> TensorStore:
        """The stored tensors of a finished part."""
        folder = self._of(number)
        files = tuple(sorted(folder.glob("*.safetensors")))
        return open_store(
            CheckpointSource(
                name=str(folder),
                folder=folder,
                revision=None,
                format="safetensors",
                weight_files=files,
                weight_map=None,
            )
        )

    def remove(self) -> None:
        """Remove all parts: the whole checkpoint is written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _of(self, number: int) -> Path:
        return self._folder / f"{number:05}"


def digest_of(*contents: bytes) -> str:
    """A short name for some content."""
    found = hashlib.sha256()
    for content in contents:
        found.update(content)
    return found.hexdigest()[:16]


def _other_settings(folder: Path, before: Any, settings: Mapping[str, Any]) -> InvalidInputError:
    with contextlib.suppress(AttributeError):
        changed = [name for name in settings if before.get(name) != settings[name]]
        return InvalidInputError(
            f"{folder.parent} has an unfinished quantization with another {', '.join(changed)}.",
            f"Its {changed[0]} was {before.get(changed[0])!r}; it is {settings[changed[0]]!r} now.",
            f"Pass the same options to finish it, use another folder, or remove {folder}.",
        )
    return InvalidInputError(f"{folder} is not of hfax.", "Its settings are no object.", "Remove it.")
