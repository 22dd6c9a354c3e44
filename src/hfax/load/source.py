"""Resolves a checkpoint name to local files.

Turns a local folder, a Hub repository id, a GGUF file or "demo" into a `CheckpointSource`: a local folder with the configuration,
the tokenizer and one weight format. It reads no tensors, and no configuration but a GGUF file's.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import os
import re
from collections.abc import Mapping
from pathlib import Path

from hfax.errors import CheckpointNotFoundError
from hfax.load.weight_files import (
    ORBAX_FOLDER,
    WeightFormat,
    check_shards,
    choose_gguf,
    choose_weight_files,
    is_gguf,
    listing,
    read_weight_map,
)
from hfax.object_storage import RemoteFile, is_url

DEMO_NAME = "demo"
"""Name of the checkpoint bundled with the package. Use "./demo" for a folder of that name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSource:
    """A checkpoint's local files.

    Args:
        name: the name as requested.
        folder: has config.json, tokenizer files and weights; transformers' `from_pretrained` accepts it. For GGUF, a folder made
            from the file's metadata, without weights.
        revision: commit of a Hub repository; None for a local folder.
        format: weight format.
        weight_files: weight files, in order.
        weight_map: tensor name to file name in `folder`, from the index; None for a single file.
        remote_files: the weight files, in order, if they are in an object store: safetensors, which are read from there.
    """

    name: str
    folder: Path
    revision: str | None
    format: WeightFormat
    weight_files: tuple[Path, ...]
    weight_map: Mapping[str, str] | None
    remote_files: tuple[RemoteFile, ...] = ()

    @property
    def safetensors_files(self) -> tuple[Path | RemoteFile, ...]:
        """The weight files of the format safetensors, in order."""
        return self.remote_files or self.weight_files


def resolve_checkpoint(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    allow_code: bool = False,
) -> CheckpointSource:
    """Find a checkpoint, downloading missing files.

    Args:
        name_or_path: a folder, a Hub repository id ("Qwen/Qwen3-0.6B"), or "demo"; the URL of a folder in an object store
            ("gs://bucket/folder", "s3://…", "hf://…"); or a GGUF file: its path, "owner/repo/file.gguf", or
            "owner/repo:Q4_K_M" for the repository's only one of that name.
        revision: branch, tag or commit of a Hub repository; its main branch if None. Ignored for folders.
        token: Hub token for private and gated repositories; None uses the token stored by `hf auth login`, False sends none.
        cache_dir: Hub cache folder; None: huggingface_hub's default.
        local_files_only: use only the cache.
        allow_code: also fetch the repository's Python files.

    Raises:
        CheckpointNotFoundError: no such folder, repository or revision; no config.json; no supported weights; or not
            cached while offline.
        CheckpointAccessError: the repository is gated or private and the token has no access.
        CheckpointCorruptError: a shard index is unreadable or names missing files; or a GGUF file is damaged.
        UnsupportedModelError: a GGUF file's architecture is not known.
        HfaxError: the disk is full.
    """
    name = os.fspath(name_or_path)
    if is_url(name):
        from hfax.load.remote_checkpoint import open_remote

        remote = open_remote(name, revision=revision, local_files_only=local_files_only, allow_code=allow_code)
        return CheckpointSource(
            name=name,
            folder=remote.folder,
            revision=None,
            format="safetensors",
            weight_files=(),
            weight_map=remote.weight_map,
            remote_files=remote.weight_files,
        )
    if name == DEMO_NAME:
        return _open_folder(name, Path(str(importlib.resources.files("hfax").joinpath("demo"))), None)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _open_folder(name, folder, None)
    if folder.is_file() and folder.suffix == ".gguf":
        beside = [path.name for path in folder.parent.iterdir()]
        return _open_gguf(name, folder.parent, choose_gguf(beside, folder.name, str(folder.parent)), None)
    if folder.exists():
        raise CheckpointNotFoundError(
            f"{name} is a file, not a checkpoint folder.",
            "A checkpoint is a folder with config.json, tokenizer files and weights.",
            f"Pass {folder.parent} if the other files are there.",
        )
    reject_missing_path(name)
    from hfax.load.hub import fetch_checkpoint

    gguf = _GGUF_ON_HUB.fullmatch(name)
    wanted = None if gguf is None else gguf["tag"] or gguf["file"]
    snapshot = fetch_checkpoint(
        name if gguf is None else gguf["repo"],
        revision=revision,
        token=token,
        cache_dir=None if cache_dir is None else Path(cache_dir),
        local_files_only=local_files_only,
        allow_code=allow_code,
        gguf=wanted,
    )
    return _open_folder(name, snapshot, snapshot.name, wanted)


