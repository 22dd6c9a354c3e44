"""A checkpoint in an object store: its small files are copied to this machine, its weights are read from there when wanted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfax.errors import CheckpointNotFoundError, UnsupportedOptionError
from hfax.home import hfax_home, put
from hfax.load.weight_files import (
    BUNDLE_FILE,
    check_shards,
    choose_weight_files,
    companions,
    is_gguf,
    listing,
    read_weight_map,
)
from hfax.object_storage import RemoteFile, RemoteFolder

_COPIED = ".copied"
"""The versions of the files that were copied, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteCheckpoint:
    """The files of a checkpoint in an object store.

    Args:
        folder: of this machine, with the configuration and the tokenizer.
        weight_files: safetensors files, in order.
        weight_map: tensor name to file name, from the index; None for a single file.
    """

    folder: Path
    weight_files: tuple[RemoteFile, ...]
    weight_map: Mapping[str, str] | None


def open_remote(url: str, *, revision: str | None, local_files_only: bool, allow_code: bool) -> RemoteCheckpoint:
    """Find the checkpoint of a folder's URL; arguments and errors are those of `resolve_checkpoint`."""
    if revision is not None or local_files_only:
        raise UnsupportedOptionError(
            f"{'revision' if revision is not None else 'local_files_only'} does not go with {url}.",
            "A URL names one folder, and its weights are read over the network.",
            "Omit it, or copy the folder to this machine.",
        )
    files = RemoteFolder(url).files()
    top = [name for name in files if "/" not in name]
    if "config.json" not in top:
        raise CheckpointNotFoundError(
            f"{url} has no config.json.",
            f"It is not a transformers checkpoint. It has: {listing(files)}.",
            "Pass the URL of the folder that contains config.json.",
        )
    if is_gguf(files):
        raise _must_be_copied(url, "GGUF files")
    if BUNDLE_FILE in files:
        raise _must_be_copied(url, "Bundles, whose programs are code,")
    weights = choose_weight_files(top, url)
    if weights.format != "safetensors":
        raise _must_be_copied(url, f"Weights of the format {weights.format}")
    weight_map = None
    shards: tuple[str, ...] = (weights.main,)
    if weights.is_index:
        text = files[weights.main].read().decode(errors="replace")
        weight_map = read_weight_map(text, str(files[weights.main]))
        shards = check_shards(weight_map, files, url)
    return RemoteCheckpoint(
        folder=_copy({name: files[name] for name in companions(files, allow_code)}, url),
        weight_files=tuple(files[shard] for shard in shards),
        weight_map=weight_map,
    )


def _must_be_copied(url: str, what: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(
        f"{url} cannot be loaded from its store.",
        f"{what} are read from a disk; safetensors are read from object stores.",
        "Copy the folder to this machine, and pass its path.",
    )


def _copy(files: Mapping[str, RemoteFile], url: str) -> Path:
    """The folder of this machine with these files: those that have not changed since they were copied are kept, others removed."""
    folder = hfax_home() / "checkpoints" / hashlib.sha256(url.encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    wanted = {name: file.version for name, file in files.items()}
    try:
        copied: Any = json.loads((folder / _COPIED).read_bytes())
    except (OSError, ValueError):
        copied = {}
    for name, version in wanted.items():
        path = folder / name
        if copied.get(name) != version or not path.is_file():
            path.parent.mkdir(exist_ok=True)
            put(path, files[name].read())
    for path in folder.rglob("*"):
        is_ours = path.name == _COPIED or path.name.startswith(".writing-")  # the latter another process's
        if path.is_file() and not is_ours and path.relative_to(folder).as_posix() not in wanted:
            path.unlink(missing_ok=True)
    put(folder / _COPIED, json.dumps(wanted).encode())
    return folder
