"""Programs that were compiled on other machines: folders or object stores that are only read, named by HFAX_PROGRAMS.

`HFAX_PROGRAMS=gs://bucket/programs#sha256=…` (several: separated by commas) names a folder by its URL or path, with the digest of
its manifest, which has the digest of each file. Programs are code: a file that the manifest does not name, or that has another
digest, is not opened, and a folder without a digest is refused. `hfax warm --share` writes such folders.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hfax.errors import HfaxError, InvalidInputError
from hfax.home import put
from hfax.object_storage import RemoteFile, RemoteFolder, is_url

logger = logging.getLogger(__name__)

VARIABLE = "HFAX_PROGRAMS"
_MANIFEST = "programs.json"
_FORMAT = 1
_NAMED = re.compile(r"(?P<where>.+)#sha256=(?P<digest>[0-9a-f]{64})", re.DOTALL)


def find_shared(name: str) -> bytes | None:
    """The contents of a file in one of the shared folders; None if none has it.

    Args:
        name: such as "programs/….program", or "starts/….json".

    Raises:
        InvalidInputError: HFAX_PROGRAMS names a folder without a digest, or with another one than the manifest has.
    """
    for folder in shared_folders():
        if (data := folder.read(name)) is not None:
            return data
    return None


def shared_names(prefix: str) -> list[str]:
    """The names of the shared files that begin with `prefix`.

    Raises:
        InvalidInputError: see `find_shared`.
    """
    return sorted({name for folder in shared_folders() for name in folder.names if name.startswith(prefix)})


def shared_folders() -> tuple[SharedFolder, ...]:
    """The folders that HFAX_PROGRAMS names.

    Raises:
        InvalidInputError: see `find_shared`.
    """
    return _folders(os.environ.get(VARIABLE, ""))


@functools.lru_cache(maxsize=4)
def _folders(text: str) -> tuple[SharedFolder, ...]:
    return tuple(SharedFolder.named(one.strip()) for one in text.split(",") if one.strip())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedFolder:
    """A folder of programs.

    Args:
        where: its path or URL.
        digest: SHA-256 of its manifest, hexadecimal.
    """

    where: str
    digest: str

    @classmethod
    def named(cls, text: str) -> SharedFolder:
        """The folder that a text such as "gs://bucket/programs#sha256=…" names.

        Raises:
            InvalidInputError: the text has no digest.
        """
        found = _NAMED.fullmatch(text)
        if found is None:
            raise InvalidInputError(
                f"{text!r} names shared programs without the digest of their manifest.",
                "Programs are code, and whoever can write there could run theirs here.",
                "Append #sha256=… as printed by `hfax warm --share`.",
            )
        return cls(where=found["where"], digest=found["digest"])

    def __str__(self) -> str:
        return f"{self.where}#sha256={self.digest}"

    @functools.cached_property
    def names(self) -> Mapping[str, str]:
        """The digests of its files, by name; empty if it cannot be reached.

        Raises:
            InvalidInputError: the manifest has another digest.
        """
        try:
            data = self._read(_MANIFEST)
        except (OSError, HfaxError) as error:
            logger.warning("shared programs in %s are not used: %s", self.where, error)
            return {}
        if (found := hashlib.sha256(data).hexdigest()) != self.digest:
            raise InvalidInputError(
                f"The manifest of the shared programs in {self.where} has the digest {found}, not {self.digest}.",
                "The programs were made again, or somebody changed them.",
                f"Set {VARIABLE} to what `hfax warm --share` printed last, if the programs are yours.",
            )
        content: Any = json.loads(data)
        return content["files"] if content["format"] == _FORMAT else {}

    def read(self, name: str) -> bytes | None:
        """A file's contents; None if the folder does not have it, or something else under its name."""
        if (expected := self.names.get(name)) is None:
            return None
        try:
            data = self._read(name)
        except (OSError, HfaxError) as error:
            logger.warning("%s of the shared programs in %s is not used: %s", name, self.where, error)
            return None
        if hashlib.sha256(data).hexdigest() != expected:
            logger.warning("%s of the shared programs in %s is not what the manifest says: ignored", name, self.where)
            return None
        return data

    @functools.cached_property
    def _remote(self) -> dict[str, RemoteFile]:
        return RemoteFolder(self.where).files()

    def _read(self, name: str) -> bytes:
        if not is_url(self.where):
            return (Path(self.where).expanduser() / name).read_bytes()
        if name not in self._remote:
            raise FileNotFoundError(f"there is no {self.where}/{name}")
        return self._remote[name].read()


def share(files: Mapping[str, Path], where: str) -> SharedFolder:
    """Copy files into a shared folder, the manifest last.

    Args:
        files: paths on this machine by their names in the folder.
        where: its path or URL. For one that has programs already, with its digest: they are kept.

    Raises:
        InvalidInputError: it has programs, and the digest is missing or wrong.
        HfaxError: it cannot be written.
    """
    before: Mapping[str, str] = {}
    if _NAMED.fullmatch(where):
        old = SharedFolder.named(where)
        where, before = old.where, old.names
    elif _has_manifest(where):
        raise InvalidInputError(
            f"{where} holds shared programs already.",
            "Its manifest may be somebody else's, and would be signed again with yours.",
            "Choose an empty folder; or append the #sha256=… that was printed when they were written, to add to them.",
        )
    digests = dict(before)
    try:
        for name, path in files.items():
            data = path.read_bytes()
            digests[name] = hashlib.sha256(data).hexdigest()
            _write(where, name, data)
        manifest = json.dumps({"format": _FORMAT, "files": digests}, sort_keys=True).encode()
        _write(where, _MANIFEST, manifest)
    except OSError as error:
        raise HfaxError(
            f"Programs could not be written to {where}.", str(error), "Check its permissions and free space."
        ) from error
    return SharedFolder(where=where, digest=hashlib.sha256(manifest).hexdigest())


def _has_manifest(where: str) -> bool:
    if is_url(where):
        return _MANIFEST in RemoteFolder(where).files()
    return (Path(where).expanduser() / _MANIFEST).exists()


def _write(where: str, name: str, data: bytes) -> None:
    if is_url(where):
        RemoteFolder(where).write(name, data)
        return
    path = Path(where).expanduser() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, data)


def keep(path: Path, data: bytes) -> None:
    """Keep a shared file in the cache of this machine, so that it is not fetched again; a full or read-only disk is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        put(path, data)
    except OSError as error:
        logger.info("%s was not kept: %s", path, error)


def names_in(folder: Path, paths: Iterable[Path]) -> dict[str, Path]:
    """Paths by their names relative to a folder, those outside of it left out."""
    return {path.relative_to(folder).as_posix(): path for path in paths if path.is_relative_to(folder)}