_GGUF_ON_HUB = re.compile(r"(?P<repo>[^/:]+/[^/:]+)(?::(?P<tag>[\w.-]+)|/(?P<file>[^:]+\.gguf))")


def names_gguf(name_or_path: str | os.PathLike[str]) -> bool:
    """Whether a name can only be a GGUF model's: a file, a folder without other weights, or a file of a Hub repository."""
    name = os.fspath(name_or_path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return is_gguf([path.name for path in folder.iterdir()])
    return name.endswith(".gguf") or (not folder.exists() and _GGUF_ON_HUB.fullmatch(name) is not None)


def _open_folder(name: str, folder: Path, commit: str | None, gguf: str | None = None) -> CheckpointSource:
    names = {path.name for path in folder.iterdir() if path.is_file() or path.name == ORBAX_FOLDER}
    where = f"{name} ({folder})" if commit or name == DEMO_NAME else str(folder)
    if gguf is not None or is_gguf(names):
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        return _open_gguf(name, folder, choose_gguf(files, gguf, where), commit)
    if "config.json" not in names:
        raise CheckpointNotFoundError(
            f"{where} has no config.json.",
            f"It is not a transformers checkpoint. It has: {listing(names)}.",
            "Pass the folder that contains config.json; convert original or consolidated weights first.",
        )
    weights = choose_weight_files(names, where)
    weight_map = None
    shards: tuple[str, ...] = (weights.main,)
    if weights.is_index:
        index = folder / weights.main
        weight_map = read_weight_map(index.read_text(encoding="utf-8", errors="replace"), str(index))
        present = {shard for shard in set(weight_map.values()) if (folder / shard).is_file()}
        shards = check_shards(weight_map, present, where)
    return CheckpointSource(
        name=name,
        folder=folder,
        revision=commit,
        format=weights.format,
        weight_files=tuple(folder / shard for shard in shards),
        weight_map=weight_map,
    )


def _open_gguf(name: str, folder: Path, files: tuple[str, ...], commit: str | None) -> CheckpointSource:
    from hfax.load.gguf.companions import companion_folder  # imports transformers, which builds the tokenizer
    from hfax.load.gguf.model import GgufModel

    paths = tuple(folder / file for file in files)
    return CheckpointSource(
        name=name,
        folder=companion_folder(GgufModel(paths)),
        revision=commit,
        format="gguf",
        weight_files=paths,
        weight_map=None,
    )


def reject_missing_path(name: str) -> None:
    """Raise for a name that can only be a path, if nothing is there. Imports no framework, so commands can ask first.

    Raises:
        CheckpointNotFoundError: names what is in the folder instead.
    """
    path = Path(name).expanduser()
    if name != DEMO_NAME and not is_url(name) and not path.exists() and (path.suffix == ".json" or _is_path(name)):
        raise CheckpointNotFoundError(
            f"There is no {'file' if path.suffix in ('.gguf', '.json') else 'folder'} {path.absolute()}.",
            "The name looks like a path, not a Hub repository (owner/name).",
            f"Check the spelling and the working directory. {_beside(path)}",
        )


def _is_path(name: str) -> bool:
    """Whether a name that is not an existing folder can only be a path."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name.startswith(("/", ".", "~")) or name.endswith(("/", "\\")):
        return True
    if gguf := _GGUF_ON_HUB.fullmatch(name):
        name = gguf["repo"]
    elif name.endswith(".gguf"):
        return True
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def _beside(folder: Path) -> str:
    parent = folder.parent
    if not parent.is_dir():
        return f"{parent} does not exist either."
    return f"{parent.absolute()} has: {listing([path.name for path in parent.iterdir() if path.is_dir()])}."
